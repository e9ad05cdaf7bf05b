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
from typing import NamedTuple

__all__ = ["release_freed", "restore_malloc", "torch_threads", "tune_malloc", "without_preempting"]


class _Option(NamedTuple):
    """One of mallopt's parameters, by its number in glibc's malloc.h."""

    number: int
    variable: str
    tuned: int
    default: int


_OPTIONS = (
    # No mapping of its own for a large tensor: it would be unmapped with it.
    _Option(-4, "MALLOC_MMAP_MAX_", tuned=0, default=65536),
    # Threads other than the main one have heaps of 64 MiB, and a heap that becomes empty is unmapped
    # whatever the threshold below, unless less than this padding would be left beneath it.
    _Option(-2, "MALLOC_TOP_PAD_", tuned=64 * 2**20, default=128 * 2**10),
    _Option(-1, "MALLOC_TRIM_THRESHOLD_", tuned=256 * 2**20, default=128 * 2**10),
)

_lock = threading.Lock()
_users = 0


def tune_malloc() -> None:
    """Let this process keep the memory that it frees; every call needs its `restore_malloc`."""
    global _users
    with _lock:
        _users += 1
        if _users == 1 and _trims_eagerly():
            _set({option: option.tuned for option in _OPTIONS})


def restore_malloc() -> None:
    """Give up one `tune_malloc`; the last one puts the environment's values back.

    What was kept goes back to the kernel at once: Dask counts it as the worker's own and would
    pause the worker for it.
    """
    global _users
    with _lock:
        _users -= 1
        if _users == 0 and _trims_eagerly():
            _set({option: _from_environment(option) for option in _OPTIONS})
            release_freed()


def release_freed() -> None:
    """Hand what this process has freed back to the kernel, however its allocator is tuned."""
    malloc_trim = getattr(_libc(), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


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
def without_preempting() -> Iterator[None]:
    """Let this thread wait for its core where Linux would hand it over at once, for the length of a block.

    The scheduler's process answers all ranks, one after the other. A rank that it woke on its own core
    would put it aside before the next one has its answer, until the kernel looks again.
    """
    changed = _change_policy("SCHED_OTHER", "SCHED_BATCH")
    try:
        yield
    finally:
        if changed:
            _change_policy("SCHED_BATCH", "SCHED_OTHER")


def _change_policy(before: str, after: str) -> bool:
    """Whether this thread had the one scheduling policy and has the other now."""
    try:
        if os.sched_getscheduler(0) != getattr(os, before):
            return False
        os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))
    except (AttributeError, OSError):  # there are no policies, or it is forbidden
        return False
    return True


def _trims_eagerly() -> bool:
    """Whether glibc's thresholds are fixed, and low, in this process.

    Elsewhere they adapt by themselves, and setting them once would end that for good. A nanny
    writes its variables into its own process too, where they came too late to take effect: only
    a child can have started with them.
    """
    started_by_nanny = multiprocessing.parent_process() is not None
    return started_by_nanny and "MALLOC_TRIM_THRESHOLD_" in os.environ


def _from_environment(option: _Option) -> int:
    try:
        return int(os.environ[option.variable])
    except (KeyError, ValueError):
        return option.default


def _set(values: dict[_Option, int]) -> None:
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None:
        for option, value in values.items():
            mallopt(option.number, value)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, the only one with these options."""
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # another thread of the parent may have held it
    os.register_at_fork(after_in_child=_renew_lock)
