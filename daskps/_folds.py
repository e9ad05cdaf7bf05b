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


def current_fold() -> np.ndarray | None:
    """The row numbers of the fold on which a search fits in this thread; None outside of one."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_fit_and_score" and frame.f_globals["__name__"].startswith("sklearn."):
            fold = frame.f_locals.get("train")
            return fold if isinstance(fold, np.ndarray) else None
        frame = frame.f_back
    return None


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


def keep(key: Key, shard: Future, fold: np.ndarray) -> None:
    """Keep a shard as long as the fold lives."""
    with _lock:
        _kept[key] = Future(shard.key, shard.client)
    weakref.finalize(fold, _forget, key).atexit = False


def _forget(key: Key) -> None:
    kept = _kept.pop(key, None)
    if kept is not None:
        kept.release()
