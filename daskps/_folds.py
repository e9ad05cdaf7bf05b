"""Shards that a search has sent stay on their workers until the search is over.

Every candidate of a search fits on the same folds. scikit-learn hands each fit the fold's array of row
numbers, one object for all candidates, which dies with the search.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import joblib
import numpy as np
from distributed import Client, Future

Key = tuple[str, str, str]

_lock = threading.Lock()
_kept: dict[Key, Future] = {}


def current_fold() -> list[Any]:
    """What lives as long as the fold on which a search fits in this thread; empty outside of one.

    The fold's row numbers and, where the search runs in this very thread, the object with which it
    runs its fits: the user may keep the row numbers.
    """
    frame: Any = sys._getframe()
    owners: list[Any] = []
    while frame is not None:
        # Only of these frames: a look at the locals of a frame keeps them alive as long as the frame.
        if not owners and _fits_a_fold(frame):
            train = frame.f_locals.get("train")
            owners = [train] if isinstance(train, np.ndarray) else []
        elif owners and frame.f_globals.get("__name__") == "joblib.parallel":
            runner = frame.f_locals.get("self")
            if isinstance(runner, joblib.Parallel):
                return [*owners, runner]
        frame = frame.f_back
    return owners


def _fits_a_fold(frame: Any) -> bool:
    named = frame.f_code.co_name == "_fit_and_score"
    return named and frame.f_globals["__name__"].startswith("sklearn.")


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
