"""The scheduler's side: a thin shell around the parameter server and the leases.

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

import daskps
from daskps import _joining
from daskps._housekeeping import go_on, hold_back
from daskps._leases import Leases, Request
from daskps._rounds import RoundServer
from daskps._server import ParameterServer
from daskps._spec import (
    CLOSE,
    FORGET,
    HELLO,
    JOIN,
    LEFT,
    OPEN,
    SCHEDULER_PLUGIN,
    TOPIC,
    Rules,
)
from daskps.exceptions import (
    ClusterTooSmallError,
    DaskpsError,
    InstallationError,
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
        self.leaving: dict[str, set[str]] = {}
        self._changed = asyncio.Event()
        scheduler.handlers.update({OPEN: self.open, JOIN: self.join, CLOSE: self.close_run})
        scheduler.stream_handlers.update({HELLO: self.hello, LEFT: self.left})

    async def before_close(self) -> None:
        for run_id in list(self.runs):
            self._end(run_id, RunAbortedError("the scheduler closes"))

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
        if version != daskps.__version__:
            raise InstallationError(
                f"The scheduler has daskps {daskps.__version__} and the client has {version}: install"
                f" daskps {version} in the scheduler's environment and restart it."
            )
        request = Request(run_id, n_workers, most)
        self.leases.ask(request)
        self.asking[run_id] = client
        try:
            addresses = await self._lease(request, workers, resources or {}, Rules(*rules).workers)
        except BaseException:
            self.leases.release(run_id)
            raise
        finally:
            del self.asking[run_id]
        self.runs[run_id] = _Run(run_id, client, addresses, Rules(*rules))
        hold_back(self.scheduler)
        logger.info("run %s opens on %d ranks", run_id, len(addresses))
        return addresses

    async def close_run(self, run_id: str) -> None:
        """End a run, or a request for one."""
        self.leases.release(run_id) if run_id not in self.runs else None
        self._end(run_id, RunAbortedError("the client closed the run"))
        self._wake()

    # Handlers: the data connection of a rank

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
            if run is None or generation != run.server.generation:
                raise StaleMessageError(f"run {run_id!r} is not open")
            if run.rounds is None:
                await comm.write({"status": "OK", "road": "none"})
                return Status.dont_reply
            run.rounds.agree(capacity)
            carrying = await _joining.join(comm, run.rounds, rank, shared_memory, run.rules.connect)
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
        self.processes[worker] = process if version == daskps.__version__ else f"!{version}"
        self._wake()

    async def left(self, worker: str, run_id: str) -> None:
        """The thread of a rank has left a run that ended."""
        leaving = self.leaving.get(run_id)
        if leaving is None:
            return
        leaving.discard(worker)
        if not leaving:
            self._release(run_id)

    # What happens to the cluster

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        self._wake()

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        self.processes.pop(worker, None)
        for run_id, leaving in list(self.leaving.items()):
            leaving.discard(worker)
            if not leaving:
                self._release(run_id)
        for run_id, run in list(self.runs.items()):
            if worker in run.addresses:
                self._lose(run_id, run, worker)
        self._wake()

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        for run_id, run in list(self.runs.items()):
            if run.client == client:
                self._end(run_id, RunAbortedError(f"the client {client} is gone"))
        for run_id, asking in self.asking.items():
            if asking == client:
                self.leases.release(run_id)
        self._wake()

    def restart(self, scheduler: Scheduler) -> None:
        for run_id in list(self.runs):
            self._end(run_id, RunAbortedError("the cluster restarts"))

    def _lose(self, run_id: str, run: _Run, worker: str) -> None:
        rank = run.addresses.index(worker)
        reason = f"worker {worker}, rank {rank} of run {run_id}, left in round {run.server.round}"
        run.fail(WorkerLostError(reason))
        self.scheduler.log_event(TOPIC, {"run_id": run_id, "lost": reason})

    def _end(self, run_id: str, reason: DaskpsError) -> None:
        """Fence the ranks off: their connections close and their plugins tell them to leave."""
        run = self.runs.pop(run_id, None)
        if run is None:
            return
        run.close(reason)
        if not self.runs:
            go_on(self.scheduler)
        self.leaving[run_id] = {a for a in run.addresses if a in self.scheduler.workers}
        for address in list(self.leaving[run_id]):
            self.scheduler.worker_send(address, {"op": FORGET, "run_id": run_id})
        patience = run.rules.close if self.leaving[run_id] else 0
        asyncio.get_running_loop().call_later(patience, self._release, run_id)

    def _release(self, run_id: str) -> None:
        if self.leaving.pop(run_id, None) is not None:
            self.leases.release(run_id)
            self._wake()

    # Leases

    async def _lease(
        self,
        request: Request,
        workers: list[str] | None,
        resources: dict[str, float],
        patience: float,
    ) -> list[str]:
        """One address for each rank, as soon as it is this request's turn."""
        short_since = monotonic()
        while request.run_id in self.leases.waiting():
            usable = self._usable(workers, resources)
            eligible = {a: self.processes[a] for a in usable if a in self.processes}
            _refuse_other_versions(eligible)
            silent = [address for address in usable if address not in eligible]
            if not silent or request.n_workers:
                addresses = self.leases.grant(request, eligible)
                if addresses is not None:
                    return addresses
            n_processes = len(set(eligible.values()))
            if not silent and n_processes >= request.wanted(n_processes):
                short_since = monotonic()  # there are enough, other runs hold them
            elif monotonic() - short_since > patience:
                raise _too_small(request, n_processes, silent, patience)
            await self._change(at_most=0.5)
        raise RunAbortedError(f"the request for run {request.run_id} was taken back")

    def _usable(self, workers: list[str] | None, resources: dict[str, float]) -> list[str]:
        """Addresses of running workers that satisfy the annotations around the fit."""
        allowed = None if workers is None else self._resolve(workers)
        return [
            address
            for address, state in self.scheduler.workers.items()
            if state.status == Status.running
            and (allowed is None or address in allowed)
            and all(state.resources.get(key, 0) >= value for key, value in resources.items())
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


class _Run:
    """An open run: its parameter server and the thread that serves its rounds."""

    def __init__(self, run_id: str, client: str, addresses: list[str], rules: Rules) -> None:
        self.server = ParameterServer(run_id, len(addresses))
        self.client = client
        self.addresses = addresses
        self.rules = rules
        self.over = asyncio.Event()
        self.rounds: RoundServer | None = None
        if len(addresses) > 1:
            loop = asyncio.get_running_loop()
            self.rounds = RoundServer(
                self.server, rules.round, lambda: _call_soon(loop, self.over.set), rules.wire_dtype
            )

    def fail(self, error: DaskpsError) -> None:
        self.server.fail(error)
        if self.rounds is not None:
            self.rounds.fail(error)

    def close(self, reason: DaskpsError) -> None:
        self.server.fail(reason)
        if self.rounds is not None:
            self.rounds.close(reason)
        self.over.set()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    try:
        loop.call_soon_threadsafe(function)
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
