"""How a run gets its workers: it waits until there are enough, and until it is its turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from time import monotonic, time

from distributed import Scheduler
from distributed.core import Status

import daskps
from daskps._generation import Generation, Terms
from daskps._leases import Leases, Request
from daskps._spec import TOPIC
from daskps.exceptions import ClusterTooSmallError, DaskpsError, InstallationError, RunAbortedError


class Lender:
    """Lends the workers of a scheduler to runs.

    Parameters
    ----------
    scheduler : Scheduler
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.leases = Leases()
        self.asking: dict[str, str] = {}  # the client of every request in the queue
        self.processes: dict[str, str] = {}
        self._changed = asyncio.Event()

    # What is heard of workers

    def hello(self, worker: str, process: str, version: str) -> None:
        """A worker has loaded daskps, in this process."""
        if worker in self.scheduler.workers:
            self.processes[worker] = process if version == daskps.__version__ else f"!{version}"
            self.wake()

    def forget(self, worker: str) -> None:
        """A worker has left the cluster."""
        self.processes.pop(worker, None)

    # What runs ask for

    def knows(self, run_id: str) -> bool:
        """Whether a run holds or wants workers."""
        return run_id in self.asking or run_id in self.leases.held()

    async def lend(self, terms: Terms, request: Request, first: bool = False) -> list[str]:
        """One address for each rank, as soon as it is this request's turn.

        ``first`` is for a run that was served before and has lost all that it had. Nothing stays in the
        queue.
        """
        self.leases.ask(request, first)
        self.asking[request.run_id] = terms.client
        try:
            return await self._granted(request, terms)
        except BaseException:
            self.leases.release(request.run_id)
            raise
        finally:
            self.asking.pop(request.run_id, None)

    def grow(self, terms: Terms) -> list[str]:
        """Lease more workers to a run that holds some; returns the new ones."""
        return self.leases.grow(terms.request, self._eligible(terms))

    def keep(self, run: Generation, joining: list[str]) -> list[str]:
        """Leave to a run whom it can go on with, and take back the others."""
        lost = run.lost_workers()
        members = [a for a in (*run.addresses, *joining) if a not in lost and self._stays(a)]
        self.leases.keep(run.run_id, [self.processes[address] for address in members])
        return members

    def release(self, run_id: str) -> None:
        """Take back what a run holds, or what it asks for."""
        self.leases.release(run_id)

    def forget_client(self, client: str) -> None:
        """Take the requests of a client that is gone out of the queue."""
        for run_id, asking in self.asking.items():
            if asking == client:
                self.leases.release(run_id)

    def lent(self) -> set[str]:
        """The processes that runs hold."""
        return {process for processes in self.leases.held().values() for process in processes}

    # Waiting

    def wake(self) -> None:
        """Something has changed: let all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, at_most: float) -> None:
        """Wait for that, or for so many seconds."""
        # No hook tells when a paused worker runs again, hence a look every now and then.
        try:
            await asyncio.wait_for(self._changed.wait(), at_most)
        except TimeoutError:
            return

    async def _granted(self, request: Request, terms: Terms) -> list[str]:
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
                if silent:
                    raise _not_loaded(silent, patience)
                raise _too_small(request, n_processes, patience, self._unusable(terms))
            await self.change(at_most=0.5)
        raise RunAbortedError(f"the request for run {request.run_id} was taken back")

    def _ask_for_more(self, request: Request, too_few: bool) -> None:
        """Tell the client how many placeholder tasks make an adaptive cluster grow enough.

        Again and again: the client's subscription may come later than its request. Dask divides the
        tasks that wait by the threads of a worker, and counts no worker that is idle.
        """
        n_threads = max((worker.nthreads for worker in self.scheduler.workers.values()), default=1)
        n_tasks = request.wanted(0) * n_threads if too_few else 0
        self.scheduler.log_event(TOPIC, {"run_id": request.run_id, "wanted": n_tasks})

    # Who can be lent

    def _eligible(self, terms: Terms) -> dict[str, str]:
        """The process of every usable worker that has loaded daskps."""
        return {a: self.processes[a] for a in self._usable(terms) if a in self.processes}

    def _usable(self, terms: Terms) -> list[str]:
        """Addresses of running workers that satisfy the annotations around the fit, and beat."""
        silent = self._silent(terms)
        return [address for address in self._allowed(terms) if address not in silent]

    def _silent(self, terms: Terms) -> list[str]:
        """Those that would be lost at once. Dask keeps one whose nanny is silent too for a long time."""
        patience = terms.silence(len(self.scheduler.workers))
        seen = {address: self.scheduler.workers[address].last_seen for address in self._allowed(terms)}
        return [address for address, last_seen in seen.items() if time() - last_seen > patience]

    def _allowed(self, terms: Terms) -> list[str]:
        allowed = None if terms.workers is None else self._resolve(terms.workers)
        return [
            address
            for address, state in self.scheduler.workers.items()
            if state.status == Status.running
            and (allowed is None or address in allowed)
            and all(state.resources.get(key, 0) >= value for key, value in terms.resources.items())
        ]

    def _unusable(self, terms: Terms) -> str:
        """Why workers that are there cannot be lent."""
        states = self.scheduler.workers.values()
        paused = [state.address for state in states if state.status == Status.paused]
        silent = self._silent(terms)
        n_others = sum(state.status == Status.running for state in states) - len(self._allowed(terms))
        why = f" Dask has paused {paused}, whose memory is nearly full." if paused else ""
        why += f" {silent} sent no heartbeat for daskps.timeouts.silence: restart them." if silent else ""
        if n_others:
            why += (
                f" Not among them: {n_others} that the annotations around the fit exclude"
                f" (workers={terms.workers}, resources={terms.resources})."
            )
        return why

    def _resolve(self, workers: Iterable[str]) -> set[str]:
        """Addresses of workers given by address, host name or alias, as ``Client.submit`` takes them."""
        known = [self.scheduler.coerce_address(w) if w in self.scheduler.aliases else w for w in workers]
        return set(self.scheduler.workers_list(known))

    def _stays(self, address: str) -> bool:
        state = self.scheduler.workers.get(address)
        return state is not None and state.status in (Status.running, Status.paused)


def _refuse_other_versions(eligible: dict[str, str]) -> None:
    for address, process in eligible.items():
        if process.startswith("!"):
            raise InstallationError(
                f"The worker {address} has daskps {process[1:]} and the scheduler has"
                f" {daskps.__version__}: install one version everywhere and restart the worker."
            )


def _not_loaded(silent: list[str], patience: float) -> DaskpsError:
    return InstallationError(
        f"The workers {silent} did not load daskps within {patience:g} s: install daskps"
        f" {daskps.__version__} in their environment and restart them."
    )


def _too_small(request: Request, n_processes: int, patience: float, unusable: str) -> DaskpsError:
    return ClusterTooSmallError(
        f"The fit asked for {request.wanted(n_processes)} process(es) (n_workers={request.n_workers}),"
        f" and {n_processes} usable came within daskps.timeouts.workers ({patience:g} s).{unusable}"
    )
