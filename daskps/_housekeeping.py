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
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from distributed import Nanny, Worker
from distributed.core import Server, Status

# "ticks" divides the time by the measurements: without any, it would say that the loop took a second.
_STATISTICS = ("tick", "ticks", "profile")
_MEMORY_WATCH = "memory_monitor"

# How often memory is looked at while somebody trains.
_WATCH_SECONDS = 0.5


@dataclass
class _Held:
    """What a server did before. Not by its callbacks, which keep their server."""

    stopped: set[str] = field(default_factory=set)
    watch_milliseconds: float | None = None


_held: WeakKeyDictionary[Server, _Held] = WeakKeyDictionary()


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
    held = _held.setdefault(server, _Held())
    callbacks = server.periodic_callbacks
    running = {name for name in _STATISTICS if name in callbacks and callbacks[name].is_running()}
    for name in running:
        callbacks[name].stop()
    held.stopped |= running
    watch = callbacks.get(_MEMORY_WATCH)
    if watch is not None and held.watch_milliseconds is None:  # there is a limit
        held.watch_milliseconds = watch.callback_time
        watch.callback_time = max(watch.callback_time, 1000 * _WATCH_SECONDS)


def go_on(server: Server) -> None:
    """Do all as before, unless the server ends."""
    held = _held.pop(server, None)
    if held is None or server.status in (Status.closing, Status.closed, Status.failed):
        return
    callbacks = server.periodic_callbacks
    if held.watch_milliseconds is not None:
        callbacks[_MEMORY_WATCH].callback_time = held.watch_milliseconds
    others = [c for name, c in callbacks.items() if not c.is_running() and name not in held.stopped]
    # Not one by one: the server would find that its loop had been stuck since the last tick.
    server.start_periodic_callbacks()
    for callback in others:  # somebody wanted them to stop
        callback.stop()


def with_nannies(scheduler: Server) -> list[Server]:
    """A scheduler and, in a ``LocalCluster``, the nannies that share its event loop and its cores."""
    return [scheduler, *(nanny for nanny in _nannies() if nanny.loop is scheduler.loop)]


def _nannies() -> list[Nanny]:
    """All of this process."""
    try:
        return list(getattr(Nanny, "_instances", ()))
    except RuntimeError:  # another thread has made one in the meantime
        return _nannies()
