"""The scheduler's side: a thin shell around the parameter server and the leases.

Everything here runs on the scheduler's event loop, except for the sums, which have a thread of their
own: a buffer of ten million floats must not delay a heartbeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, time
from typing import Any

from distributed import Scheduler
from distributed.comm import Comm, CommClosedError
from distributed.core import Status
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import heartbeat_interval

import daskps
from daskps import _joining
from daskps._housekeeping import go_on, hold_back, with_nannies
from daskps._leases import Leases, Request
from daskps._messages import Handler, checked, ignoring, refuse_invalid
from daskps._paused import Paused, holding_up
from daskps._rounds import RoundServer
from daskps._server import ParameterServer
from daskps._silence import Silence
from daskps._spec import (
    CLOSE,
    FORGET,
    HELLO,
    JOIN,
    LEFT,
    OPEN,
    PAUSED,
    RENEW,
    SCHEDULER_PLUGIN,
    TOPIC,
    Rules,
)
from daskps.exceptions import (
    ClusterTooSmallError,
    DaskpsError,
    InstallationError,
    InvalidMessageError,
    RunAbortedError,
    StaleMessageError,
    WorkerLostError,
)

logger = logging.getLogger("daskps")


class DaskpsSchedulerPlugin(SchedulerPlugin):
    """Opens runs, leases workers to them and serves their rounds."""

    name = SCHEDULER_PLUGIN
    idempotent = True

    # `start` must not suspend: the scheduler awaits it before it notes the plugin, so a second
    # registration meanwhile would run it again.
    async def start(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.runs: dict[str, _Run] = {}
        self.leases = Leases()
        self.asking: dict[str, str] = {}  # the client of every request in the queue
        self.processes: dict[str, str] = {}
        # By run and generation: who has yet to leave it.
        self.leaving: dict[tuple[str, int], set[str]] = {}
        self._changed = asyncio.Event()
        self._silence = Silence(time())
        self._watching: asyncio.Task | None = None
        self._restarting: set[asyncio.Task] = set()
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
        if self._watching is not None:
            self._watching.cancel()

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
        if run_id in self.runs or run_id in self.asking or run_id in self.leases.held():
            raise InvalidMessageError(f"run {run_id!r} has been opened already")
        request = Request(run_id, n_workers, most)
        terms = Terms(client, request, workers, resources or {}, Rules(*rules))
        self.leases.ask(request)
        addresses = await self._granted(request, terms)
        self._begin(_Run(run_id, terms, addresses))
        logger.info("run %s opens on %d ranks", run_id, len(addresses))
        return addresses

    async def renew(self, run_id: str, join: bool) -> dict[str, Any]:
        """The workers of a run from now on: those that are left and, with ``join``, those that are new.

        If they are not those that the run had, its next generation begins as soon as all ranks have
        left the last one.
        """
        run = self._open_run(run_id)
        joining = self.leases.grow(run.terms.request, self._eligible(run.terms)) if join else []
        if joining:
            self._fence(run, RunAbortedError("more workers join the run"))
        elif not run.fenced:
            return run.members(self.scheduler.allowed_failures)
        while run.place in self.leaving:
            await self._change(at_most=0.5)
        self._refuse_ended(run)
        addresses = await self._left_and(joining, run)
        self._refuse_ended(run)
        new = _Run(run_id, run.terms, addresses, run.generation + 1)
        self._begin(new)
        logger.info("run %s goes on with %d ranks", run_id, len(addresses))
        return {**new.members(self.scheduler.allowed_failures), "lost": [loss.worker for loss in run.lost]}

    def _refuse_ended(self, run: _Run) -> None:
        """Hold nothing for a run that has ended while it was being renewed."""
        if self.runs.get(run.run_id) is not run:
            self._release(run.run_id)
            raise RunAbortedError(f"run {run.run_id} has ended")

    async def _left_and(self, joining: list[str], run: _Run) -> list[str]:
        """Who can go on; if nobody can, the first who comes."""
        lost = {loss.worker for loss in run.lost}
        members = [a for a in (*run.addresses, *joining) if a not in lost and self._stays(a)]
        self.leases.keep(run.run_id, [self.processes[address] for address in members])
        if members:
            return members
        self.leases.release(run.run_id)
        request = Request(run.run_id, 1, 1)
        self.leases.ask(request, first=True)
        return await self._granted(request, run.terms)

    def _stays(self, address: str) -> bool:
        state = self.scheduler.workers.get(address)
        return state is not None and state.status in (Status.running, Status.paused)

    async def _granted(self, request: Request, terms: Terms) -> list[str]:
        """What a request that waits in the queue gets; nothing stays in the queue."""
        self.asking[request.run_id] = terms.client
        try:
            return await self._lease(request, terms)
        except BaseException:
            self.leases.release(request.run_id)
            raise
        finally:
            self.asking.pop(request.run_id, None)

    def _open_run(self, run_id: str) -> _Run:
        run = self.runs.get(run_id)
        if run is None:
            raise RunAbortedError(f"run {run_id} is not open")
        return run

    def _begin(self, run: _Run) -> None:
        self.runs[run.run_id] = run
        for server in with_nannies(self.scheduler):
            hold_back(server)
        run.serve(lambda: self._cut_off(run))
        if self._watching is None:
            self._watching = asyncio.create_task(self._listen())

    async def close_run(self, run_id: str) -> None:
        """End a run, or a request for one."""
        self.leases.release(run_id) if run_id not in self.runs else None
        self._end(run_id, RunAbortedError("the client closed the run"))
        self._wake()

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
        if worker in self.scheduler.workers:
            self.processes[worker] = process if version == daskps.__version__ else f"!{version}"
            self._wake()

    async def left(self, worker: str, run_id: str, generation: int) -> None:
        """The thread of a rank has left a generation that ended."""
        self._has_left(worker, (run_id, generation))

    # What happens to the cluster

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._wake()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.processes.pop(worker, None)
        for run in list(self.runs.values()):
            if worker in run.addresses:
                self._lose(run, worker, "left the cluster")
        for place in list(self.leaving):
            self._has_left(worker, place)
        self._wake()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for run_id, run in list(self.runs.items()):
            if run.terms.client == client:
                self._end(run_id, RunAbortedError(f"the client {client} is gone"))
        for run_id, asking in self.asking.items():
            if asking == client:
                self.leases.release(run_id)
        self._wake()

    def restart(self, scheduler: Scheduler) -> None:
        for run_id in list(self.runs):
            self._end(run_id, RunAbortedError("the cluster restarts"))

    def valid_workers_downscaling(self, scheduler: Scheduler, workers: list) -> list:
        """Adaptive scaling takes no worker that a run holds."""
        held = {process for processes in self.leases.held().values() for process in processes}
        return [worker for worker in workers if self.processes.get(worker.address) not in held]

    def _lose(self, run: _Run, worker: str, why: str) -> None:
        if worker in [loss.worker for loss in run.lost]:
            return
        rank, n_round = run.addresses.index(worker), run.server.round
        reason = f"Worker {worker}, rank {rank} of run {run.run_id}, {why} in round {n_round}"
        run.lost.append(Loss(worker, rank, n_round, reason))
        self._fence(run, WorkerLostError(reason))
        self._tell_lost(run, reason, worker)

    def _cut_off(self, run: _Run) -> None:
        """The rounds ended by themselves: a rank's connection is closed.

        Mostly its worker is gone, and Dask says which one in a moment, while the others leave.
        """
        if run.fenced or run.server.error is not None:
            return
        run.cut = f"The connection of a rank of run {run.run_id} was cut in round {run.server.round}"
        self._fence(run, WorkerLostError(run.cut))

    def _tell_lost(self, run: _Run, reason: str, worker: str | None) -> None:
        news = {"lost": reason, "worker": worker, "round": run.server.round}
        self.scheduler.log_event(TOPIC, {"run_id": run.run_id, "generation": run.generation, **news})

    def _end(self, run_id: str, reason: DaskpsError) -> None:
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        self._fence(run, reason)
        if not self.runs:
            for server in with_nannies(self.scheduler):
                go_on(server)
        self._release(run_id)
        self.scheduler.log_event(TOPIC, {"run_id": run_id, "ended": str(reason)})

    def _fence(self, run: _Run, reason: DaskpsError) -> None:
        """End a generation: its connections close and the workers' plugins tell the ranks to leave."""
        if run.fenced:
            return
        run.close(reason)
        here = [address for address in run.addresses if address in self.scheduler.workers]
        for address in here:
            forget = {"op": FORGET, "run_id": run.run_id, "generation": run.generation}
            self.scheduler.worker_send(address, forget)
        leaving = set(here) - {loss.worker for loss in run.lost}
        if leaving:
            self.leaving[run.place] = leaving
            loop = asyncio.get_running_loop()
            loop.call_later(run.terms.rules.close, self._all_left, run.place)

    def _has_left(self, worker: str, place: tuple[str, int]) -> None:
        leaving = self.leaving.get(place)
        if leaving is not None:
            leaving.discard(worker)
            if not leaving:
                self._all_left(place)

    def _all_left(self, place: tuple[str, int]) -> None:
        if self.leaving.pop(place, None) is None:
            return
        run = self.runs.get(place[0])
        if run is not None and run.place == place and run.cut and not run.lost:
            self._tell_lost(run, run.cut, None)
        self._release(place[0])

    def _release(self, run_id: str) -> None:
        """Give back what a run holds if it has ended and all ranks have left."""
        if run_id not in self.runs and run_id not in {place[0] for place in self.leaving}:
            self.leases.release(run_id)
        self._wake()

    async def _listen(self) -> None:
        """As long as a run is open, look for workers that have fallen silent."""
        while self.runs:
            await asyncio.sleep(Silence.INTERVAL)
            self._silence.looked(time())
            for run in list(self.runs.values()):
                if not run.fenced:
                    self._lose_the_silent(run)
        self._watching = None

    def _lose_the_silent(self, run: _Run) -> None:
        patience = max(run.terms.rules.silence, 4 * heartbeat_interval(len(self.scheduler.workers)))
        for address in run.addresses:
            state = self.scheduler.workers.get(address)
            if state is None or not self._silence.of(state.last_seen) > patience:
                continue
            self._lose(run, address, f"sent no heartbeat for {patience:g} s (daskps.timeouts.silence)")
            # What Dask itself does later: its data is computed elsewhere, and its nanny starts it anew.
            restarting = self.scheduler.restart_workers(
                [address], wait_for_workers=False, on_error="return", stimulus_id="daskps-silence"
            )
            task = asyncio.create_task(restarting)
            self._restarting.add(task)
            task.add_done_callback(self._restarting.discard)

    # Leases

    async def _lease(self, request: Request, terms: Terms) -> list[str]:
        """One address for each rank, as soon as it is this request's turn."""
        short_since, patience = monotonic(), terms.rules.workers
        while request.run_id in self.leases.waiting():
            usable = self._usable(terms)
            eligible = self._eligible(terms)
            _refuse_other_versions(eligible)
            silent = [address for address in usable if address not in eligible]
            if not silent or request.n_workers:
                addresses = self.leases.grant(request, eligible)
                if addresses is not None:
                    return addresses
            n_processes = len(set(eligible.values()))
            wanted = request.wanted(n_processes)
            self._ask_for_more(request, wanted > n_processes + len(silent))
            if not silent and n_processes >= wanted:
                short_since = monotonic()  # there are enough, other runs hold them
            elif monotonic() - short_since > patience:
                raise _too_small(request, n_processes, silent, patience)
            await self._change(at_most=0.5)
        raise RunAbortedError(f"the request for run {request.run_id} was taken back")

    def _ask_for_more(self, request: Request, too_few: bool) -> None:
        """Tell the client how many placeholder tasks make an adaptive cluster grow enough.

        Again and again: the client's subscription may come later than its request. Dask divides the
        tasks that wait by the threads of a worker, and counts no worker that is idle.
        """
        n_threads = max((worker.nthreads for worker in self.scheduler.workers.values()), default=1)
        n_tasks = request.wanted(0) * n_threads if too_few else 0
        self.scheduler.log_event(TOPIC, {"run_id": request.run_id, "wanted": n_tasks})

    def _eligible(self, terms: Terms) -> dict[str, str]:
        """The process of every usable worker that has loaded daskps."""
        return {a: self.processes[a] for a in self._usable(terms) if a in self.processes}

    def _usable(self, terms: Terms) -> list[str]:
        """Addresses of running workers that satisfy the annotations around the fit."""
        allowed = None if terms.workers is None else self._resolve(terms.workers)
        return [
            address
            for address, state in self.scheduler.workers.items()
            if state.status == Status.running
            and (allowed is None or address in allowed)
            and all(state.resources.get(key, 0) >= value for key, value in terms.resources.items())
        ]

    def _resolve(self, workers: list[str]) -> set[str]:
        """Addresses of workers given by address, host name or alias, as ``Client.submit`` takes them."""
        known = [self.scheduler.coerce_address(w) if w in self.scheduler.aliases else w for w in workers]
        return set(self.scheduler.workers_list(known))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, at_most: float) -> None:
        # No hook tells when a paused worker runs again, hence a look every now and then.
        try:
            await asyncio.wait_for(self._changed.wait(), at_most)
        except TimeoutError:
            return


@dataclass(frozen=True)
class Terms:
    """What a run asked for."""

    client: str
    request: Request
    workers: list[str] | None
    """The only ones that may be used, as `Client.submit` takes them."""
    resources: dict[str, float]
    rules: Rules


@dataclass(frozen=True)
class Loss:
    """A worker that left, the rank that it held, and when that was."""

    worker: str
    rank: int
    round: int
    reason: str


class _Run:
    """One generation of an open run: its parameter server and the thread that serves its rounds."""

    def __init__(self, run_id: str, terms: Terms, addresses: list[str], generation: int = 0) -> None:
        self.server = ParameterServer(run_id, len(addresses))
        self.server.generation = generation
        self.run_id = run_id
        self.terms = terms
        self.addresses = addresses
        self.generation = generation
        self.place = run_id, generation
        self.lost: list[Loss] = []
        self.cut = ""
        self.fenced = False
        self.over = asyncio.Event()
        self.rounds: RoundServer | None = None

    def serve(self, on_cut: Callable[[], None]) -> None:
        """Start the thread that serves the rounds; ``on_cut`` is called when it has ended."""
        if len(self.addresses) > 1:
            loop = asyncio.get_running_loop()
            self.rounds = RoundServer(
                self.server,
                self.terms.rules.round,
                lambda: _call_soon(loop, self._ended, on_cut),
                self.terms.rules.wire_dtype,
            )

    def members(self, allowed_failures: int) -> dict[str, Any]:
        """What the client has to know of the workers."""
        return {
            "addresses": self.addresses,
            "generation": self.generation,
            "lost": [],
            "allowed_failures": allowed_failures,
        }

    def close(self, reason: DaskpsError) -> None:
        self.fenced = True
        self.server.fail(reason)
        if self.rounds is not None:
            self.rounds.close(reason)
        self.over.set()

    def _ended(self, on_cut: Callable[[], None]) -> None:
        self.over.set()
        on_cut()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable, *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return


def _refuse_other_versions(eligible: dict[str, str]) -> None:
    for address, process in eligible.items():
        if process.startswith("!"):
            raise InstallationError(
                f"The worker {address} has daskps {process[1:]} and the scheduler has"
                f" {daskps.__version__}: install one version everywhere and restart the worker."
            )


def _too_small(request: Request, n_processes: int, silent: list[str], patience: float) -> DaskpsError:
    if silent:
        return InstallationError(
            f"The workers {silent} did not load daskps within {patience:g} s: install daskps"
            f" {daskps.__version__} in their environment and restart them."
        )
    return ClusterTooSmallError(
        f"The fit asked for {request.wanted(n_processes)} workers (n_workers={request.n_workers}) and"
        f" {n_processes} usable worker processes came within daskps.timeouts.workers ({patience:g} s)."
    )
