"""Generations that have ended: their ranks are told to leave, and who has still to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distributed import Scheduler

from daskps._generation import Generation, Place
from daskps._spec import FORGET
from daskps.exceptions import DaskpsError


class Leaving:
    """Who has yet to leave which generation. Dask stops no thread: whoever is told leaves by himself.

    Parameters
    ----------
    scheduler : Scheduler
    on_left : callable
        Called with the place of a generation that all ranks have left, or had long enough to leave.
    """

    def __init__(self, scheduler: Scheduler, on_left: Callable[[Place], None]) -> None:
        self._scheduler = scheduler
        self._on_left = on_left
        self.places: dict[Place, set[str]] = {}

    def fence(self, run: Generation, reason: DaskpsError) -> None:
        """End a generation: its connections close and the workers' plugins tell the ranks to leave."""
        if run.fenced:
            return
        run.close(reason)
        here = [address for address in run.addresses if address in self._scheduler.workers]
        for address in here:
            forget = {"op": FORGET, "run_id": run.run_id, "generation": run.generation}
            self._scheduler.worker_send(address, forget)
        leaving = set(here) - set(run.lost_workers())
        if leaving:
            self.places[run.place] = leaving
            loop = asyncio.get_running_loop()
            loop.call_later(run.terms.rules.close, self._all_left, run.place)

    def has_left(self, worker: str, place: Place) -> None:
        """A worker's rank has left a generation."""
        leaving = self.places.get(place)
        if leaving is not None:
            leaving.discard(worker)
            if not leaving:
                self._all_left(place)

    def is_gone(self, worker: str) -> None:
        """A worker has left the cluster."""
        for place in list(self.places):
            self.has_left(worker, place)

    def holds(self, run_id: str) -> bool:
        """Whether a rank of a run may still be there."""
        return run_id in {place[0] for place in self.places}

    def _all_left(self, place: Place) -> None:
        if self.places.pop(place, None) is not None:
            self._on_left(place)
