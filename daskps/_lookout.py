"""What is done about workers that are lost to a run: gone from the cluster, cut off, or silent."""

from __future__ import annotations

import asyncio
from time import time

from distributed import Scheduler

from daskps._generation import Generation, Loss
from daskps._leaving import Leaving
from daskps._silence import Silence
from daskps._spec import TOPIC
from daskps.exceptions import WorkerLostError


class Lookout:
    """Ends the generations of runs that have lost a worker, and tells their clients.

    Parameters
    ----------
    scheduler : Scheduler
    runs : dict
        Those that are open, by their id.
    leaving : Leaving
    """

    def __init__(self, scheduler: Scheduler, runs: dict[str, Generation], leaving: Leaving) -> None:
        self._scheduler = scheduler
        self._runs = runs
        self._leaving = leaving
        self._silence = Silence(time())
        self._listening: asyncio.Task | None = None
        self._restarting: set[asyncio.Task] = set()

    def start(self) -> None:
        """As long as a run is open, look for workers that have fallen silent."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen())

    def stop(self) -> None:
        """Look no more."""
        if self._listening is not None:
            self._listening.cancel()

    def is_gone(self, worker: str) -> None:
        """A worker has left the cluster."""
        for run in list(self._runs.values()):
            if worker in run.addresses:
                self._lose(run, worker, "left the cluster")

    def cut_off(self, run: Generation) -> None:
        """The rounds ended by themselves: a rank's connection is closed.

        Mostly its worker is gone, and Dask says which one in a moment, while the others leave.
        """
        if run.fenced or run.server.error is not None:
            return
        run.cut = f"The connection of a rank of run {run.run_id} was cut in round {run.server.round}"
        self._leaving.fence(run, WorkerLostError(run.cut))

    def all_left(self, run: Generation) -> None:
        """The ranks of a generation have left. If no worker is gone, only a connection was."""
        if run.cut and not run.lost:
            self._tell(run, run.cut, None)

    def _lose(self, run: Generation, worker: str, why: str) -> None:
        if worker in run.lost_workers():
            return
        rank, n_round = run.addresses.index(worker), run.server.round
        reason = f"Worker {worker}, rank {rank} of run {run.run_id}, {why} in round {n_round}"
        run.lost.append(Loss(worker, rank, n_round, reason))
        self._leaving.fence(run, WorkerLostError(reason))
        self._tell(run, reason, worker)

    def _tell(self, run: Generation, reason: str, worker: str | None) -> None:
        news = {
            "lost": reason,
            "worker": worker,
            "round": run.server.round,
            "allowed_failures": self._scheduler.allowed_failures,
        }
        self._scheduler.log_event(TOPIC, {**run.key._asdict(), **news})

    async def _listen(self) -> None:
        while self._runs:
            await asyncio.sleep(Silence.INTERVAL)
            self._silence.looked(time())
            for run in list(self._runs.values()):
                if not run.fenced:
                    self._lose_the_silent(run)
        self._listening = None

    def _lose_the_silent(self, run: Generation) -> None:
        patience = run.terms.silence(len(self._scheduler.workers))
        for address in run.addresses:
            state = self._scheduler.workers.get(address)
            if state is not None and self._silence.of(state.last_seen) > patience:
                self._lose(run, address, f"sent no heartbeat for {patience:g} s (daskps.timeouts.silence)")
                self._restart(address)

    def _restart(self, worker: str) -> None:
        """What Dask itself does later: its data is computed elsewhere, and its nanny starts it anew."""
        restarting = self._scheduler.restart_workers(
            [worker], wait_for_workers=False, on_error="return", stimulus_id="daskps-silence"
        )
        task = asyncio.create_task(restarting)
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)
