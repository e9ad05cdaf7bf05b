"""One fit on the cluster: lease workers, open ranks, epoch after epoch, always close."""

from __future__ import annotations

import logging
import math
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple, cast

import dask
from dask.utils import format_bytes
from distributed import Client, Future, KilledWorker

import daskps
from daskps import config
from daskps._answers import CONSEQUENCES, Left, Result, StateNeeded
from daskps._crowding import Place, crowding
from daskps._direct import gather
from daskps._events import events_of
from daskps._late import Late
from daskps._paused import Paused
from daskps._plugins import register
from daskps._replica import Opening
from daskps._scatter import scatter
from daskps._spec import CLOSE, OPEN, PAUSED, RENEW, Order, Rules, Ticket
from daskps._tasks import end_training, run_epoch
from daskps._watch import Watch
from daskps.exceptions import (
    DaskpsError,
    RunAbortedError,
    StoppedError,
    WorkerBusyError,
)

logger = logging.getLogger("daskps")

# Above the tasks of everybody else: a rank that waits for a thread makes all others wait.
PRIORITY = 100

# What the dashboard calls the tasks.
_NAMES: dict[Callable, str] = {run_epoch: "epoch", end_training: "end"}

# What becomes of a rank because of what happened elsewhere: the scheduler's news says what.
_CONSEQUENCES = (*CONSEQUENCES, KilledWorker)

Progress = Callable[[dict], None]


class Change(NamedTuple):
    """What has changed about the workers of a run."""

    lost: list[str]
    """Addresses."""
    joined: list[str]


class Run:
    """An open run: a leased worker for each rank, and what they hold.

    Made by `open_run`. Its workers may change, and a new generation begins then.
    """

    def __init__(
        self, watch: Watch, client: Client, run_id: str, addresses: list[str], rules: Rules
    ) -> None:
        self.watch = watch
        self.rules = rules
        self.client = client
        self.run_id = run_id
        self.addresses = addresses
        self.shards: list[Future] = []
        self.let_go: list[str] = []
        """Keys that it wanted until lately; the scheduler may not have heard of that yet."""
        self._warned = False
        self._places: dict[int, Place] | None = {}

    @property
    def world_size(self) -> int:
        """How many ranks train."""
        return len(self.addresses)

    @property
    def patient_client(self) -> Client:
        """The client, but for its patience with workers that are gone."""
        return cast(Client, self.watch)

    def ticket(self, rank: int) -> Ticket:
        """What identifies a rank in every message."""
        return Ticket(self.run_id, self.watch.generation, rank, self.world_size)

    def renew(self, join: bool) -> Change | None:
        """Go on with the workers that are left and, with ``join``, with those that are new.

        Returns
        -------
        Change or None
            None if the workers are those that they were. Otherwise they hold nothing now.

        Raises
        ------
        RunAbortedError
            If the run has ended, or the client has lost its scheduler.
        ClusterTooSmallError
            If no worker is left, and none came within ``daskps.timeouts.workers``.
        """
        self.watch.refuse_a_lost_scheduler()
        known = self.watch.generation
        renew = getattr(self.client.scheduler, RENEW)
        members = self.watch.ask(renew, run_id=self.run_id, join=join)
        if members["generation"] == known:
            return None
        joined = [address for address in members["addresses"] if address not in self.addresses]
        self.watch.generation = members["generation"]
        self.addresses = list(members["addresses"])
        self.forget_shards()
        return Change(list(members["lost"]), joined)

    def paused(self, keys: Sequence[str]) -> list[Paused]:
        """The workers that keep these tasks from running because Dask has paused them."""
        ask = getattr(self.client.scheduler, PAUSED)
        try:
            found = self.client.sync(ask, keys=list(keys), callback_timeout=self.rules.connect)
        except TimeoutError:  # too busy to say; a scheduler that is gone shows elsewhere
            return []
        return [Paused(*worker) for worker in found]

    def forget_shards(self) -> None:
        """Let go of what the workers hold."""
        for shard in self.shards:
            shard.release()
        self.let_go += [str(shard.key) for shard in self.shards]
        self.shards = []

    def epoch(self, orders: Sequence[Order], opening: Opening | None, on_steps: Progress) -> list[Result]:
        """Train one epoch on all ranks.

        Parameters
        ----------
        orders : sequence of Order
            One for each rank.
        opening : Opening or None
            The state to start from; None if all ranks hold it.
        on_steps : callable
            Called with the reports of finished steps while the epoch runs.

        Returns
        -------
        list of Result
            In rank order.

        Raises
        ------
        Exception
            Whatever a rank raised, with a note that says where.
        WorkerLostError
            If a worker is lost.
        """
        results = self._on_all_ranks(run_epoch, orders, opening, on_steps)
        for result in results:
            self._warn(result.diverged)
        return results

    def _warn(self, diverged: str) -> None:
        """Tell the user, once, what a rank says: what comes after that follows from it."""
        if diverged and not self._warned:
            self._warned = True
            warnings.warn(
                f"{diverged} Lower the learning rate, clip gradients, or look at the data;"
                " daskps.on-divergence says what to do in such a case.",
                RuntimeWarning,
                stacklevel=2,
            )

    def take_place(self, rank: int, place: Place) -> None:
        """A rank computes here. With the last one, warn if they are in each other's way."""
        if self._places is None:
            return
        self._places[rank] = place
        if len(self._places) == self.world_size:
            crowded, self._places = crowding(self._places.values()), None
            if crowded:
                warnings.warn(crowded, UserWarning, stacklevel=2)

    def end_training(self, orders: Sequence[Order], opening: Opening | None) -> bytes:
        """Tell the callbacks on all ranks that the training ends, and bring rank 0's back."""
        return self._on_all_ranks(end_training, orders, opening, lambda _: None)[0]

    def _on_all_ranks(
        self, task: Callable, orders: Sequence[Order], opening: Opening | None, on_steps: Progress
    ) -> list:
        sent = self._send(opening) if opening is not None else None
        try:
            return self._run_tasks(task, orders, sent, on_steps)
        finally:
            if sent is not None:  # an error's traceback would keep it on the workers
                sent.release()

    def _run_tasks(
        self, task: Callable, orders: Sequence[Order], sent: Future | None, on_steps: Progress
    ) -> list:
        futures = [self._submit(task, order, sent) for order in orders]
        try:
            return self._collect(futures, on_steps)
        finally:
            # Dask would compute again what a lost worker held, and wait for ever for the address.
            if self.client.status == "running":  # closed, it would raise instead of what was raised
                self.client.cancel([future for future in futures if not future.done()])
            for future in futures:
                future.release()
            self.let_go = [str(future.key) for future in futures]

    def _send(self, opening: Opening) -> Future:
        """Bring the state to one worker, from which the others get it with their task.

        Not to all: Dask's scheduler then copies it under a lock, in a loop that has no end if one of them
        is gone, and every later fit would wait for the lock.
        """
        return scatter(self.patient_client, "state", [opening], self.addresses[:1])[0]

    def _submit(self, task: Callable, order: Order, sent: Future | None) -> Future:
        rank = order.ticket.rank
        priority = dask.get_annotations().get("priority", PRIORITY)
        # An epoch that is repeated must not be taken for the one that was given up.
        what = f"{self.run_id}-{order.ticket.generation}-{order.epoch}"
        # A rank that is run again, or elsewhere, would wait for a round that is over.
        with dask.annotate(retries=0, allow_other_workers=False):
            future = self.client.submit(
                Late(task.__module__, task.__name__),
                order,
                self.shards[rank],
                sent,
                workers=[self.addresses[rank]],
                priority=priority,
                pure=False,
                key=f"daskps-{_NAMES[task]}-{what}-{rank}",
            )
        future.add_done_callback(lambda done: self.watch.put({"done": done.key}))
        return future

    def _collect(self, futures: list[Future], on_steps: Progress) -> list:
        waiting = {future.key: rank for rank, future in enumerate(futures)}
        starting = _Starting(self, futures)
        while waiting:
            event = self.watch.next() or {}
            starting.check(event)
            if "losses" in event:
                on_steps(event)
            self._warn(event.get("diverged", ""))
            rank = waiting.pop(event.get("done", ""), None)
            if rank is not None and futures[rank].status != "finished":
                self._raise_cause(futures, rank)
        results = self.watch.sync(gather, self.client, futures, self.addresses)
        if any(isinstance(result, StateNeeded) for result in results):
            raise DaskpsError(f"a rank of run {self.run_id} lost its replica between two epochs")
        left = [result for result in results if isinstance(result, Left)]
        if left:
            self._wait_for_cause()
            raise RunAbortedError(left[0].why)
        return results

    def _wait_for_cause(self) -> None:
        """All ranks are out and none has raised: the news of what has ended the run raises."""
        deadline = monotonic() + config.seconds("timeouts.close")
        while monotonic() < deadline:
            self.watch.next(deadline - monotonic())

    def _raise_cause(self, futures: list[Future], first: int) -> None:
        """Raise what went wrong, rather than what followed from it on other ranks."""
        rank_of = {future.key: rank for rank, future in enumerate(futures)}
        rank, error = first, _error(futures[first])
        deadline = monotonic() + config.seconds("timeouts.close")
        while isinstance(error, _CONSEQUENCES) and monotonic() < deadline:
            event = self.watch.next(deadline - monotonic()) or {}  # raises if the scheduler knows why
            other = rank_of.get(event.get("done", ""))
            if other is not None and futures[other].status != "finished":
                found = _error(futures[other])
                if not isinstance(found, _CONSEQUENCES):
                    rank, error = other, found
        if isinstance(error, StoppedError):
            raise KeyboardInterrupt from error
        error.add_note(f"From worker {self.addresses[rank]}.")
        raise error


class _Starting:
    """Whether all ranks begin an epoch in time; only their own tasks can say so."""

    def __init__(self, run: Run, tasks: Sequence[Future]) -> None:
        self._run = run
        self._tasks = tasks
        self._patience = run.rules.start
        self._missing = set(range(run.world_size))
        self._since = self._looked = monotonic()
        self._coming = True

    def check(self, event: dict) -> None:
        """Take in an event, and raise WorkerBusyError if a rank is late."""
        if "begun" in event:
            self._missing.discard(event["begun"])
            self._run.take_place(event["begun"], Place(*event["place"]))
        if not self._missing:
            return
        if self._rows_are_coming():
            self._since = monotonic()
        if monotonic() - self._since > self._patience:
            raise WorkerBusyError("\n".join(self._reasons()))

    def _rows_are_coming(self) -> bool:
        """Rows are on their way, or being computed; on a paused worker they may wait for ever."""
        if all(shard.done() for shard in self._run.shards):
            return False
        # Asked seldom: what a task depends on may be a large graph.
        if monotonic() - self._looked >= self._patience / 4:
            self._looked, self._coming = monotonic(), not self._paused()
        return self._coming

    def _paused(self) -> list[Paused]:
        return self._run.paused([str(self._tasks[rank].key) for rank in sorted(self._missing)])

    def _reasons(self) -> list[str]:
        after = f"within daskps.timeouts.start ({self._patience:g} s)"
        paused = [_paused_sentence(worker, after) for worker in self._paused()]
        return paused or [self._busy(rank, after) for rank in sorted(self._missing)]

    def _busy(self, rank: int, after: str) -> str:
        run = self._run
        address = run.addresses[rank]
        processing = run.client.processing([address]).get(address, ())
        others = [str(key) for key in processing if run.run_id not in str(key)]
        return (
            f"Rank {rank} of {run.world_size} has not begun on worker {address} {after}."
            f" The worker's other tasks are {others}: wait for"
            " them, keep the fit off that worker with dask.annotate(workers=...), or raise the setting."
        )


def _paused_sentence(worker: Paused, after: str) -> str:
    limit = format_bytes(worker.limit) if worker.limit else "no limit"
    return (
        f"The epoch has not begun {after}, because Dask has paused the worker {worker.address}, which has"
        f" tasks that it waits for: its process has {format_bytes(worker.used)} of memory, and the limit is"
        f" {limit}. Release what it holds, give it more memory (memory_limit), use smaller chunks or more"
        " workers, or raise the setting if it can go on later."
    )


@contextmanager
def open_run(client: Client, n_workers: int | None, most: int, at_most: float = math.inf) -> Iterator[Run]:
    """Lease workers and open a run for the length of the block.

    Parameters
    ----------
    client : Client
    n_workers : int or None
        How many ranks; None for one on every usable worker process.
    most : int
        How many ranks the data can feed.
    at_most : float
        For how many seconds to wait for workers that others hold.

    Raises
    ------
    TimeoutError
        If there were none to be had for so long.
    ClusterTooSmallError
        If too few workers came within ``daskps.timeouts.workers``.
    InstallationError
        If daskps is missing, or of another version, on the scheduler or on a worker.
    """
    rules = config.rules()
    run_id = uuid.uuid4().hex
    annotations = dask.get_annotations()
    request = {
        "run_id": run_id,
        "client": client.id,
        "version": daskps.__version__,
        "n_workers": n_workers,
        "most": most,
        "rules": list(rules),
        "workers": _as_list(annotations.get("workers")),
        "resources": annotations.get("resources"),
    }
    let_go: list[str] = []
    try:
        with events_of(client, run_id) as events:
            register(client)  # a few messages that the subscription to the events is ahead of
            watch = Watch(client, events)
            addresses = watch.ask(getattr(client.scheduler, OPEN), at_most, **request)
            run = Run(watch, client, run_id, list(addresses), rules)
            try:
                yield run
            finally:
                run.forget_shards()
                let_go = run.let_go
    finally:
        _close(client, run_id, let_go)


def _close(client: Client, run_id: str, let_go: list[str]) -> None:
    try:
        client.sync(
            getattr(client.scheduler, CLOSE),
            run_id=run_id,
            keys=let_go,
            callback_timeout=config.seconds("timeouts.close"),
        )
    except Exception:
        # The scheduler ends the runs of clients that are gone, and a cluster that is gone has none.
        logger.debug("could not close run %s", run_id, exc_info=True)


def _error(future: Future) -> BaseException:
    if future.status == "error":
        return future.exception()
    return RunAbortedError(f"the task {future.key} was {future.status}")


def _as_list(workers: Any) -> list[str] | None:
    if workers is None or isinstance(workers, (list, tuple, set)):
        return None if workers is None else list(workers)
    return [workers]
