"""What a process of a cluster says of itself; torch and skorch are imported on workers only."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from distributed.comm import get_address_host

import daskps
from daskps import _sharedmemory
from daskps._crowding import Place
from daskps._findings import Facts
from daskps._machine import cores_of_process

SHARED = ("daskps", "dask", "distributed", "cloudpickle")
TRAINING = ("torch", "skorch", "numpy")


async def of_worker(dask_worker: Any) -> Facts:
    """Facts of a worker; imports take a while, during which it goes on."""
    host = get_address_host(dask_worker.address)
    return await asyncio.to_thread(facts, host, dask_worker.state.nthreads, TRAINING)


def of_scheduler(dask_scheduler: Any) -> Facts:
    """Facts of the scheduler."""
    return facts(get_address_host(dask_scheduler.address), 1)


def facts(host: str = "", n_threads: int = 1, to_import: Sequence[str] = ()) -> Facts:
    """Facts of this process."""
    failed = {}
    for name in to_import:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"
    return Facts(
        {name: _version(name) for name in (*SHARED, *TRAINING)},
        failed,
        Place(host, cores_of_process(), n_threads),
        _sharedmemory.available() if _sharedmemory.is_available() else float("inf"),
    )


def _version(package: str) -> str:
    if package == "daskps":
        return daskps.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
