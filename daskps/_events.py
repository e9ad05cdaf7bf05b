"""What a run tells its client while an epoch is under way, through Dask's event log."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from distributed import Client

from daskps._spec import TOPIC

_lock = threading.Lock()
# By client too: every client of a process that watches the topic gets every event.
_queues: dict[tuple[str, str], queue.SimpleQueue] = {}
_watching: Counter[str] = Counter()


@contextmanager
def events_of(client: Client, run_id: str) -> Iterator[queue.SimpleQueue]:
    """A queue that receives the events of one run for the length of the block."""
    events: queue.SimpleQueue = queue.SimpleQueue()
    with _lock:
        _queues[client.id, run_id] = events
        _watching[client.id] += 1
        # A client has one handler for each topic: all its fits share one.
        if _watching[client.id] == 1:
            client.subscribe_topic(TOPIC, partial(_deliver, client.id))
    try:
        yield events
    finally:
        with _lock:
            del _queues[client.id, run_id]
            _watching[client.id] -= 1
            if not _watching[client.id]:
                del _watching[client.id]
                if client.status == "running":
                    client.unsubscribe_topic(TOPIC)


def _deliver(client_id: str, event: tuple[float, Any]) -> None:
    _, message = event
    events = _queues.get((client_id, message["run_id"]))
    if events is not None:
        events.put(message)
