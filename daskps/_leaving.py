"""Generations that have ended: their ranks are told to leave, and who has still to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed import Scheduler

from daskps._generation import Generation
from daskps._spec import FORGET, GenerationKey
from daskps.exceptions import DaskpsError


class Leaving:
    """Who has yet to leave which generation. Dask stops no thread: whoever is told leaves by himself.

    Parameters
    ----------
    scheduler : Scheduler
    on_left : callable
        Called with the key of a generation that all ranks have left, or had long enough to leave.
    """

    def __init__(self, scheduler: Scheduler, on_left: Callable[[GenerationKey], None]) -> None:
        self._scheduler = scheduler
        self._on_left = on_left
        self.awaited: dict[GenerationKey, set[str]] = {}

    def fence(self, run: Generation, reason: DaskpsError) -> None:
        """End a generation: its connections close and the workers' plugins tell the ranks to leave."""
        if run.fenced:
            return
        run.close(reason)
        here = [address for address in run.addresses if address in self._scheduler.workers]
        for address in here:
            forget = {"op": FORGET, **run.key._asdict()}
            self._scheduler.worker_send(address, forget)
        leaving = set(here) - set(run.lost_workers())
        if leaving:
            self.awaited[run.key] = leaving
            loop = asyncio.get_running_loop()
            loop.call_later(run.terms.rules.close, self._all_left, run.key)

    def has_left(self, worker: str, key: GenerationKey) -> None:
        """A worker's rank has left a generation."""
        leaving = self.awaited.get(key)
        if leaving is not None:
            leaving.discard(worker)
            if not leaving:
                self._all_left(key)

    def is_gone(self, worker: str) -> None:
        """A worker has left the cluster."""
        for key in list(self.awaited):
            self.has_left(worker, key)

    def holds(self, run_id: str) -> bool:
        """Whether a rank of a run may still be there."""
        return run_id in {key.run_id for key in self.awaited}

    def _all_left(self, key: GenerationKey) -> None:
        if self.awaited.pop(key, None) is not None:
            self._on_left(key)
