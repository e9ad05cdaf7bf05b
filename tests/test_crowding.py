import os
import warnings

import numpy as np
import pytest
from probes import workers_of

from daskps import DistributedCNNClassifier
from daskps._crowding import Place, crowding
from daskps._machine import cores_of_process

DIGITS = np.random.default_rng(0).normal(size=(64, 4)), np.arange(64) % 2


def test_cores_are_those_of_the_process():
    assert set(cores_of_process()) == os.sched_getaffinity(0)


@pytest.mark.parametrize("places", [
    [],
    [Place("a", (0, 1), 2)],
    [Place("a", (0, 1), 1), Place("a", (0, 1), 1)],
    [Place("a", (0,), 1), Place("a", (1,), 1)],  # each bound to a core of its own
    [Place("a", (0, 1), 2), Place("b", (0, 1), 2)],
], ids=str)  # fmt: skip
def test_a_core_for_every_thread_is_not_crowded(places):
    assert crowding(places) == ""


@pytest.mark.parametrize(("places", "what"), [
    ([Place("a", (0,), 2)], "2 threads on 1 core(s) of a"),
    ([Place("a", (0, 1), 2)] * 2, "4 threads on 2 core(s) of a"),
    ([Place("a", (0, 1), 1), Place("b", (0,), 4), Place("a", (0, 1), 2)],
     "3 threads on 2 core(s) of a, 4 threads on 1 core(s) of b"),
])  # fmt: skip
def test_every_crowded_host_is_named(places, what):
    assert f"with {what}, which slows" in crowding(places)


def bind(client, cores):
    """Bind the thread of every worker, in which its rank will be, to these cores."""
    tasks = [
        client.submit(os.sched_setaffinity, 0, cores, workers=[address], pure=False)
        for address in workers_of(client)
    ]
    client.gather(tasks)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_fit_warns_where_its_workers_share_a_core(client, n_workers):
    bind(client, {min(cores_of_process())})
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            DistributedCNNClassifier(n_workers=n_workers, client=client).fit(*DIGITS)
    finally:
        bind(client, set(cores_of_process()))
    crowded = [str(w.message) for w in caught if "core(s)" in str(w.message)]
    expected = ["The ranks compute with 2 threads on 1 core(s) of 127.0.0.1"] * (n_workers == 2)
    assert [text.split(",")[0] for text in crowded] == expected
