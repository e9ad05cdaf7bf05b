"""Which Dask client a fit uses, and the private cluster of a process that has none."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from weakref import WeakSet

from dask.system import cpu_count
from distributed import Client, LocalCluster, get_worker, worker_client

from daskps.exceptions import DaskpsError

__all__ = ["client_for", "in_task"]

_UNGUARDED = (
    "Dask could not start the workers of a private cluster. Put what your script runs under "
    "`if __name__ == '__main__':`, because every worker imports the script before it starts; "
    "if it stands there already, start a `distributed.Client()` before fit to see what is wrong."
)

# A forked child gets copies of all clients that say "running" while nothing runs them.
_inherited: WeakSet[Client] = WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _inherited.update(Client._instances))

# By process: the child must not touch the parent's, nor drop it, which would close it.
_locks: dict[int, threading.Lock] = {}
_private: dict[int, Client] = {}


@contextmanager
def client_for(client: Client | str | None) -> Iterator[Client]:
    """Yield the client that a fit is to use.

    Parameters
    ----------
    client : Client, str or None
        A client, which stays open; the address of a scheduler, with a connection that is closed
        at the end of the block; or None for the current client and, where there is none, this
        process's private cluster.

    Notes
    -----
    Inside a Dask task the thread secedes for the length of the block, whichever client is used:
    the tasks of the fit may need the very thread that waits for them.
    """
    with ExitStack() as stack:
        own = stack.enter_context(worker_client()) if in_task() else None
        if isinstance(client, str):
            client = stack.enter_context(Client(client, set_as_default=False))
        yield _usable(client or own or _current_client() or _private_client())


def in_task() -> bool:
    """Whether this code runs inside a task on a Dask worker."""
    try:
        get_worker()
    except ValueError:
        return False
    return True


def _usable(client: Client) -> Client:
    """Return the client, or say at once why a fit would wait for it in vain."""
    if client in _inherited:
        raise DaskpsError(
            "The client belongs to the process from which this one was forked; "
            "connect a new `distributed.Client` here."
        )
    if client.asynchronous:
        raise DaskpsError(
            "fit blocks and needs a synchronous client, but got an asynchronous one; give it the "
            "scheduler's address or a `distributed.Client(asynchronous=False)`, and call it "
            "outside the event loop."
        )
    if client.status != "running":
        raise DaskpsError(f"The client is not connected to a scheduler, it is {client.status!r}.")
    return client


def _current_client() -> Client | None:
    """Return the client that Dask itself would use here, unless a fork left it behind."""
    try:
        client = Client.current()
    except ValueError:
        return None
    return None if client in _inherited else client


def _private_client() -> Client:
    """Return the client of this process's private cluster, and start it if need be."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # A worker that is only importing a script without a guard: its parent has the word.
        raise SystemExit(1)
    pid = os.getpid()
    with _locks.setdefault(pid, threading.Lock()):
        if pid not in _private or _private[pid].status != "running":
            _private[pid] = _start_private_client()
        return _private[pid]


def _start_private_client() -> Client:
    daemonic = multiprocessing.current_process().daemon  # which may not have children
    try:
        with _muted("distributed"):
            cluster = LocalCluster(
                n_workers=1 if daemonic else _cores(),
                threads_per_worker=1,
                processes=not daemonic,
                dashboard_address=None,
            )
    except RuntimeError:
        raise DaskpsError(_UNGUARDED) from None
    return Client(cluster, set_as_default=False)


def _cores() -> int:
    """Return how many cores this process may use."""
    cores = cpu_count()
    if multiprocessing.parent_process() is not None:  # joblib tells a child its share this way
        cores = min(cores, int(os.environ.get("OMP_NUM_THREADS", cores)))
    return cores


@contextmanager
def _muted(name: str) -> Iterator[None]:
    """Keep a logger's handlers still; a worker that fails to start fills screens otherwise."""

    def nothing(record: logging.LogRecord) -> bool:
        return False

    handlers = list(logging.getLogger(name).handlers)
    for handler in handlers:
        handler.addFilter(nothing)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(nothing)
