"""Bring daskps to the scheduler and the workers of a cluster."""

from __future__ import annotations

import logging
from typing import Any

from distributed import Client

import daskps
from daskps import config
from daskps._scheduler_plugin import DaskpsSchedulerPlugin
from daskps._worker_plugin import DaskpsWorkerPlugin
from daskps.exceptions import InstallationError

logger = logging.getLogger("daskps")


def register(client: Client) -> None:
    """Bring both plugins to the cluster, unless they are there."""
    _register(client, DaskpsSchedulerPlugin(), "scheduler")
    try:
        _register(client, DaskpsWorkerPlugin(), "workers", config.seconds("timeouts.connect"))
    except OSError:
        # A worker is gone, or does not answer, for which Dask would wait for minutes. Those that have
        # loaded daskps say so themselves.
        logger.debug("could not bring daskps to all workers", exc_info=True)


def _register(client: Client, plugin: Any, side: str, seconds: float | None = None) -> None:
    async def register() -> None:
        await client.register_plugin(plugin)

    try:
        client.sync(register, callback_timeout=seconds)
    except Exception as error:
        if not _is_about_loading(error):
            raise
        raise InstallationError(
            f"The {side} cannot load daskps ({error}): install daskps {daskps.__version__} in"
            " that environment and restart it."
        ) from error


def _is_about_loading(error: Exception) -> bool:
    """Whether a plugin could not be unpickled; Dask sends what it cannot pickle as text."""
    kinds = (ImportError, AttributeError)
    return isinstance(error, kinds) or any(kind in str(error) for kind in ("ModuleNotFound", "ImportError"))
