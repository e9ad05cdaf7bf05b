"""The scheduler's side: opens, renews and ends runs, and answers what is sent to Dask's scheduler.

Everything here runs on the scheduler's event loop, except for the sums, which have a thread of their
own: a buffer of ten million floats must not delay a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic
from typing import Any

from distributed import Scheduler
from distributed.comm import Comm, CommClosedError
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin

from daskps import _joining
from daskps._generation import Generation, Terms
from daskps._housekeeping import go_on, hold_back, with_nannies
from daskps._leases import Request
from daskps._leaving import Leaving
from daskps._lending import Lender
from daskps._lookout import Lookout
from daskps._messages import Handler, checked, ignoring, refuse_invalid
from daskps._paused import Paused, holding_up
from daskps._spec import (
    CLOSE,
    HELLO,
    JOIN,
    LEFT,
    OPEN,
    PAUSED,
    RENEW,
    SCHEDULER_PLUGIN,
    TOPIC,
    GenerationKey,
    Rules,
)
from daskps.exceptions import DaskpsError, InvalidMessageError, RunAbortedError, StaleMessageError

logger = logging.getLogger("daskps")

# A fit ends also where Dask keeps what it was told to let go of.
_RELEASE_SECONDS = 1.0


class DaskpsSchedulerPlugin(SchedulerPlugin):
    """Opens runs, leases workers to them and serves their rounds."""

    name = SCHEDULER_PLUGIN
    idempotent = True

    # `start` must not suspend: the scheduler awaits it before it notes the plugin, so a second
    # registration meanwhile would run it again.
    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.runs: dict[str, Generation] = {}
        self.lender = Lender(scheduler)
        self.leaving = Leaving(scheduler, self._all_left)
        self.lookout = Lookout(scheduler, self.runs, self.leaving)
        answering: dict[str, Handler] = {
            OPEN: self.open,
            RENEW: self.renew,
            CLOSE: self.close_run,
            PAUSED: self.paused,
        }
        scheduler.handlers.update({name: checked(name, handler) for name, handler in answering.items()})
        scheduler.handlers[JOIN] = self.join_with
        hearing: dict[str, Handler] = {HELLO: self.hello, LEFT: self.left}
        scheduler.stream_handlers.update(
            {name: ignoring(name, handler) for name, handler in hearing.items()}
        )

    async def before_close(self) -> None:
        for run_id in list(self.runs):
            self._end(run_id, RunAbortedError("the scheduler closes"))
        self.lookout.stop()

    # Handlers: opening and closing a run

    async def open(
        self,
        run_id: str,
        client: str,
        version: str,
        n_workers: int | None,
        most: int,
        rules: list,
        workers: list[str] | None = None,
        resources: dict[str, float] | None = None,
    ) -> list[str]:
        """Wait for a lease and open a run on the leased workers, one rank on each.

        ``rules`` are the client's `Rules`, as a list.
        """
        if client not in self.scheduler.clients:  # it died while this was on its way, and closes no run
            raise RunAbortedError(f"the client {client} is gone")
        if run_id in self.runs or self.lender.knows(run_id):
            raise InvalidMessageError(f"run {run_id!r} has been opened already")
        request = Request(run_id, n_workers, most)
        terms = Terms(client, request, workers, resources or {}, Rules(*rules))
        addresses = await self.lender.lend(terms, request)
        self._begin(Generation(run_id, terms, addresses))
        logger.info("run %s opens on %d ranks", run_id, len(addresses))
        return addresses

    async def renew(self, run_id: str, join: bool) -> dict[str, Any]:
        """The workers of a run from now on: those that are left and, with ``join``, those that are new.

        If they are not those that the run had, its next generation begins as soon as all ranks have
        left the last one.
        """
        run = self._open_run(run_id)
        joining = self.lender.grow(run.terms) if join else []
        if joining:
            self.leaving.fence(run, RunAbortedError("more workers join the run"))
        elif not run.fenced:
            return run.members()
        while run.key in self.leaving.awaited:
            await self.lender.change(at_most=0.5)
        self._refuse_ended(run)
        addresses = await self._left_and(joining, run)
        self._refuse_ended(run)
        new = Generation(run_id, run.terms, addresses, run.generation + 1)
        self._begin(new)
        logger.info("run %s goes on with %d ranks", run_id, len(addresses))
        return {**new.members(), "lost": run.lost_workers()}

    def _refuse_ended(self, run: Generation) -> None:
        """Hold nothing for a run that has ended while it was being renewed."""
        if self.runs.get(run.run_id) is not run:
            self._release(run.run_id)
            raise RunAbortedError(f"run {run.run_id} has ended")

    async def _left_and(self, joining: list[str], run: Generation) -> list[str]:
        """Who can go on; if nobody can, the first who comes."""
        members = self.lender.keep(run, joining)
        if members:
            return members
        self.lender.release(run.run_id)
        return await self.lender.lend(run.terms, Request(run.run_id, 1, 1), first=True)

    def _open_run(self, run_id: str) -> Generation:
        run = self.runs.get(run_id)
        if run is None:
            raise RunAbortedError(f"run {run_id} is not open")
        return run

    def _begin(self, run: Generation) -> None:
        self.runs[run.run_id] = run
        for server in with_nannies(self.scheduler):
            hold_back(server)
        run.serve(lambda: self.lookout.cut_off(run))
        self.lookout.start()

    async def close_run(self, run_id: str, keys: list[str]) -> None:
        """End a run, or a request for one, and answer when its client has let go of these keys.

        That travels apart from this message. A cluster that is closed before it has come complains of
        the loss of data that nobody wants.
        """
        self._end(run_id, RunAbortedError("the client closed the run"))
        self._release(run_id)
        deadline = monotonic() + _RELEASE_SECONDS
        while monotonic() < deadline and any(key in self.scheduler.tasks for key in keys):
            await asyncio.sleep(0.001)

    async def paused(self, keys: list[str]) -> list[Paused]:
        """The workers that keep tasks of a run waiting because Dask has paused them."""
        return holding_up(self.scheduler, keys)

    # Handlers: the data connection of a rank

    async def join_with(self, comm: Comm, /, **message: Any) -> Status:
        """`join`, where the message is one."""
        try:
            refuse_invalid(JOIN, message)
        except InvalidMessageError as error:
            await comm.write(_joining.refusal(error))
            comm.abort()
            return Status.dont_reply
        return await self.join(comm, **message)

    async def join(
        self,
        comm: Comm,
        run_id: str,
        rank: int,
        generation: int,
        capacity: int,
        shared_memory: bool,
    ) -> Status:
        """Bring a rank to the thread that serves its run's rounds."""
        run = self.runs.get(run_id)
        carrying = None
        try:
            if run is None or run.fenced or generation != run.generation:
                raise StaleMessageError(f"generation {generation} of run {run_id!r} is not open")
            if run.rounds is None:
                await comm.write({"status": "OK", "road": "none"})
                return Status.dont_reply
            _joining.refuse_impossible(run.rounds, rank, capacity)
            run.rounds.agree(capacity)
            carrying = await _joining.join(comm, run.rounds, rank, shared_memory, run.terms.rules.connect)
            # The server forgets a connection when its handler returns.
            await run.over.wait()
            if carrying is not None:
                await asyncio.wait([carrying], timeout=1.0)  # it may have a refusal to bring
        except DaskpsError as error:
            await comm.write(_joining.refusal(error))
        except (TimeoutError, CommClosedError, OSError):
            logger.debug("rank %d of run %s closed its connection", rank, run_id)
        finally:
            if carrying is not None:
                carrying.cancel()
            comm.abort()
        return Status.dont_reply

    # Handlers: what workers say of themselves

    async def hello(self, worker: str, process: str, version: str) -> None:
        """A worker's plugin says in which process it runs."""
        self.lender.hello(worker, process, version)

    async def left(self, worker: str, run_id: str, generation: int) -> None:
        """The thread of a rank has left a generation that ended."""
        self.leaving.has_left(worker, GenerationKey(run_id, generation))

    # What happens to the cluster

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self.lender.wake()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.lender.forget(worker)
        self.lookout.is_gone(worker)
        self.leaving.is_gone(worker)
        self.lender.wake()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        # Dask would go on sending it events, and complain that it cannot.
        scheduler.unsubscribe_topic(TOPIC, client)
        for run_id, run in list(self.runs.items()):
            if run.terms.client == client:
                self._end(run_id, RunAbortedError(f"the client {client} is gone"))
        self.lender.forget_client(client)
        self.lender.wake()

    def restart(self, scheduler: Scheduler) -> None:
        for run_id in list(self.runs):
            self._end(run_id, RunAbortedError("the cluster restarts"))

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list) -> list:
        """Adaptive scaling takes no worker that a run holds."""
        lent = self.lender.lent()
        return [worker for worker in workers if self.lender.processes.get(worker.address) not in lent]

    # The end of a run

    def _end(self, run_id: str, reason: DaskpsError) -> None:
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        self.leaving.fence(run, reason)
        if not self.runs:
            for server in with_nannies(self.scheduler):
                go_on(server)
        self._release(run_id)
        self.scheduler.log_event(TOPIC, {"run_id": run_id, "ended": str(reason)})

    def _all_left(self, key: GenerationKey) -> None:
        run = self.runs.get(key.run_id)
        if run is not None and run.key == key:
            self.lookout.all_left(run)
        self._release(key.run_id)

    def _release(self, run_id: str) -> None:
        """Give back what a run holds if it has ended and all ranks have left."""
        if run_id not in self.runs and not self.leaving.holds(run_id):
            self.lender.release(run_id)
        self.lender.wake()
