"""What a run tells its client while an epoch is under way, through Dask's event log."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from distributed import Client

from daskps._spec import TOPIC

_lock = threading.Lock()
_queues: dict[str, queue.SimpleQueue] = {}
_subscribed: weakref.WeakSet[Client] = weakref.WeakSet()


@contextmanager
def events_of(client: Client, run_id: str) -> Iterator[queue.SimpleQueue]:
    """A queue that receives the events of one run for the length of the block."""
    events: queue.SimpleQueue = queue.SimpleQueue()
    with _lock:
        _queues[run_id] = events
        # A client has one handler for each topic, and keeps it for ever: all fits share one.
        if client not in _subscribed:
            client.subscribe_topic(TOPIC, _deliver)
            _subscribed.add(client)
    try:
        yield events
    finally:
        with _lock:
            _queues.pop(run_id, None)


def _deliver(event: tuple[float, Any]) -> None:
    _, message = event
    events = _queues.get(message["run_id"])
    if events is not None:
        events.put(message)
