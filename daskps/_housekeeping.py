"""Dask's statistics of itself, held back while somebody trains.

Every wake of an event loop takes the interpreter's lock, and often a core, from a rank in the middle of
its step. Two callbacks do so 50 and 100 times a second and only feed the dashboard: the measurement of
the loop's delay and the profile of the tasks. Heartbeats and the watch over memory go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distributed import Nanny, Worker
from distributed.core import Server, Status

_STATISTICS = ("tick", "profile")


@contextmanager
def held_back(worker: Worker) -> Iterator[None]:
    """Hold a worker's statistics back for the length of a block, from any thread."""
    worker.loop.add_callback(hold_back, worker)
    try:
        yield
    finally:
        worker.loop.add_callback(go_on, worker)


def hold_back(server: Server) -> None:
    """Stop the statistics, on the server's event loop."""
    for name in _STATISTICS:
        if name in server.periodic_callbacks:
            server.periodic_callbacks[name].stop()


def go_on(server: Server) -> None:
    """Start them again, unless the server is about to end.

    Not one by one: the server would find that its loop had been stuck since the last tick.
    """
    if server.status in (Status.running, Status.paused):
        server.start_periodic_callbacks()


def with_nannies(scheduler: Server) -> list[Server]:
    """A scheduler and, in a ``LocalCluster``, the nannies that share its event loop and its cores."""
    nannies = list(getattr(Nanny, "_instances", ()))
    return [scheduler, *(nanny for nanny in nannies if nanny.loop is scheduler.loop)]
