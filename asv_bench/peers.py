"""Batch synchronisation beside what else one could do with two cores: python asv_bench/peers.py

Every contender trains the same CNN on the same rows in processes of its own. They take turns, and every
figure is the median of several turns, since other programs disturb a machine for minutes at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

TUNED = {"MALLOC_TRIM_THRESHOLD_": "268435456", "MALLOC_MMAP_THRESHOLD_": "268435456"}

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


def rows(n_rows: int) -> tuple[Any, Any]:
    """Training rows of Fashion-MNIST, or random ones where it is not installed."""
    import numpy as np

    from daskps import datasets

    try:
        X, _, y, _ = datasets.load_fashion_mnist()
    except FileNotFoundError:
        generator = np.random.default_rng(0)
        X = generator.random((n_rows, 1, 28, 28), dtype="float32")
        y = generator.integers(0, 10, n_rows)
    return X[:n_rows], y[:n_rows]


def new_net(batch_size: int, max_epochs: int = 2) -> Any:
    """The CNN with dropout, SGD with momentum."""
    import torch
    from skorch import NeuralNetClassifier

    from daskps import CNN

    torch.manual_seed(0)
    return NeuralNetClassifier(
        CNN,
        module__input_shape=(1, 28, 28),
        module__n_classes=10,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        lr=0.01,
        optimizer__momentum=0.9,
        batch_size=batch_size,
        max_epochs=max_epochs,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
    )


def skorch(batch_size: int, n_rows: int, threads: int) -> float:
    """Images per second of plain skorch; the first epoch warms up."""
    import torch

    torch.set_num_threads(threads)
    net = new_net(batch_size).fit(*rows(n_rows))
    return n_rows / net.history[-1, "dur"]


def loop(batch_size: int, n_rows: int, threads: int) -> float:
    """Images per second of a loop of plain torch."""
    import torch

    torch.set_num_threads(threads)
    return n_rows / train_plainly(rows(n_rows), batch_size, lambda module: module, lambda: None)


def pair(batch_size: int, n_rows: int, how: str) -> float:
    """Images per second of two processes, each on half of every batch."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (how, batch_size // 2, n_rows // 2, barrier, results, folder)
        processes = [context.Process(target=one_of_two, args=(r, *arguments)) for r in range(2)]
        for process in processes:
            process.start()
        seconds = max(results.get(timeout=600) for _ in processes)
        for process in processes:
            process.join()
    return n_rows / seconds


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
    results.put(train_plainly(mine, batch_size, wrap, meet, barrier.wait))


def train_plainly(
    data: tuple[Any, Any],
    batch_size: int,
    wrap: Callable,
    meet: Callable,
    start: Callable = lambda: None,
) -> float:
    """Seconds of an epoch in a loop of plain torch, after warming up."""
    import torch

    X, y = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    net = new_net(batch_size).initialize()
    module = wrap(net.module_.train())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    loss = torch.nn.CrossEntropyLoss()

    def epoch(order: Any) -> None:
        for index in order.split(batch_size):
            optimizer.zero_grad()
            loss(module(X[index]), y[index]).backward()
            meet()
            optimizer.step()

    epoch(torch.randperm(len(X))[: 20 * batch_size])
    start()
    begun = perf_counter()
    epoch(torch.randperm(len(X)))
    return perf_counter() - begun


@contextmanager
def user_cluster(n_workers: int, n_threads: int) -> Iterator[Any]:
    """A client of a cluster as a user starts one."""
    from distributed import Client, LocalCluster

    options = {"threads_per_worker": n_threads, "scheduler_kwargs": {"dashboard_address": ":0"}}
    with LocalCluster(n_workers, **options) as cluster, Client(cluster) as client:
        yield client


CLUSTERS: dict[str, Callable] = {
    "2x1": lambda: user_cluster(2, 1),
    "1x2": lambda: user_cluster(1, 2),
    "own": nullcontext,
}


def daskps(batch_size: int, n_rows: int, sync_every: Any, transport: str, on: str = "2x1") -> float:
    """Images per second on Dask workers, as many as there are; the first epoch warms up."""
    import dask

    from daskps import DistributedCNNClassifier

    asked = "auto" if transport == "none" else transport
    with dask.config.set({"daskps.transport": asked}), CLUSTERS[on]() as client:
        clf = DistributedCNNClassifier(
            new_net(batch_size), sync_every=sync_every, client=client, random_state=0
        ).fit(*rows(n_rows))
    ran = clf.report_.ranks[0].transport
    if ran != transport:
        raise RuntimeError(f"asked for {transport}, ran {ran}")
    return n_rows / clf.history_[-1, "dur"]


def turns(batch_size: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Let every contender run once in every turn."""
    figures: dict[str, list[float]] = {}
    for turn in range(options.repeats):
        for name, function, arguments, environment in _lineup():
            if options.only and options.only not in name:
                continue
            value = _in_a_process(function, [batch_size, options.rows, *arguments], environment)
            figures.setdefault(name, []).append(value)
            print(f"batch {batch_size}, turn {turn + 1}: {name:<36}{value:>8.0f} images/s", flush=True)
    return figures


def _lineup() -> Iterator[tuple[str, str, list, dict[str, str]]]:
    for name, function, arguments, both in CONTENDERS:
        yield name, function, arguments, {}
        if both:
            yield f"{name}, tuned", function, arguments, TUNED


def _in_a_process(function: str, arguments: list, environment: dict[str, str]) -> float:
    """Run one contender in a fresh interpreter that starts with the given variables."""
    bare = {key: value for key, value in os.environ.items() if key not in TUNED}
    bare |= {"OMP_WAIT_POLICY": "passive"} | environment
    command = [sys.executable, __file__, "--run", json.dumps([function, *arguments])]
    result = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=600, check=False)
    if result.returncode:
        raise RuntimeError(f"{function}{arguments} failed:\n{result.stderr}")
    return float(result.stdout.split()[-1])


def table(figures: dict[str, list[float]]) -> str:
    """Medians and spreads, and each median over plain skorch, DDP and the ceiling."""
    medians = {name: statistics.median(values) for name, values in figures.items()}

    def best(*names: str) -> float:
        return max((medians[name] for name in names if name in medians), default=float("nan"))

    base = best("skorch, 1 thread")
    ddp = best("DDP, gloo", "DDP, gloo, tuned")
    ceiling = best("2 loops that never talk, tuned")
    lines = [f"{'':<36}{'images/s':>9}{'min':>7}{'max':>7}{'/skorch':>9}{'/DDP':>7}{'/ceiling':>10}"]
    for name, values in figures.items():
        m = medians[name]
        lines.append(
            f"{name:<36}{m:>9.0f}{min(values):>7.0f}{max(values):>7.0f}"
            f"{m / base:>9.2f}{m / ddp:>7.2f}{m / ceiling:>10.2f}"
        )
    return "\n".join(lines)


def hardware() -> dict[str, str]:
    """The machine and the versions."""
    from importlib.metadata import version

    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        model = names[0] if names else model
    packages = ("torch", "skorch", "distributed", "numpy")
    return {
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def main() -> None:
    """Run all contenders in turn and print a table for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--rows", type=int, default=12_800)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="contenders whose name has this in it")
    parser.add_argument("--json", metavar="F", help="write all figures to this file")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        function, *arguments = json.loads(options.run)
        print(globals()[function](*arguments))
        return
    machine = hardware()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    figures = {batch_size: turns(batch_size, options) for batch_size in options.batches}
    for batch_size, measured in figures.items():
        print(f"\nglobal batch of {batch_size} rows, {options.rows} rows an epoch\n{table(measured)}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, "images_per_second": figures}, file, indent=1)


if __name__ == "__main__":
    main()
