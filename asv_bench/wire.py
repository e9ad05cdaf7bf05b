"""One round with no computing in it, and what it costs the scheduler: python asv_bench/wire.py

The scheduler is a process of its own, as in production. Ranks are tasks on workers of one thread, which do
nothing but push and pull; beside them stands gloo's all_reduce between as many processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter, sleep
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster, Security, get_worker
from distributed.deploy.subprocess import SubprocessCluster

from daskps import _machine

CNN = 421_642  # parameters of the CNN in benchmarks/nets.py
SIZES = (1, 10_000, CNN, 1_000_000, 10_000_000)
WORLDS = (1, 2, 4, 8)
MODEL = 10_000_000  # parameters, for memory and pings

# Name, the transport, and what else is configured.
ROADS: list[tuple[str, dict[str, Any]]] = [
    ("shared memory", {"daskps.transport": "shared-memory"}),
    ("comm", {"daskps.transport": "comm"}),
    ("comm, bfloat16", {"daskps.transport": "comm", "daskps.wire-dtype": "bfloat16"}),
]


def n_rounds(world_size: int, size: int) -> int:
    """Enough to take a median, and no more than seconds."""
    return int(np.clip(2e8 / (size * world_size), 5, 300))


def exchange(ticket: Any, rules: Any, size: int, count: int, pause: float = 0.0) -> list[float]:
    """A rank's task: so many rounds; returns the seconds of each."""
    from daskps._connecting import open_channel

    n_bytes = 4 * size
    channel = open_channel(get_worker(), ticket, n_bytes, rules)
    seconds = []
    try:
        values = channel.allocate(size, "float32")
        values[:] = 1.0
        for _ in range(count):
            sleep(pause)
            begun = perf_counter()
            result = channel.push_pull(values, 1.0, "mean", size)
            seconds.append(perf_counter() - begun)
            if ticket.world_size > 1 and abs(float(result[-1]) - 1) > 1e-2:
                raise RuntimeError(f"the mean of ones is {result[-1]}")
    finally:
        channel.close()
    return seconds


def on_ranks(client: Client, world_size: int, *arguments: Any) -> list[list[float]]:
    """Let all ranks of a run exchange; returns the seconds of every round, by rank."""
    from daskps._launch import open_run

    with open_run(client, world_size, world_size) as run:
        tasks = [
            client.submit(
                exchange, run.ticket(rank), run.rules, *arguments, workers=[run.addresses[rank]], pure=False
            )
            for rank in range(world_size)
        ]
        return client.gather(tasks)


@contextmanager
def cluster(n_workers: int) -> Iterator[Client]:
    """Workers of one thread, and a scheduler that is a process of its own."""
    options = {"dashboard_address": ":0", "n_workers": n_workers, "threads_per_worker": 1}
    with SubprocessCluster(**options) as processes, Client(processes) as client:
        client.wait_for_workers(n_workers, timeout=120)
        yield client


@contextmanager
def tls_cluster(n_workers: int) -> Iterator[Client]:
    """The same with TLS; its scheduler is in this process."""
    options = {"threads_per_worker": 1, "scheduler_kwargs": {"dashboard_address": ":0"}}
    security = Security.temporary()
    with LocalCluster(n_workers=n_workers, security=security, **options) as local, Client(local) as client:
        yield client


def median_ms(by_rank: list[list[float]]) -> float:
    """The median round of the slowest rank, in milliseconds, without the first rounds."""
    return 1000 * max(statistics.median(seconds[len(seconds) // 5 :]) for seconds in by_rank)


def gloo(world_size: int, size: int) -> float:
    """Milliseconds of an all_reduce."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world_size, size, n_rounds(world_size, size), folder, results)
        processes = [context.Process(target=reduce_all, args=(r, *arguments)) for r in range(world_size)]
        for process in processes:
            process.start()
        by_rank = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    return median_ms(by_rank)


def reduce_all(rank: int, world_size: int, size: int, count: int, folder: str, results: Any) -> None:
    """One process of gloo's."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    values = torch.ones(size)
    seconds = []
    for _ in range(count):
        begun = perf_counter()
        torch.distributed.all_reduce(values)
        seconds.append(perf_counter() - begun)
        values.fill_(1.0)
    results.put(seconds)
    torch.distributed.barrier()


def rounds(worlds: tuple[int, ...], sizes: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Milliseconds of a round by road, and by world and size."""
    figures: dict[str, dict[str, float]] = {}

    def note(road: str, world_size: int, size: int, value: float) -> None:
        figures.setdefault(road, {})[f"K={world_size}, {size}"] = value
        print(f"{road:<16} K={world_size} {size:>10} floats {value:>9.2f} ms", flush=True)

    for world_size in worlds:
        with cluster(world_size) as client:
            for size in sizes:
                for road, settings in ROADS:
                    with dask.config.set(settings):
                        seconds = on_ranks(client, world_size, size, n_rounds(world_size, size))
                    note(road, world_size, size, median_ms(seconds))
        with tls_cluster(world_size) as client, dask.config.set({"daskps.transport": "comm"}):
            for size in sizes:
                seconds = on_ranks(client, world_size, size, n_rounds(world_size, size))
                note("comm, TLS", world_size, size, median_ms(seconds))
        for size in sizes:
            note("gloo", world_size, size, gloo(world_size, size))
    return figures


def peak_above_idle(client: Client, work: Callable[[], Any]) -> int:
    """By how many bytes the scheduler's memory rises while something is done."""

    def reset() -> int:  # nested: the scheduler cannot import this module
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # the peak is now what is there
        return peak()

    def peak() -> int:
        with open("/proc/self/status", encoding="utf-8") as status:
            (kib,) = (line.split()[1] for line in status if line.startswith("VmHWM:"))
        return 1024 * int(kib)

    before = client.run_on_scheduler(reset)
    work()
    return client.run_on_scheduler(peak) - before


def pings(client: Client, work: Callable[[], Any]) -> list[float]:
    """Seconds of small questions to the scheduler, one after the other, while something is done."""
    seconds: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            begun = perf_counter()
            client.sync(client.scheduler.get_metadata, keys=["daskps-ping"], default=0)
            seconds.append(perf_counter() - begun)
            sleep(0.005)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return seconds


def scheduler() -> dict[str, float]:
    """What a run costs the scheduler: memory in models, and the 99th percentile of pings, by world."""
    figures = {}
    for world_size in (2, 8):
        with cluster(world_size) as client, dask.config.set({"daskps.transport": "comm"}):
            on_ranks(client, world_size, 1000, 10)

            def work(client: Client = client, world_size: int = world_size) -> None:
                on_ranks(client, world_size, MODEL, 12)

            memory = peak_above_idle(client, work) / (4 * MODEL)
            p99 = float(np.percentile(pings(client, work), 99))
        figures |= {f"memory K={world_size}": memory, f"ping p99 K={world_size}": p99}
        print(
            f"K={world_size}, {MODEL} floats over comm: the scheduler grows by {memory:.2f} models,"
            f" 99 of 100 pings within {1000 * p99:.1f} ms",
            flush=True,
        )
    return figures


def flood(address: str, seconds: float, results: Any) -> None:
    """A second client's process: as many small tasks as it can; reports how many a second."""
    with Client(address, set_as_default=False) as client:
        worker = sorted(client.scheduler_info(n_workers=-1)["workers"])[-1]
        count, begun = 0, perf_counter()
        while perf_counter() - begun < seconds:
            futures = client.map(abs, range(count, count + 200), workers=[worker], pure=False)
            client.gather(futures)
            count += 200
        results.put(count / (perf_counter() - begun))


@contextmanager
def flooded(address: str, seconds: float) -> Iterator[Any]:
    """Flood a scheduler for the length of a block; yields the queue with the rate."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=flood, args=(address, seconds, results))
    process.start()
    try:
        yield results
    finally:
        process.join()


def under_flood() -> dict[str, float]:
    """How much longer rounds take while somebody else floods the scheduler, and what his rate loses."""
    with cluster(3) as client, dask.config.set({"daskps.transport": "shared-memory"}):
        addresses = sorted(client.scheduler_info(n_workers=-1)["workers"])
        address = client.scheduler.address

        def exchange_beside(count: int) -> float:
            with dask.annotate(workers=addresses[:2]):
                return median_ms(on_ranks(client, 2, CNN, count, 0.01))

        idle = exchange_beside(300)
        with flooded(address, 8) as results:
            alone = results.get(timeout=120)
        with flooded(address, 12) as results:
            sleep(3)
            busy = exchange_beside(400)
            together = results.get(timeout=120)
    figures = {"idle ms": idle, "flooded ms": busy, "tasks/s alone": alone, "tasks/s beside": together}
    print(
        f"K=2, {CNN} floats: a round takes {idle:.2f} ms, and {busy:.2f} ms ({busy / idle:.1f} times) while"
        f" another client floods the scheduler with {together:.0f} tasks a second, alone {alone:.0f}",
        flush=True,
    )
    return figures


def main() -> None:
    """Measure and print everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=list(WORLDS))
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--parts", nargs="+", default=["rounds", "scheduler", "flood"])
    parser.add_argument("--json", metavar="F", help="write all figures to this file")
    options = parser.parse_args()
    parts = {
        "rounds": lambda: rounds(tuple(options.worlds), tuple(options.sizes)),
        "scheduler": scheduler,
        "flood": under_flood,
    }
    machine = _machine.describe()
    print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
    # Eight workers that load torch on two cores take a while to come.
    with dask.config.set({"daskps.timeouts.workers": "5m"}):
        figures = {part: parts[part]() for part in options.parts}
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"machine": machine, **figures}, file, indent=1)


if __name__ == "__main__":
    main()
