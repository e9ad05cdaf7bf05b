"""Which run may use which worker: all or nothing, first come first served.

A state machine like the parameter server: who is eligible is told by the caller at every question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A run's wish for workers.

    ``n_workers`` None stands for all that are eligible, ``most`` is the number of ranks that the data
    can feed.
    """

    run_id: str
    n_workers: int | None
    most: int

    def wanted(self, n_eligible: int) -> int:
        """How many ranks to start among so many workers."""
        return min(self.n_workers or max(n_eligible, 1), self.most)


class Leases:
    """A queue of requests and the workers that each run holds.

    A lease takes a process, not a worker: torch's random generator is one per process.
    """

    def __init__(self) -> None:
        self._queue: list[Request] = []
        self._held: dict[str, list[str]] = {}

    def ask(self, request: Request, first: bool = False) -> None:
        """Queue up; ``first`` is for a run that was served before and has lost all that it had."""
        self._queue.insert(0 if first else len(self._queue), request)

    def grant(self, request: Request, eligible: dict[str, str]) -> list[str] | None:
        """Lease workers to ``request`` if it is its turn.

        Parameters
        ----------
        request : Request
        eligible : dict of str to str
            The process of every worker that this request could use, by its address.

        Returns
        -------
        list of str, or None
            One address for each rank, or None as long as the request has to wait.
        """
        processes = _one_worker_each(eligible)
        wanted = request.wanted(len(processes))
        taken = self._taken()
        free = [process for process in processes if process not in taken]
        if len(free) < wanted or self._is_behind(request, set(processes)):
            return None
        self._queue.remove(request)
        self._held[request.run_id] = free[:wanted]
        return [processes[process] for process in free[:wanted]]

    def keep(self, run_id: str, processes: Sequence[str]) -> None:
        """Give back what a run holds, but for these."""
        self._held[run_id] = list(processes)

    def grow(self, request: Request, eligible: dict[str, str]) -> list[str]:
        """Lease more workers to a run that holds some: what is free, and what nobody waits for.

        Returns
        -------
        list of str
            The addresses that are new.
        """
        processes = _one_worker_each(eligible)
        held = self._held[request.run_id]
        wanted = request.wanted(len(processes)) - len(held)
        if wanted <= 0 or self._is_behind(request, set(processes)):
            return []
        taken = self._taken()
        new = [process for process in processes if process not in taken][:wanted]
        held += new
        return [processes[process] for process in new]

    def release(self, run_id: str) -> None:
        """Give back what a run holds, or take it out of the queue."""
        self._held.pop(run_id, None)
        self._queue = [request for request in self._queue if request.run_id != run_id]

    def held(self) -> dict[str, Sequence[str]]:
        """The processes that every run holds."""
        return dict(self._held)

    def waiting(self) -> list[str]:
        """The runs in the queue."""
        return [request.run_id for request in self._queue]

    def _taken(self) -> set[str]:
        return {process for held in self._held.values() for process in held}

    def _is_behind(self, request: Request, processes: set[str]) -> bool:
        """Whether an earlier request that these workers could satisfy is still waiting."""
        for earlier in self._queue:
            if earlier is request:
                return False
            if earlier.wanted(len(processes)) <= len(processes):
                return True
        return False


def _one_worker_each(eligible: dict[str, str]) -> dict[str, str]:
    """The first address of every process."""
    first: dict[str, str] = {}
    for address, process in eligible.items():
        first.setdefault(process, address)
    return first
