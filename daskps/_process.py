"""For whom this process works: for itself, or for others that send it what to do."""

from __future__ import annotations

import multiprocessing

from distributed import get_worker


def in_task() -> bool:
    """Whether this code runs inside a task on a Dask worker."""
    try:
        get_worker()
    except ValueError:
        return False
    return True


def in_pool() -> bool:
    """Whether this is one of several children that share the cores, of a Pool or of joblib.

    The first may not have children; those of the second could not start.
    """
    daemonic = multiprocessing.current_process().daemon
    return daemonic or multiprocessing.get_start_method(allow_none=True) == "loky"
