"""Which Dask client a fit uses, and the private cluster of a process that has none."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakSet

import dask
import distributed.utils
from dask.system import cpu_count
from distributed import Client, LocalCluster, Security, worker_client
from distributed.comm import get_address_host, normalize_address, parse_address

from daskps import _folds
from daskps._process import in_pool, in_task
from daskps.exceptions import DaskpsError

__all__ = ["client_for"]

_UNGUARDED = (
    "Dask could not start the workers of a private cluster. Put what your script runs under "
    "`if __name__ == '__main__':`, because every worker imports the script before it starts; "
    "if it stands there already, start a `distributed.Client()` before fit to see what is wrong."
)

_CERTIFICATES = "distributed.comm.tls.ca-file, .client.cert and .client.key"

# Nobody looks at a private cluster, and each of its parts would wake 50 times a second to measure itself.
_WITHOUT_STATISTICS = {
    "distributed.admin.tick.interval": "1s",
    "distributed.worker.profile.enabled": False,
}

# Clients of the process from which this one was forked: they say "running", but nothing runs them.
_inherited: WeakSet[Client] = WeakSet()

# By process: the child must not touch the parent's, nor drop it, which would close it.
_locks: dict[int, threading.Lock] = {}
_private: dict[int, Client] = {}

# By process and address. Garbage may be collected, and its owner told, in whoever has the lock.
_connecting = threading.RLock()
_connections: dict[tuple[int, str], _Connection] = {}


@contextmanager
def client_for(client: Client | str | None) -> Iterator[Client]:
    """Yield the client that a fit is to use.

    Parameters
    ----------
    client : Client, str or None
        A client, which stays open; the address of a scheduler, with a connection that is closed
        at the end of the block or, in a search, of the search, and in a task of that scheduler the
        worker's own client; or None for the current client and, where there is none, this process's
        private cluster.

    Raises
    ------
    TypeError, ValueError
        If it is none of these, or no address.

    Notes
    -----
    Inside a Dask task the thread secedes for the length of the block, whichever client is used:
    the tasks of the fit may need the very thread that waits for them.
    """
    _check_client(client)
    with ExitStack() as stack:
        own = stack.enter_context(worker_client()) if in_task() else None
        if own is not None and _is_at(own, client):  # a worker has certificates, its settings may have none
            used = own
        elif isinstance(client, str):
            used = stack.enter_context(_connected(client))
        else:
            used = client or own or _current_client() or _private_client()
        yield _usable(used)


def _is_at(client: Client, address: Any) -> bool:
    """Whether this is the address of the client's scheduler."""
    return isinstance(address, str) and client.scheduler.address == normalize_address(address)  # type: ignore[union-attr]


def _check_client(client: Any) -> None:
    if isinstance(client, str):
        try:
            get_address_host(client)
        except ValueError as error:  # a Client would raise it too, and then its process would never end
            raise ValueError(
                f"The 'client' parameter must be an address such as 'tcp://host:8786', got {client!r}"
                f" instead: {error}."
            ) from error
    elif not isinstance(client, Client | None):
        raise TypeError(
            "The 'client' parameter must be a distributed.Client, the address of a scheduler or None, got"
            f" {client!r} instead."
        )


def _check_encryption(address: str) -> None:
    """Refuse what Dask's settings cannot connect to: a Client would, and its process would never end."""
    if dask.config.get("distributed.client.security-loader"):  # Dask asks that for the certificates
        return
    try:
        arguments = Security().get_connection_args("client")
    except OSError as error:
        raise ValueError(f"The certificates of {_CERTIFICATES} cannot be read: {error}.") from error
    encrypted = parse_address(address)[0] in ("tls", "wss")
    if encrypted and arguments["ssl_context"] is None:
        raise ValueError(
            f"{address} wants certificates and Dask's settings name none: set {_CERTIFICATES}, or give a"
            " distributed.Client with a Security of its own."
        )
    if not encrypted and arguments["require_encryption"]:
        raise ValueError(
            f"{address} is not encrypted, which Dask's setting distributed.comm.require-encryption demands:"
            " use the address that the scheduler has with TLS, or change the setting."
        )


@contextmanager
def _connected(address: str) -> Iterator[Client]:
    """A client of a scheduler. What fits of a search have in common they send over one."""
    _check_encryption(address)
    owners = _folds.current_fold()
    if owners:
        yield _shared_connection(address, owners)
        return
    with Client(address, set_as_default=False) as client:
        yield client


def _shared_connection(address: str, owners: list[Any]) -> Client:
    """One for this process, which stays open as long as there is a fold all of whose owners live."""
    key = (os.getpid(), address)
    with _connecting:
        if key not in _connections or _connections[key].client.status != "running":
            _connections[key] = _Connection(address)
        _connections[key].keep_for(owners)
        return _connections[key].client


class _Connection:
    """A client that several fits use."""

    def __init__(self, address: str) -> None:
        self.client = Client(address, set_as_default=False)
        self._key = (os.getpid(), address)
        self._folds: dict[tuple[int, ...], list[weakref.ref]] = {}

    def keep_for(self, owners: list[Any]) -> None:
        fold = tuple(map(id, owners))
        self._folds[fold] = [weakref.ref(owner, lambda _: self._forget(fold)) for owner in owners]

    def _forget(self, fold: tuple[int, ...]) -> None:
        with _connecting:
            self._folds.pop(fold, None)
            if self._folds or _connections.get(self._key) is not self:
                return
            del _connections[self._key]
        # Not here: garbage is collected in any thread, the client's own among them.
        threading.Thread(target=self.client.close, daemon=True).start()


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
    try:
        with _muted("distributed"), _same_environ():
            cluster = _local_cluster()
    except RuntimeError:
        raise DaskpsError(_UNGUARDED) from None
    # Its workers are of this host, so rows need not pass through the scheduler.
    client = Client(cluster, set_as_default=False, direct_to_workers=True)
    _close_at_exit(client, cluster)
    return client


def _close_at_exit(client: Client, cluster: LocalCluster) -> None:
    """Close client and cluster in this order, or the scheduler laments the results of the first.

    A child of multiprocessing runs no atexit, only finalizers; 100 is before those of the queues
    through which the workers are told to stop.
    """

    def close() -> None:
        client.close()
        cluster.close()

    atexit.register(Finalize(None, close, exitpriority=100))


def _local_cluster() -> LocalCluster:
    """Start one process per core that this process may use or, in a pool, one worker in it."""
    with dask.config.set(_WITHOUT_STATISTICS):
        return LocalCluster(
            n_workers=1 if in_pool() else cpu_count(),
            threads_per_worker=1,
            processes=not in_pool(),
            dashboard_address=None,
            scheduler_kwargs={"dashboard_address": ":0"},  # or it asks for 8787 nevertheless
        )


@contextmanager
def _same_environ() -> Iterator[None]:
    """Take out again what a nanny writes into its own environment, such as OMP_NUM_THREADS=1."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


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


def _after_fork() -> None:
    """Tell apart what the parent left behind, and renew what a new client needs to work.

    distributed serialises large messages on one thread of its own, which stays in the parent: the
    child would wait for ever for its first message of 10 MB.
    """
    _inherited.update(Client._instances)
    distributed.utils._offload_executor = ThreadPoolExecutor(1, "Dask-Offload")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
