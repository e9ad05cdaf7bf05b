"""How a client waits for a run: never for longer than the run has all of its workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import queue
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from distributed import Client, Future

from daskps._spec import PLACEHOLDER
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
        self.allowed_failures = 0
        """How often Dask's scheduler lets workers die of the same task; known when one is lost."""

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
            self.refuse_a_lost_scheduler()
            return None
        if event.get("generation", self.generation) != self.generation:
            return None
        if "lost" in event:
            self.allowed_failures = event["allowed_failures"]
            raise WorkerLostError(event["lost"], event["worker"], event["run_id"], round=event["round"])
        if "ended" in event:
            raise RunAbortedError(event["ended"])
        return event

    def refuse_a_lost_scheduler(self) -> None:
        """Say so if the client has lost its scheduler: what it says itself differs from call to call.

        Raises
        ------
        RunAbortedError
        """
        if self._client.status != "running":
            raise RunAbortedError(f"the client lost its scheduler, it is {self._client.status!r} now")

    def sync(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function on the client's event loop, as ``Client.sync`` does.

        Raises
        ------
        WorkerLostError
            If a worker is lost meanwhile. The coroutine is cancelled.
        """
        with self._running(function(*args, **kwargs)) as running:
            while not running.done():
                self.next()
        try:
            if running.cancelled() or running.exception() is not None:
                self._wait_for_news()
            return running.result()
        finally:
            del running  # it holds the error, which holds this frame and all that its callers hold

    def ask(self, function: Callable, at_most: float = math.inf, **kwargs: Any) -> Any:
        """Ask the scheduler for workers, which may take as long as there are too few.

        As long as it says so there are placeholder tasks in its queue: an adaptive cluster starts
        workers for tasks, and for nothing else.

        Raises
        ------
        TimeoutError
            If there is no answer after ``at_most`` seconds.
        """
        deadline = monotonic() + at_most
        placeholders: list[Future] = []
        news: list[dict] = []  # of the workers that the answer will name
        with self._running(function(**kwargs)) as running:
            try:
                while not running.done():
                    if monotonic() > deadline:
                        raise TimeoutError(f"no workers within {at_most:g} s")
                    event = self._next_of_any_kind()
                    if "lost" in event or "ended" in event:
                        news.append(event)
                    if event.get("wanted", len(placeholders)) != len(placeholders):
                        _release(placeholders)
                        placeholders = self._placeholders(event["wanted"])
            finally:
                _release(placeholders)
        for event in news:
            self._events.put(event)
        return running.result()

    def _placeholders(self, n: int) -> list[Future]:
        needs = {PLACEHOLDER: 1}
        keys = [f"{PLACEHOLDER}-{uuid.uuid4().hex}" for _ in range(n)]
        return [self._client.submit(int, key=key, resources=needs) for key in keys]

    def _next_of_any_kind(self) -> dict:
        try:
            return self._events.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            self.refuse_a_lost_scheduler()
            return {}

    @contextmanager
    def _running(self, coroutine: Coroutine) -> Iterator[concurrent.futures.Future]:
        """Run a coroutine on the client's event loop, and cancel it at the end of the block."""
        loop: Any = self._client.loop
        running = asyncio.run_coroutine_threadsafe(coroutine, loop.asyncio_loop)
        running.add_done_callback(lambda _: self._events.put({"over": True}))
        try:
            yield running
        finally:
            running.cancel()

    def _wait_for_news(self) -> None:
        """Find out whether what failed has failed because a worker is lost."""
        deadline = monotonic() + _NEWS_SECONDS
        while monotonic() < deadline:
            self.next(deadline - monotonic())


def _release(futures: list[Future]) -> None:
    for future in futures:
        future.release()
