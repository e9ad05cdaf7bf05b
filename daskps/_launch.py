"""One fit on the cluster: lease workers, open ranks, epoch after epoch, always close."""

from __future__ import annotations

import logging
import queue
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

import dask
from distributed import Client, Future

import daskps
from daskps import config
from daskps._events import events_of
from daskps._late import Late
from daskps._replica import Opening
from daskps._scheduler_plugin import DaskpsSchedulerPlugin
from daskps._spec import CLOSE, OPEN, Order, Rules, Ticket
from daskps._worker import (
    DaskpsWorkerPlugin,
    Result,
    StateNeeded,
    end_training,
    run_epoch,
)
from daskps.exceptions import (
    DaskpsError,
    InstallationError,
    RunAbortedError,
    StoppedError,
    WorkerLostError,
)

logger = logging.getLogger("daskps")

# Above the tasks of everybody else: a rank that waits for a thread makes all others wait.
PRIORITY = 100

# What the dashboard calls the tasks.
_NAMES: dict[Callable, str] = {run_epoch: "epoch", end_training: "end"}

# How often to look whether the client still has its scheduler, while nothing happens.
_LOOK_SECONDS = 2.0

Progress = Callable[[dict], None]


class Run:
    """An open run: a leased worker for each rank, and what they hold.

    Made by `open_run`.
    """

    def __init__(
        self,
        client: Client,
        run_id: str,
        addresses: list[str],
        events: queue.SimpleQueue,
        rules: Rules,
    ) -> None:
        self.rules = rules
        self.client = client
        self.run_id = run_id
        self.addresses = addresses
        self.shards: list[Future] = []
        self._events = events
        self._generation = 0

    @property
    def world_size(self) -> int:
        """How many ranks train."""
        return len(self.addresses)

    def ticket(self, rank: int) -> Ticket:
        """What identifies a rank in every message."""
        return Ticket(self.run_id, self._generation, rank, self.world_size)

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
            If a worker left.
        """
        sent = self._send(opening) if opening is not None else None
        try:
            return self._on_all_ranks(run_epoch, orders, (sent,), on_steps)
        finally:
            if sent is not None:  # an error's traceback would keep it on the workers
                sent.release()

    def end_training(self, orders: Sequence[Order]) -> bytes:
        """Tell the callbacks on all ranks that the training ends, and bring rank 0's back."""
        return self._on_all_ranks(end_training, orders, (), lambda _: None)[0]

    def _on_all_ranks(
        self, task: Callable, orders: Sequence[Order], arguments: tuple, on_steps: Progress
    ) -> list:
        futures = [self._submit(task, order, arguments) for order in orders]
        try:
            return self._collect(futures, on_steps)
        finally:
            # Dask would compute again what a lost worker held, and wait for ever for the address.
            self.client.cancel([future for future in futures if not future.done()])
            for future in futures:
                future.release()

    def _send(self, opening: Opening) -> Future:
        key = f"daskps-state-{uuid.uuid4().hex}"
        futures = self.client.scatter({key: opening}, workers=self.addresses, broadcast=True, hash=False)
        return futures[key]

    def _submit(self, task: Callable, order: Order, arguments: tuple) -> Future:
        rank = order.ticket.rank
        priority = dask.get_annotations().get("priority", PRIORITY)
        # A rank that is run again, or elsewhere, would wait for a round that is over.
        with dask.annotate(retries=0, allow_other_workers=False):
            future = self.client.submit(
                Late(task.__module__, task.__name__),
                order,
                self.shards[rank],
                *arguments,
                workers=[self.addresses[rank]],
                priority=priority,
                pure=False,
                key=f"daskps-{_NAMES[task]}-{self.run_id}-{order.epoch}-{rank}",
            )
        future.add_done_callback(lambda _: self._events.put({"done": rank}))
        return future

    def _collect(self, futures: list[Future], on_steps: Progress) -> list:
        waiting = set(range(len(futures)))
        while waiting:
            event = self._next_event()
            if "lost" in event:
                raise WorkerLostError(event["lost"])
            if "done" not in event:
                on_steps(event)
            elif futures[event["done"]].status == "finished":
                waiting.discard(event["done"])
            else:
                self._raise_cause(futures, event["done"])
        results = self.client.gather(futures)
        if any(isinstance(result, StateNeeded) for result in results):
            raise DaskpsError(f"a rank of run {self.run_id} lost its replica between two epochs")
        return results

    def _next_event(self) -> dict:
        while True:
            try:
                return self._events.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                if self.client.status != "running":
                    raise RunAbortedError(
                        f"the client lost its scheduler, it is {self.client.status!r} now"
                    ) from None

    def _raise_cause(self, futures: list[Future], first: int) -> None:
        """Raise what went wrong, rather than what followed from it on other ranks."""
        errors = {first: _error(futures[first])}
        deadline = monotonic() + config.seconds("timeouts.close")
        while all(isinstance(e, RunAbortedError) for e in errors.values()):
            try:
                event = self._events.get(timeout=max(0.0, deadline - monotonic()))
            except queue.Empty:
                break
            if "lost" in event:
                raise WorkerLostError(event["lost"])
            if "done" in event and futures[event["done"]].status != "finished":
                errors[event["done"]] = _error(futures[event["done"]])
            if len(errors) == len(futures):
                break
        causes = [e for e in errors.values() if not isinstance(e, RunAbortedError)]
        rank, error = next((r, e) for r, e in errors.items() if e is (causes or [errors[first]])[0])
        if isinstance(error, StoppedError):
            raise KeyboardInterrupt from error
        error.add_note(f"From worker {self.addresses[rank]}.")
        raise error


@contextmanager
def open_run(client: Client, n_workers: int | None, most: int) -> Iterator[Run]:
    """Lease workers and open a run for the length of the block.

    Parameters
    ----------
    client : Client
    n_workers : int or None
        How many ranks; None for one on every usable worker process.
    most : int
        How many ranks the data can feed.

    Raises
    ------
    ClusterTooSmallError
        If too few workers came within ``daskps.timeouts.workers``.
    InstallationError
        If daskps is missing, or of another version, on the scheduler or on a worker.
    """
    rules = config.rules()
    register(client)
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
    try:
        with events_of(client, run_id) as events:
            addresses = client.sync(getattr(client.scheduler, OPEN), **request)
            run = Run(client, run_id, list(addresses), events, rules)
            try:
                yield run
            finally:
                for shard in run.shards:
                    shard.release()
    finally:
        _close(client, run_id)


def register(client: Client) -> None:
    """Bring both plugins to the cluster, unless they are there."""
    for plugin, side in (
        (DaskpsSchedulerPlugin(), "scheduler"),
        (DaskpsWorkerPlugin(), "workers"),
    ):
        try:
            client.register_plugin(plugin)
        except Exception as error:
            if not _is_about_loading(error):
                raise
            raise InstallationError(
                f"The {side} cannot load daskps ({error}): install daskps {daskps.__version__} in"
                " that environment and restart it."
            ) from error


def _is_about_loading(error: Exception) -> bool:
    """Whether a plugin could not be unpickled; Dask sends what it cannot pickle as text."""
    kinds = (ImportError, AttributeError)
    return isinstance(error, kinds) or any(kind in str(error) for kind in ("ModuleNotFound", "ImportError"))


def _close(client: Client, run_id: str) -> None:
    try:
        client.sync(
            getattr(client.scheduler, CLOSE),
            run_id=run_id,
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
