"""A worker's environment for the length of a fit: its allocator and torch's threads.

Dask's nanny starts a worker with ``MALLOC_TRIM_THRESHOLD_=65536`` and ``OMP_NUM_THREADS=1``.
The first makes glibc hand every large tensor back to the kernel as soon as it is freed, so that a
training step faults its memory in again each time and takes twice as long; the second leaves a
worker of four threads training on one core. Both are put right here while somebody trains, and
put back afterwards.

`tune_malloc` and `restore_malloc` hold for the process and are counted, so that a run may keep
the allocator tuned between its epochs; `torch_threads` holds for one thread, hence for one task.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "release_freed",
    "restore_malloc",
    "torch_threads",
    "training_environment",
    "tune_malloc",
    "tuned_malloc",
]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

# The largest that glibc takes, and a bound on what a worker may keep beyond what it uses.
_TUNED_MMAP, _TUNED_TRIM = 32 * 2**20, 256 * 2**20
_DEFAULT = 128 * 2**10

_lock = threading.Lock()
_users = 0


def tune_malloc() -> None:
    """Let this process keep the memory that it frees; every call needs its `restore_malloc`."""
    global _users
    with _lock:
        _users += 1
        if _users == 1 and _trims_eagerly():
            _set_thresholds(_TUNED_MMAP, _TUNED_TRIM)


def restore_malloc() -> None:
    """Give up one `tune_malloc`; the last one puts the environment's values back.

    What was kept goes back to the kernel at once: Dask counts it as the worker's own and would
    pause the worker for it.
    """
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and _trims_eagerly():
            _set_thresholds(
                _from_environment("MALLOC_MMAP_THRESHOLD_"),
                _from_environment("MALLOC_TRIM_THRESHOLD_"),
            )
            _trim()


def release_freed() -> None:
    """Hand what this process has freed back to the kernel, however its allocator is tuned."""
    _trim()


@contextmanager
def tuned_malloc() -> Iterator[None]:
    """`tune_malloc` for the length of a block."""
    tune_malloc()
    try:
        yield
    finally:
        restore_malloc()


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Let torch use `threads` cores in this thread for the length of a block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def training_environment(threads: int) -> Iterator[None]:
    """Both, around one epoch's task: a tuned allocator and `threads` cores for torch."""
    with tuned_malloc(), torch_threads(threads):
        yield


def _trims_eagerly() -> bool:
    """Whether glibc's thresholds are fixed, and low, in this process.

    Elsewhere they adapt by themselves, and setting them once would end that for good. A nanny
    writes its variables into its own process too, where they came too late to take effect: only
    a child can have started with them.
    """
    started_by_nanny = multiprocessing.parent_process() is not None
    return started_by_nanny and "MALLOC_TRIM_THRESHOLD_" in os.environ


def _from_environment(name: str) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return _DEFAULT


def _set_thresholds(mmap: int, trim: int) -> None:
    """Set both or, where glibc refuses the first, none: one without the other gains little."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None and mallopt(_M_MMAP_THRESHOLD, mmap):
        mallopt(_M_TRIM_THRESHOLD, trim)


def _trim() -> None:
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, the only one with these thresholds."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread of the parent may have held it
    os.register_at_fork(after_in_child=_renew_lock)
