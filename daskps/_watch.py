"""How a client waits for a run: never for longer than the run has all of its workers."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from time import monotonic
from typing import Any

from distributed import Client

from daskps.exceptions import RunAbortedError, WorkerLostError

# How often to look whether the client still has its scheduler, while nothing happens.
_LOOK_SECONDS = 2.0

# How long the news of a lost worker may take after a call has failed because of it.
_NEWS_SECONDS = 2.0


class Watch:
    """The events of a run, in order, and calls that end when a worker is lost.

    In the place of the client it lets everything that asks the client to ``sync`` end at once: Dask
    itself would look for a worker that is gone for half a minute.

    Parameters
    ----------
    client : Client
    events : SimpleQueue
        Of one run; from its ranks, its tasks and the scheduler.
    """

    def __init__(self, client: Client, events: queue.SimpleQueue) -> None:
        self._client = client
        self._events = events
        self.generation = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def put(self, event: dict) -> None:
        """Add an event of the client's own."""
        self._events.put(event)

    def next(self, seconds: float = _LOOK_SECONDS) -> dict | None:
        """The next event, or None after so many seconds.

        Raises
        ------
        WorkerLostError
            If it says that a worker is lost.
        RunAbortedError
            If it says that the run ended, or if the client has lost its scheduler.
        """
        try:
            event = self._events.get(timeout=max(0.0, min(seconds, _LOOK_SECONDS)))
        except queue.Empty:
            self._refuse_a_lost_scheduler()
            return None
        if event.get("generation", self.generation) != self.generation:
            return None
        if "lost" in event:
            raise WorkerLostError(event["lost"], event["worker"], event["run_id"], round=event["round"])
        if "ended" in event:
            raise RunAbortedError(event["ended"])
        return event

    def sync(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function on the client's event loop, as ``Client.sync`` does.

        Raises
        ------
        WorkerLostError
            If a worker is lost meanwhile. The coroutine is cancelled.
        """
        loop: Any = self._client.loop
        running = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), loop.asyncio_loop)
        running.add_done_callback(lambda _: self._events.put({"over": True}))
        try:
            while not running.done():
                self.next()
        finally:
            running.cancel()
        if running.cancelled() or running.exception() is not None:
            self._wait_for_news()
        return running.result()

    def _wait_for_news(self) -> None:
        """Find out whether what failed has failed because a worker is lost."""
        deadline = monotonic() + _NEWS_SECONDS
        while monotonic() < deadline:
            self.next(deadline - monotonic())

    def _refuse_a_lost_scheduler(self) -> None:
        if self._client.status != "running":
            raise RunAbortedError(f"the client lost its scheduler, it is {self._client.status!r} now")
