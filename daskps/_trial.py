"""One fit of an experiment, in a fresh interpreter: its speed, accuracy, start-up and memory."""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from daskps._workload import Split

# What turns up the threads of a process, and what its allocator keeps; Dask sets these for workers.
_SINGLE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}
_ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")
# A short fit before the one that counts imports what is needed, and is what start-up is taken from.
_WARM_UP_ROWS = 256
# Enough to know the training accuracy to half a percent.
_MOST_SCORED = 10_000
_LONGEST_SECONDS = 3600


@dataclass(frozen=True)
class Trial:
    """What is fitted.

    Attributes
    ----------
    data : {'digits', 'fashion-mnist', 'synthetic'}
    rows : int or None
        Training rows; None for all.
    batch_size, epochs : int
    sync_every : {'batch', 'epoch'}, int or None
        None for plain skorch in this process.
    workers, threads : int
        Workers, and threads of each.
    emulate : tuple of float or None
        Waits for (c0, c1) seconds in place of computing.
    stand_in : float or None
        Computes so many images of a stand-in for each row, in place of the net that is asked about.
    """

    data: str
    rows: int | None
    batch_size: int
    epochs: int
    sync_every: str | int | None = None
    workers: int = 1
    threads: int = 1
    emulate: tuple[float, float] | None = None
    stand_in: float | None = None

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Trial:
        """From what ``dataclasses.asdict`` made of it, and JSON of that."""
        emulate = plain["emulate"]
        return cls(**{**plain, "emulate": None if emulate is None else tuple(emulate)})


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes
    ----------
    trial : Trial
    rows : int
        Training rows in each epoch.
    epoch_seconds : float
        The median of the epochs.
    startup_seconds : float
        From nothing, the cluster included, to the first step of the first fit.
    accuracy : dict of str to float
        'train' and 'test'; empty where another net took the place of the one that is asked about.
    memory : dict of str to int
        Peak bytes of 'client', 'scheduler' and 'worker', the largest of them.
    report : dict or None
        `FitReport.to_dict`.
    """

    trial: Trial
    rows: int
    epoch_seconds: float
    startup_seconds: float
    accuracy: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    report: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Outcome:
        """From what ``dataclasses.asdict`` made of it, and JSON of that."""
        return cls(**{**plain, "trial": Trial.from_dict(plain["trial"])})


def in_a_process(trial: Trial) -> Outcome:
    """Run a trial in a fresh interpreter, whose memory and threads are then its own.

    Raises
    ------
    RuntimeError
        If it failed, with what it printed; or took longer than an hour.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _ALLOCATOR}
    command = [sys.executable, "-m", "daskps._trial", json.dumps(asdict(trial))]
    with tempfile.TemporaryDirectory(prefix="daskps-") as folder:
        process = subprocess.Popen(
            command,
            env={**kept, **_SINGLE_THREAD, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=_LONGEST_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{trial} was not done after {_LONGEST_SECONDS} s") from error
        finally:
            _end_session(process)
    if process.returncode:
        raise RuntimeError(f"{trial} failed:\n{errors}")
    return Outcome.from_dict(json.loads(out.splitlines()[-1]))


def _end_session(process: subprocess.Popen) -> None:
    """Its scheduler and workers are processes of their own, and would outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def run(trial: Trial) -> Outcome:
    """Fit, here and now."""
    from daskps import _workload

    split = _workload.load(trial.data, trial.rows)
    net = _net(trial, split)
    if trial.sync_every is None:
        return _plainly(trial, split, net)
    return _on_cluster(trial, split, net, trial.sync_every)


def _net(trial: Trial, split: Split) -> Any:
    from daskps import _workload

    size = split, trial.batch_size, trial.epochs
    if trial.emulate is not None:
        return _workload.waiting_net(*size, *trial.emulate)
    if trial.stand_in is not None:
        return _workload.stand_in_net(*size, trial.stand_in)
    return _workload.new_net(*size)


def _plainly(trial: Trial, split: Split, net: Any) -> Outcome:
    import torch
    from sklearn.base import clone

    from daskps._machine import peak_memory

    torch.set_num_threads(trial.threads)
    clone(net).fit(split.X_train[:_WARM_UP_ROWS], split.y_train[:_WARM_UP_ROWS])
    net.fit(split.X_train, split.y_train)
    memory = {"client": peak_memory()}
    return Outcome(
        trial,
        len(split.X_train),
        statistics.median(net.history[:, "dur"]),
        0.0,
        _accuracy(trial, net, split),
        memory,
    )


def _on_cluster(trial: Trial, split: Split, net: Any, sync_every: str | int) -> Outcome:
    from distributed import Client
    from distributed.deploy.subprocess import SubprocessCluster
    from sklearn.base import clone

    from daskps import DistributedCNNClassifier

    logging.getLogger("distributed").setLevel(logging.ERROR)
    begun = perf_counter()
    # The scheduler has a process of its own, so that its memory can be told from the client's.
    cluster = SubprocessCluster(
        dashboard_address=":0", n_workers=trial.workers, threads_per_worker=trial.threads
    )
    with cluster, Client(cluster) as client:
        client.wait_for_workers(trial.workers)
        started = perf_counter() - begun
        clf = DistributedCNNClassifier(
            net, sync_every=sync_every, n_workers=trial.workers, client=client, random_state=0
        )
        warmed = clone(clf).fit(split.X_train[:_WARM_UP_ROWS], split.y_train[:_WARM_UP_ROWS])
        clf.fit(split.X_train, split.y_train)
        memory = _memory(client)
    report = clf.report_
    return Outcome(
        trial,
        len(split.X_train),
        statistics.median(report.epoch_seconds),
        started + sum(warmed.report_.startup_seconds.values()),
        _accuracy(trial, clf, split),
        memory,
        report.to_dict(),
    )


def _memory(client: Any) -> dict[str, int]:
    from daskps._machine import peak_memory

    return {
        "client": peak_memory(),
        "scheduler": client.run_on_scheduler(peak_memory),
        "worker": max(client.run(peak_memory).values()),
    }


def _accuracy(trial: Trial, estimator: Any, split: Split) -> dict[str, float]:
    if trial.emulate is not None or trial.stand_in is not None:
        return {}
    return {
        "train": float(estimator.score(split.X_train[:_MOST_SCORED], split.y_train[:_MOST_SCORED])),
        "test": float(estimator.score(split.X_test, split.y_test)),
    }


if __name__ == "__main__":
    print(json.dumps(asdict(run(Trial.from_dict(json.loads(sys.argv[1]))))))
