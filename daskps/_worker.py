"""One rank: its replica, its shard and the loop over the steps of an epoch."""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import numpy as np
from distributed import Worker, get_worker
from distributed.comm import get_address_host
from distributed.diagnostics.plugin import WorkerPlugin

import daskps
from daskps import _environment, _random, _replica, _state
from daskps._blocks import readable
from daskps._crowding import Place
from daskps._housekeeping import held_back
from daskps._loading import train_batches, validation_batches
from daskps._machine import cores_of_process
from daskps._partitions import Shard, epoch_order, pieces
from daskps._replica import Opening
from daskps._spec import FORGET, HELLO, LEFT, TOPIC, WORKER_PLUGIN, Order, Rules, Ticket
from daskps._sync import Alone, GradientSync, LocalSGD, Sync, capacity
from daskps._transport import Channel, Traffic, open_channel
from daskps.exceptions import (
    DaskpsError,
    DivergenceError,
    RunAbortedError,
    StaleMessageError,
    StoppedError,
    WorkerLostError,
)

Answer = TypeVar("Answer")

# Under this key a validation step holds what callbacks on its rank recorded for its batch.
RECORDED = "daskps_recorded"

# Processes that were forked after the import share this.
_FAMILY = uuid.uuid4().hex


def process_id() -> str:
    """One for each process: workers that share a process share torch's random generator."""
    return f"{_FAMILY}-{os.getpid()}"


class Records(NamedTuple):
    """What callbacks on a rank recorded in its history, and what became of them."""

    batches: list[dict]
    epoch: dict
    callbacks: bytes


@dataclass
class Result:
    """What a rank brings back from an epoch."""

    losses: np.ndarray
    """(n_steps,) the loss of every step; in batch mode that of all ranks."""
    weights: np.ndarray
    """(n_steps,) by what this rank's loss was divided."""
    rows: int
    compute_seconds: float
    setup_seconds: float
    traffic: Traffic
    transport: str
    """Which road the rank's values took."""
    uniform: bool
    """Whether all ranks hold the same state now."""
    validation: bytes
    state: bytes
    """The replica's state, from rank 0; empty from the others, whose is the same."""
    records: Records | None
    """What callbacks on rank 0 left behind."""
    predictions: bytes
    norms: np.ndarray
    """Of all values, to see whether ranks that should hold the same do."""
    diverged: str
    """What was not finite; empty if everything was."""


class StateNeeded:
    """A rank's answer if it has no replica of exactly this run, generation and epoch."""


class Left(NamedTuple):
    """A rank's answer if it left because its run ended elsewhere: what is raised Dask logs as a failure."""

    why: str


# What a rank meets where its run has ended elsewhere.
CONSEQUENCES = (RunAbortedError, StaleMessageError, WorkerLostError)

# How long the scheduler's word that it has may be on its way.
_NEWS_SECONDS = 2.0


@dataclass
class Seat:
    """A rank's place in a run, kept between epochs."""

    ticket: Ticket
    replica: Any
    sync: Sync
    channel: Channel
    epoch: int
    rules: Rules
    active: bool = False
    left: threading.Event = field(default_factory=threading.Event)

    def close(self) -> None:
        """Hang up and give the process back as it was."""
        self.channel.close()
        _environment.restore_malloc()


class DaskpsWorkerPlugin(WorkerPlugin):
    """Keeps the replicas of a worker between epochs. Only a cache: the client holds the truth."""

    name = WORKER_PLUGIN
    idempotent = True

    def setup(self, worker: Worker) -> None:
        self.worker = worker
        # By run and generation.
        self.seats: dict[tuple[str, int], Seat] = {}
        # What ended, maybe before a rank sat down.
        self.over: deque[tuple[str, int]] = deque(maxlen=1000)
        self.changed = threading.Condition()
        worker.stream_handlers[FORGET] = self.forget
        worker.batched_send({"op": HELLO, "process": process_id(), "version": daskps.__version__})

    def teardown(self, worker: Worker) -> None:
        for run_id, generation in list(self.seats):
            self.forget(run_id, generation)

    def forget(self, run_id: str, generation: int) -> None:
        """A generation of a run is over: stop its rank and drop its replica."""
        place = run_id, generation
        with self.changed:
            self.over.append(place)
            self.changed.notify_all()
            seat = self.seats.pop(place, None)
            active = seat is not None and seat.active
            if seat is not None:
                seat.left.set()  # the step loop looks at it once a step
        if not active:
            self._leave(place, seat)

    def is_over(self, ticket: Ticket) -> bool:
        """Whether a rank's generation has ended, or does in a moment."""
        with self.changed:
            return self.changed.wait_for(lambda: _place(ticket) in self.over, _NEWS_SECONDS)

    @contextmanager
    def seated(self, order: Order, opening: Opening | None) -> Iterator[Seat | None]:
        """The rank's seat for the length of an epoch; None if there is none and it cannot be made."""
        seat = self._find(order) if opening is None else self._sit_down(order, opening)
        if seat is None:
            yield None
            return
        try:
            yield seat
        finally:
            self._pause(seat)

    def _find(self, order: Order) -> Seat | None:
        with self.changed:
            seat = self.seats.get(_place(order.ticket))
            if seat is None or (seat.ticket, seat.epoch) != (order.ticket, order.epoch):
                return None
            seat.active = True
            return seat

    def _sit_down(self, order: Order, opening: Opening) -> Seat:
        """A new replica in the state that the client sent, on the connection that the run has."""
        place = _place(order.ticket)
        replica: Any = _replica.build(opening)
        old = self.seats.get(place)
        channel = self._arrive(order.ticket, replica, opening.rules) if old is None else old.channel
        replica.sync_ = make_sync(replica, channel, order.ticket, opening)
        seat = Seat(order.ticket, replica, replica.sync_, channel, order.epoch, opening.rules, active=True)
        with self.changed:
            if place not in self.over:
                self.seats[place] = seat
                return seat
        seat.close()
        raise RunAbortedError("the run ended before this rank began")

    def _arrive(self, ticket: Ticket, net: Any, rules: Rules) -> Channel:
        channel = open_channel(self.worker, ticket, capacity(net), rules)
        _environment.tune_malloc()
        return channel

    def _pause(self, seat: Seat) -> None:
        with self.changed:
            seat.active = False
            over = seat.left.is_set()
        if over:
            self._leave(_place(seat.ticket), seat)

    def _leave(self, place: tuple[str, int], seat: Seat | None) -> None:
        if seat is not None:
            seat.close()
        news = {"op": LEFT, "run_id": place[0], "generation": place[1]}
        # On the event loop, whichever thread this is.
        self.worker.loop.add_callback(self.worker.batched_send, news)


def _place(ticket: Ticket) -> tuple[str, int]:
    return ticket.run_id, ticket.generation


def make_sync(net: Any, channel: Channel, ticket: Ticket, opening: Opening) -> Sync:
    """The exchange that belongs to ``sync_every``."""
    if ticket.world_size == 1:
        return Alone(net)
    if opening.every == 0:
        return GradientSync(net, channel, ticket.rank, opening.rules.bucket_bytes)
    return LocalSGD(net, channel, ticket.rank, opening.every)


def _or_left(task: Callable[[Order, Shard, Any], Answer]) -> Callable[[Order, Shard, Any], Answer | Left]:
    """Let a rank whose run ended elsewhere answer, and not raise what is nobody's fault."""

    @wraps(task)
    def answer(order: Order, shard: Shard, opening: Opening | None) -> Answer | Left:
        try:
            return task(order, shard, opening)
        except CONSEQUENCES as error:
            plugin: Any = get_worker().plugins[WORKER_PLUGIN]
            if not plugin.is_over(order.ticket):  # then nobody but this rank knows
                raise
            return Left(str(error))

    return answer


@_or_left
def end_training(order: Order, shard: Shard, opening: Opening | None) -> bytes | StateNeeded:
    """The last task of a rank whose replica has callbacks: they learn that the training ends."""
    worker = get_worker()
    plugin: Any = worker.plugins[WORKER_PLUGIN]
    _say_begun(worker, order)
    with plugin.seated(order, opening) as seat:
        if seat is None:
            return StateNeeded()
        try:
            with readable(shard, worker.data) as held:
                for _, callback in seat.replica.callbacks_:
                    callback.on_train_end(seat.replica, X=held.X, y=held.y)
        except KeyboardInterrupt as error:
            raise StoppedError("a callback on a rank stopped at the end of the training") from error
        return _state.dump_callbacks(seat.replica, seat.replica.callbacks_)


@_or_left
def run_epoch(order: Order, shard: Shard, opening: Opening | None) -> Result | StateNeeded:
    """The task of one rank: train one epoch and validate."""
    worker = get_worker()
    plugin: Any = worker.plugins[WORKER_PLUGIN]
    begun = perf_counter()
    _say_begun(worker, order)
    threads, quiet = _environment.torch_threads(worker.state.nthreads), held_back(worker)
    with threads, quiet, plugin.seated(order, opening) as seat, readable(shard, worker.data) as held:
        if seat is None:
            return StateNeeded()
        _state.load_settings(seat.replica, order.settings)
        setup_seconds = perf_counter() - begun
        with _environment.without_preempting():
            return _Epoch(seat, order, held, worker).run(setup_seconds)


def _say_begun(worker: Worker, order: Order) -> None:
    """A worker's thread has taken up the rank."""
    ticket = order.ticket
    place = Place(get_address_host(worker.address), cores_of_process(), worker.state.nthreads)
    news = {
        "run_id": ticket.run_id,
        "generation": ticket.generation,
        "begun": ticket.rank,
        "place": tuple(place),
    }
    worker.log_event(TOPIC, news)


class _Epoch:
    """The steps of one epoch on one rank."""

    def __init__(self, seat: Seat, order: Order, shard: Shard, worker: Worker) -> None:
        self.seat = seat
        self.worker = worker
        self.net = seat.replica
        self.order = order
        self.shard = shard
        self.stream = _random.RankStream(_random.stream(order.seed, order.epoch, order.ticket.rank))
        self.losses = np.full(len(shard.sizes), np.nan)
        self.weights = np.zeros(len(shard.sizes))
        self.predictions: list[Any] = [None] * len(shard.sizes)
        self.step, self.trained = -1, False
        self.diverged = ""
        interval = seat.rules.report_interval
        self.reporter = _Reporter(worker, order, self.losses, self.weights, interval)

    def run(self, setup_seconds: float) -> Result:
        self.net.stream_ = self.stream
        with closing(self.stream):
            return self._run(setup_seconds)

    def _run(self, setup_seconds: float) -> Result:
        before = replace(self.seat.channel.traffic)
        begun = perf_counter()
        try:
            with self.stream.lent():
                self._begin()
            for step, size in enumerate(self.shard.sizes):
                self._step(step, size)
            self.trained = True
            uniform = self.seat.sync.epoch_ended()
            traffic = self.seat.channel.traffic.since(before)
            seconds = perf_counter() - begun - traffic.wait_seconds - traffic.sync_seconds
            with self.stream.lent():
                validation = _state.to_bytes(list(self._validate()))
                self._hook("on_epoch_end")
        except KeyboardInterrupt as error:  # of a callback; Dask would take it for its own and end
            raise StoppedError("a callback on a rank stopped the training") from error
        except SystemExit as error:  # would end the worker, and the next one that repeats the epoch
            exited = DaskpsError(f"The net's code left by SystemExit({error.code!r}).")
            self._blame(exited)
            raise exited from error
        except Exception as error:
            self._blame(error)
            raise
        norms = _state.norms(self.net)
        if not np.isfinite(norms).all():
            self._diverge("Parameters")
        self.seat.epoch += 1
        first = self.order.ticket.rank == 0
        return Result(
            losses=self.losses,
            weights=self.weights,
            rows=int(self.shard.sizes.sum()),
            compute_seconds=seconds,
            setup_seconds=setup_seconds,
            traffic=traffic,
            transport=self.seat.channel.kind,
            uniform=uniform,
            validation=validation,
            state=_state.dump(self.net) if first else b"",
            records=self._records() if first else None,
            predictions=_state.to_bytes(self.predictions) if self.order.predictions else b"",
            norms=norms,
            diverged=self.diverged,
        )

    def _begin(self) -> None:
        order, net = self.order, self.net
        net.common_ = _random.Stream(_random.stream(order.seed, order.epoch)) if net.draws_ else None
        if not net.callbacks_:
            net.initialize_history()
        elif order.first:
            self._hook("on_train_begin", X=self.shard.X, y=self.shard.y)
        net.history.new_epoch()
        net.history.record("epoch", len(net.history))
        self._hook("on_epoch_begin")
        net.weight_, net.loss_ = 0.0, None
        net.weighted_ = self.shard.weights is not None
        self.seat.sync.epoch_began()
        n_rows = int(self.shard.sizes.sum())
        layout = self.shard.layout
        rows = epoch_order(order.seed, order.epoch, order.ticket.rank, n_rows, order.shuffle, layout)
        self.batches = iter(train_batches(net, self.shard, pieces(rows, self.shard.sizes)))

    def _step(self, step: int, size: int) -> None:
        self.step = step
        self._refuse_to_stay()
        if size or self.seat.sync.lockstep:
            with self.stream.lent():
                self._train_or_idle(step, size)
        if self.net.diverged_:
            self._diverge("The loss or a gradient")
        self.seat.sync.stepped(step)
        self.reporter.stepped(step + 1)

    def _diverge(self, what: str) -> None:
        """Say, once an epoch, that something is not finite."""
        on_divergence = self.seat.rules.on_divergence
        self.net.diverged_ = False
        if self.diverged or on_divergence == "ignore":
            return
        self.diverged = (
            f"{what} on rank {self.order.ticket.rank} became NaN or infinite in epoch"
            f" {self.order.epoch + 1}, step {self.step + 1} of {len(self.shard.sizes)}."
        )
        if on_divergence == "raise":
            raise DivergenceError(self.diverged)
        ticket = self.order.ticket
        news = {"run_id": ticket.run_id, "generation": ticket.generation, "diverged": self.diverged}
        self.worker.log_event(TOPIC, news)

    def _refuse_to_stay(self) -> None:
        """Dask stops no thread: whoever is told to leave has to look."""
        if self.seat.left.is_set():
            raise RunAbortedError("the run ended elsewhere")

    def _train_or_idle(self, step: int, size: int) -> None:
        batch = next(self.batches) if size else None
        self.net.history.new_batch()
        self._hook("on_batch_begin", batch=batch, training=True)
        outcome = self._train(batch) if size else {"loss": self._idle(), "y_pred": None}
        self.losses[step], self.weights[step] = _item(outcome["loss"]), self.net.step_weight_
        self.net.history.record_batch("train_loss", self.losses[step].item())
        self.net.history.record_batch("train_batch_size", int(size))
        self._hook("on_batch_end", batch=batch, training=True, **outcome)
        if self.order.predictions:
            self.predictions[step] = _detached(outcome["y_pred"])

    def _idle(self) -> float:
        """A step in which this rank has no rows."""
        if not self.net.steps_its_own_way_:
            return self.net.idle_step()
        if not len(self.shard.y):
            raise DaskpsError(
                f"{_replica.owner(self.net).__name__} has its own train_step, which every rank needs rows"
                " for, and there are not enough: use fewer workers."
            )
        rows = np.arange(min(2, len(self.shard.y)))
        return self.net.shadow_step(next(iter(train_batches(self.net, self.shard, [rows]))))

    def _train(self, batch: Any) -> dict:
        rounds = self.net.rounds_
        outcome = self.net.train_step(batch)
        if self.net.rounds_ == rounds:
            raise DaskpsError(
                f"{_replica.owner(self.net).__name__}.train_step made a step without notifying"
                " 'on_grad_computed', where ranks exchange gradients: notify it after backward."
            )
        return outcome

    def _validate(self) -> Iterator[dict]:
        for batch, size in zip(
            validation_batches(self.net, self.shard), self.shard.valid_sizes, strict=True
        ):
            self._refuse_to_stay()
            self.net.history.new_batch()
            self._hook("on_batch_begin", batch=batch, training=False)
            outcome = self.net.validation_step(batch)
            self.net.history.record_batch("valid_loss", _item(outcome["loss"]))
            self.net.history.record_batch("valid_batch_size", int(size))
            self._hook("on_batch_end", batch=batch, training=False, **outcome)
            recorded = _without(self.net.history[-1, "batches", -1], ("valid_loss", "valid_batch_size"))
            yield {**outcome, RECORDED: recorded} if recorded else outcome

    def _hook(self, name: str, **kwargs: Any) -> None:
        """Call a hook of the callbacks that run on ranks."""
        self.net.call_hooks(name, **kwargs)

    def _records(self) -> Records | None:
        if not self.net.callbacks_:
            return None
        row = self.net.history[-1]
        batches = [_without(batch, ("train_loss", "train_batch_size")) for batch in row["batches"]]
        callbacks = _state.dump_callbacks(self.net, self.net.callbacks_)
        return Records(batches, _without(row, ("batches", "epoch")), callbacks)

    def _blame(self, error: Exception) -> None:
        ticket = self.order.ticket
        where = f"step {self.step + 1} of {len(self.shard.sizes)}"
        if self.step < 0:
            where = "before the first step"
        if self.trained:
            where = "after the last step"
        error.add_note(
            f"Raised on rank {ticket.rank} of {ticket.world_size}, epoch {self.order.epoch + 1}, {where}."
        )


def _item(loss: Any) -> float:
    return float(loss.item() if hasattr(loss, "item") else loss)


def _detached(predictions: Any) -> Any:
    if isinstance(predictions, tuple):
        return tuple(part.detach() for part in predictions)
    return None if predictions is None else predictions.detach()


def _without(row: dict, keys: tuple[str, ...]) -> dict:
    return {key: value for key, value in row.items() if key not in keys}


class _Reporter:
    """Tells the client now and then which steps are done."""

    def __init__(
        self,
        worker: Worker,
        order: Order,
        losses: np.ndarray,
        weights: np.ndarray,
        interval: float,
    ) -> None:
        self.worker = worker
        self.order = order
        self.losses = losses
        self.weights = weights
        self.interval = interval
        self.sent = 0
        self.due = perf_counter() + self.interval

    def stepped(self, n_steps: int) -> None:
        if perf_counter() < self.due:
            return
        news = slice(self.sent, n_steps)
        self.worker.log_event(
            TOPIC,
            {
                "run_id": self.order.ticket.run_id,
                "generation": self.order.ticket.generation,
                "epoch": self.order.epoch,
                "rank": self.order.ticket.rank,
                "losses": self.losses[news].tolist(),
                "weights": self.weights[news].tolist(),
            },
        )
        self.sent = n_steps
        self.due = perf_counter() + self.interval
