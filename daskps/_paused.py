"""Which paused workers keep tasks from running.

Dask pauses a worker whose memory is nearly full, and gives it nothing to do until it has room again: maybe
never.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from distributed import Scheduler
from distributed.core import Status
from distributed.scheduler import TaskState, WorkerState


class Paused(NamedTuple):
    """A worker that Dask has paused."""

    address: str
    used: int
    """Bytes of memory that its process has."""
    limit: int
    """Bytes of memory that it may have; 0 if there is no limit."""


def holding_up(scheduler: Scheduler, keys: Iterable[str]) -> list[Paused]:
    """The paused workers that these tasks wait for, or what they depend on."""
    tasks = _unfinished([scheduler.tasks[key] for key in keys if key in scheduler.tasks])
    workers = {state for task in tasks for state in _awaited(scheduler, task)}
    paused = [state for state in workers if state.status == Status.paused]
    return sorted(Paused(state.address, state.memory.process, state.memory_limit or 0) for state in paused)


def _unfinished(tasks: list[TaskState]) -> Iterator[TaskState]:
    """These and what they wait for."""
    seen = set(tasks)
    while tasks:
        task = tasks.pop()
        yield task
        new = (task.waiting_on or set()) - seen
        seen |= new
        tasks += new


def _awaited(scheduler: Scheduler, task: TaskState) -> list[WorkerState]:
    """The workers that could run a task next."""
    if task.processing_on is not None:
        return [task.processing_on]
    if task.state != "no-worker":
        return []
    allowed = task.worker_restrictions or scheduler.workers
    return [scheduler.workers[address] for address in allowed if address in scheduler.workers]
