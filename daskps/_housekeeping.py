"""What Dask does for itself many times a second, held back while somebody trains.

Every wake of an event loop takes the interpreter's lock, and often a core, from a rank in the middle of
its step. Two callbacks do so 50 and 100 times a second and only feed the dashboard: the measurement of
the loop's delay and the profile of the tasks. They stop. The watch over memory, ten times a second in
every worker and in its nanny, costs as much as all the rest; it goes on less often. Heartbeats go on as
they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Nanny, Worker
from distributed.core import Server, Status

_STATISTICS = ("tick", "profile")
_MEMORY_WATCH = "memory_monitor"

# How often memory is looked at while somebody trains.
_WATCH_SECONDS = 0.5


@contextmanager
def held_back(worker: Worker) -> Iterator[None]:
    """Hold a worker's housekeeping back for the length of a block, from any thread."""
    worker.loop.add_callback(hold_back, worker)
    try:
        yield
    finally:
        worker.loop.add_callback(go_on, worker)


def hold_back(server: Server) -> None:
    """Stop the statistics and watch memory less often, on the server's event loop."""
    for name in _STATISTICS:
        if name in server.periodic_callbacks:
            server.periodic_callbacks[name].stop()
    _watch_memory(server, _WATCH_SECONDS)


def go_on(server: Server) -> None:
    """Do all as before, unless the server is about to end.

    Not one by one: the server would find that its loop had been stuck since the last tick.
    """
    if server.status in (Status.running, Status.paused):
        _watch_memory(server, 0.0)
        server.start_periodic_callbacks()


def _watch_memory(server: Any, at_least: float) -> None:
    """Let so many seconds pass between two looks, or as many as the user wants if these are more."""
    watch = server.periodic_callbacks.get(_MEMORY_WATCH)
    if watch is not None:  # there is a limit
        watch.callback_time = 1000 * max(server.memory_manager.memory_monitor_interval, at_least)


def with_nannies(scheduler: Server) -> list[Server]:
    """A scheduler and, in a ``LocalCluster``, the nannies that share its event loop and its cores."""
    nannies = list(getattr(Nanny, "_instances", ()))
    return [scheduler, *(nanny for nanny in nannies if nanny.loop is scheduler.loop)]
