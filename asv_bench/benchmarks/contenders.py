"""What one could do with two cores to train a CNN, each way in processes of its own.

What a contender needs it imports itself: whoever starts them needs no torch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

TUNED = {"MALLOC_TRIM_THRESHOLD_": "268435456", "MALLOC_MMAP_THRESHOLD_": "268435456"}

_LONGEST_SECONDS = 600

# One of the functions below, its arguments, and variables that its interpreter starts with.
Contender = tuple[str, list, dict[str, str]]

# Name, the function below, its arguments, and whether it also runs with the tuned allocator.
CONTENDERS: list[tuple[str, str, list, bool]] = [
    ("skorch, 1 thread", "skorch", [1], True),
    ("skorch, 2 threads", "skorch", [2], False),
    ("plain loop, 1 thread", "loop", [1], True),
    ("plain loop, 2 threads", "loop", [2], True),
    ("2 loops that never talk", "pair", ["silent"], True),
    ("2 loops, barrier each step", "pair", ["barrier"], True),
    ("DDP, gloo", "pair", ["ddp"], True),
    ("daskps batch, shared memory", "daskps", ["batch", "shared-memory"], False),
    ("daskps batch, comm", "daskps", ["batch", "comm"], False),
    ("daskps H=8, shared memory", "daskps", [8, "shared-memory"], False),
    ("daskps epoch, shared memory", "daskps", ["epoch", "shared-memory"], False),
    ("daskps epoch, comm", "daskps", ["epoch", "comm"], False),
    # Without a cluster of the user's: daskps starts one that measures itself less often.
    ("daskps batch, its own cluster", "daskps", ["batch", "shared-memory", "own"], False),
    ("daskps H=8, its own cluster", "daskps", [8, "shared-memory", "own"], False),
    ("daskps epoch, its own cluster", "daskps", ["epoch", "shared-memory", "own"], False),
    # The same cores in one worker.
    ("daskps batch, 1 worker of 2 threads", "daskps", ["batch", "none", "1x2"], False),
    ("daskps epoch, 1 worker of 2 threads", "daskps", ["epoch", "none", "1x2"], False),
]


def _lineup() -> Iterator[tuple[str, Contender]]:
    for name, function, arguments, both in CONTENDERS:
        yield name, (function, arguments, {})
        if both:
            yield f"{name}, tuned", (function, arguments, TUNED)


LINEUP = dict(_lineup())


class Trained(NamedTuple):
    """What a contender has reached: its second epoch's speed, and how well it predicts if it is scored."""

    images_per_second: float
    train_accuracy: float | None = None
    test_accuracy: float | None = None


def in_fresh_interpreter(contender: Contender, batch_size: int, n_rows: int, scored: bool) -> Trained:
    """Let a contender run there; predictions are scored after the time that counts.

    Raises
    ------
    RuntimeError
        If it failed, with what it said.
    """
    function, arguments, environment = contender
    bare = {key: value for key, value in os.environ.items() if key not in TUNED}
    bare |= {"OMP_WAIT_POLICY": "passive"} | environment
    asked = json.dumps([function, scored, batch_size, n_rows, *arguments])
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.contenders", asked],
        cwd=Path(__file__).parents[1],
        env=bare,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=_LONGEST_SECONDS)
    finally:
        _end_session(process)
    if process.returncode:
        raise RuntimeError(f"{function}{arguments} failed:\n{errors}")
    return Trained(*json.loads(out.splitlines()[-1]))


def _end_session(process: subprocess.Popen) -> None:
    """What a contender started may hang, and would disturb all that is measured after it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows(n_rows: int) -> tuple[Any, Any]:
    """Training rows of Fashion-MNIST, or random ones where it is not installed."""
    X, _, y, _ = _images(n_rows)
    return X[:n_rows], y[:n_rows]


def _images(n_rows: int) -> tuple[Any, Any, Any, Any]:
    import numpy as np

    from daskps import datasets

    try:
        return datasets.load_fashion_mnist()
    except FileNotFoundError:
        generator = np.random.default_rng(0)
        X = generator.random((n_rows, 1, 28, 28), dtype="float32")
        y = generator.integers(0, 10, n_rows)
        return X, X, y, y


def net(batch_size: int) -> Any:
    """The first of its two epochs warms up."""
    from .nets import new_net

    return new_net(batch_size, max_epochs=2, lr=0.01)


def skorch(batch_size: int, n_rows: int, threads: int) -> tuple[float, Any]:
    """Images per second of plain skorch, and what it has trained."""
    import torch

    torch.set_num_threads(threads)
    fitted = net(batch_size).fit(*rows(n_rows))
    return n_rows / fitted.history[-1, "dur"], fitted


def loop(batch_size: int, n_rows: int, threads: int) -> tuple[float, Any]:
    """Images per second of a loop of plain torch, and what it has trained."""
    import torch

    torch.set_num_threads(threads)
    trained = net(batch_size).initialize()
    seconds = train_plainly(trained, rows(n_rows), lambda module: module, lambda: None)
    return n_rows / seconds, trained


def pair(batch_size: int, n_rows: int, how: str) -> tuple[float, Any]:
    """Images per second of two processes, each on half of every batch, and what the first has trained."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (how, batch_size // 2, n_rows // 2, barrier, results, folder)
        # Daemons, so that one does not outlive the failure of the other, for which it may wait.
        processes = [
            context.Process(target=one_of_two, args=(r, *arguments), daemon=True) for r in range(2)
        ]
        for process in processes:
            process.start()
        seconds = max(_result(results, processes) for _ in processes)
        trained = net(batch_size).initialize()
        trained.load_params(f_params=f"{folder}/trained.pt")
    for process in processes:
        process.join()
    return n_rows / seconds, trained


def _result(results: Any, processes: list) -> float:
    """What one of the processes has measured, or an error at once if one has failed."""
    while True:
        try:
            return float(results.get(timeout=1))
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError("one of two processes failed, and said why above") from None


def one_of_two(rank: int, how: str, batch_size: int, n_rows: int, barrier, results, folder) -> None:  # type: ignore[no-untyped-def]
    """One process of a pair."""
    import torch

    torch.set_num_threads(1)
    X, y = rows(2 * n_rows)
    mine = X[rank::2], y[rank::2]

    def wrap(module: Any) -> Any:
        if how != "ddp":
            return module
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
        return torch.nn.parallel.DistributedDataParallel(module)

    meet: Callable = barrier.wait if how == "barrier" else lambda: None
    trained = net(batch_size).initialize()
    seconds = train_plainly(trained, mine, wrap, meet, barrier.wait)
    if rank == 0:
        trained.save_params(f_params=f"{folder}/trained.pt")
    barrier.wait()
    results.put(seconds)


def train_plainly(
    trained: Any,
    data: tuple[Any, Any],
    wrap: Callable,
    meet: Callable,
    start: Callable = lambda: None,
) -> float:
    """Seconds of the second epoch of a loop of plain torch, which trains a net's module."""
    import torch

    X, y = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    module = wrap(trained.module_.train())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    loss = torch.nn.CrossEntropyLoss()

    def epoch() -> None:
        for index in torch.randperm(len(X)).split(trained.batch_size):
            optimizer.zero_grad()
            loss(module(X[index]), y[index]).backward()
            meet()
            optimizer.step()

    epoch()
    start()
    begun = perf_counter()
    epoch()
    return perf_counter() - begun


@contextmanager
def user_cluster(n_workers: int, n_threads: int) -> Iterator[Any]:
    """A client of a cluster as a user starts one."""
    from distributed import Client, LocalCluster

    options = {"threads_per_worker": n_threads, "scheduler_kwargs": {"dashboard_address": ":0"}}
    with LocalCluster(n_workers=n_workers, **options) as cluster, Client(cluster) as client:
        yield client


CLUSTERS: dict[str, Callable] = {
    "2x1": lambda: user_cluster(2, 1),
    "1x2": lambda: user_cluster(1, 2),
    "own": nullcontext,
}


def daskps(
    batch_size: int, n_rows: int, sync_every: Any, transport: str, on: str = "2x1"
) -> tuple[float, Any]:
    """Images per second on Dask workers, as many as there are, and what they have trained."""
    import dask

    from daskps import DistributedCNNClassifier

    asked = "auto" if transport == "none" else transport
    with dask.config.set({"daskps.transport": asked}), CLUSTERS[on]() as client:
        clf = DistributedCNNClassifier(
            net(batch_size), sync_every=sync_every, client=client, random_state=0
        ).fit(*rows(n_rows))
    ran = clf.report_.ranks[0].transport
    if ran != transport:
        raise RuntimeError(f"asked for {transport}, ran {ran}")
    return n_rows / clf.history_[-1, "dur"], clf.net_


def accuracies(trained: Any, n_rows: int) -> tuple[float, float]:
    """The share of rows whose class a net predicts, of those that it has seen and of the test rows."""
    X, X_test, y, y_test = _images(n_rows)
    scored = [(X[:n_rows], y[:n_rows]), (X_test, y_test)]
    train_accuracy, test_accuracy = (float((trained.predict(X) == y).mean()) for X, y in scored)
    return train_accuracy, test_accuracy


if __name__ == "__main__":
    called, to_be_scored, *given = json.loads(sys.argv[1])
    speed, net_trained = globals()[called](*given)
    print(json.dumps(Trained(speed, *(accuracies(net_trained, given[1]) if to_be_scored else ()))))
