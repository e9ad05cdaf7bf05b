import pickle
import subprocess
import sys

import numpy as np
from dask.utils import funcname, key_split

from daskps import DistributedCNNClassifier
from daskps._late import Late


def test_function_is_imported_when_it_is_called():
    late = pickle.loads(pickle.dumps(Late("numpy", "add")))
    assert late(1, 2) == np.add(1, 2)


def test_name_of_its_tasks():
    assert funcname(Late("module", "_predict_block")) == "daskps-predict-block"
    assert key_split(f"{funcname(Late('module', 'Predictor'))}-{'0a' * 16}") == "daskps-predictor"


def test_subclass_of_a_script_is_pickled_with_its_own_state():
    class Own(DistributedCNNClassifier):
        def __getstate__(self):
            return {**super().__getstate__(), "more": 1}

    made = pickle.loads(pickle.dumps(Own(sync_every=3)))
    assert (type(made).__name__, made.sync_every, made.more) == ("Own", 3, 1)


def test_a_schedulers_process_passes_estimators_on():
    """Where torch is not loaded; what comes out of it is what came in."""
    data = pickle.dumps(DistributedCNNClassifier(sync_every=3))
    script = f"""
import asyncio, pickle, sys
from distributed import Scheduler
async def main():
    async with Scheduler(dashboard=False, port=0) as scheduler:
        passed = pickle.loads({data!r})
        assert pickle.dumps(passed) == {data!r}
        assert not {{"torch", "skorch", "sklearn"}} & set(sys.modules)
        return type(passed).__name__
print(asyncio.run(main()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.split() == ["Passed"], done.stderr
