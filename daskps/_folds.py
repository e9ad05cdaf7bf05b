"""Shards that a search has sent stay on their workers until the search is over.

Every candidate of a search fits on the same folds. scikit-learn hands each fit the fold's array of row
numbers, one object for all candidates, which dies with the search. So it is in Dask's tasks, where joblib
brings each array once to a worker. Processes of loky get copies, and are not told when a search is over:
there a fold is kept until no fit has run for a while.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import joblib
import numpy as np
from distributed import Client, Future

from daskps._process import in_pool, in_task

Key = tuple[str, str, str]

# So long a process of loky may have nothing to do before the search counts as over.
IDLE_SECONDS = 2.0

_lock = threading.Lock()
_kept: dict[Key, Future] = {}


def current_fold() -> list[Any]:
    """What lives as long as the fold on which a search fits in this thread; empty outside of one.

    The fold's row numbers. The user may keep these: so, where the search runs in this very thread, also
    the object with which it runs its fits; in a task, the rows of the search.
    """
    frame: Any = sys._getframe()
    owners: list[Any] = []
    rows = None
    while frame is not None:
        # Only of these frames: a look at the locals of a frame keeps them alive as long as the frame.
        if not owners and _fits_a_fold(frame):
            train, rows = frame.f_locals.get("train"), frame.f_locals.get("X")
            owners = [train] if isinstance(train, np.ndarray) else []
        elif owners and frame.f_globals.get("__name__") == "joblib.parallel":
            runner = frame.f_locals.get("self")
            if isinstance(runner, joblib.Parallel):
                return [*owners, runner]
        frame = frame.f_back
    if owners and in_task() and isinstance(rows, np.ndarray):
        return [*owners, rows]
    return [_work.token] if owners and in_pool() else owners


def _fits_a_fold(frame: Any) -> bool:
    named = frame.f_code.co_name == "_fit_and_score"
    return named and frame.f_globals["__name__"].startswith("sklearn.")


class _Token:
    """Somebody's reason to keep something, which can be referred to weakly."""


class _Work:
    """Whether this process has had a fit to do of late."""

    def __init__(self) -> None:
        self.token = _Token()
        self._lock = threading.Lock()
        self._running = 0
        self._timer: threading.Timer | None = None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Around each fit."""
        with self._lock:
            self._running += 1
            if self._timer is not None:
                self._timer.cancel()
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._timer = threading.Timer(IDLE_SECONDS, self._end)
                self._timer.daemon = True
                self._timer.start()

    def _end(self) -> None:
        with self._lock:
            if not self._running:
                self.token = _Token()


_work = _Work()


@contextmanager
def fitting() -> Iterator[None]:
    """Around each fit: what it keeps may be of use to the next one."""
    if not in_pool():
        yield
        return
    with _work.going_on():
        yield


def key_of(client: Client, address: str, shard: Any) -> Key:
    """What tells a shard on a worker from others: a transformer before may change it."""
    return client.id, address, joblib.hash(shard, hash_name="sha1")


def find(key: Key) -> Future | None:
    """A handle of its own on a kept shard."""
    with _lock:
        kept = _kept.get(key)
        if kept is None or kept.status != "finished":
            return None
        return Future(kept.key, kept.client)


def keep(key: Key, shard: Future, owners: list[Any]) -> None:
    """Keep a shard as long as all of its owners live."""
    with _lock:
        _kept[key] = Future(shard.key, shard.client)
    for owner in owners:
        weakref.finalize(owner, _forget, key).atexit = False


def _forget(key: Key) -> None:
    kept = _kept.pop(key, None)
    if kept is not None:
        kept.release()
