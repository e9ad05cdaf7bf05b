"""What a worker keeps of its ranks between two epochs."""

from __future__ import annotations

import os
import threading
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

import daskps
from daskps import _environment, _replica
from daskps._connecting import open_channel
from daskps._replica import Opening
from daskps._spec import FORGET, HELLO, LEFT, WORKER_PLUGIN, GenerationKey, Order, Rules, Ticket
from daskps._sync import Alone, GradientSync, LocalSGD, Sync, capacity
from daskps._transport import Channel
from daskps.exceptions import RunAbortedError

# How long the scheduler's word that a run has ended may be on its way.
_NEWS_SECONDS = 10.0

# Processes that were forked after the import share this.
_FAMILY = uuid.uuid4().hex


def process_id() -> str:
    """One for each process: workers that share a process share torch's random generator."""
    return f"{_FAMILY}-{os.getpid()}"


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
        self.seats: dict[GenerationKey, Seat] = {}
        # What ended, maybe before a rank sat down.
        self.over: deque[GenerationKey] = deque(maxlen=1000)
        self.changed = threading.Condition()
        worker.stream_handlers[FORGET] = self.forget
        worker.batched_send({"op": HELLO, "process": process_id(), "version": daskps.__version__})

    def teardown(self, worker: Worker) -> None:
        for run_id, generation in list(self.seats):
            self.forget(run_id, generation)

    def forget(self, run_id: str, generation: int) -> None:
        """A generation of a run is over: stop its rank and drop its replica."""
        key = GenerationKey(run_id, generation)
        with self.changed:
            self.over.append(key)
            self.changed.notify_all()
            seat = self.seats.pop(key, None)
            active = seat is not None and seat.active
            if seat is not None:
                seat.left.set()  # the step loop looks at it once a step
        if not active:
            self._leave(key, seat)

    def is_over(self, ticket: Ticket) -> bool:
        """Whether a rank's generation has ended, or does in a moment."""
        with self.changed:
            return self.changed.wait_for(lambda: ticket.key in self.over, _NEWS_SECONDS)

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
            seat = self.seats.get(order.ticket.key)
            if seat is None or (seat.ticket, seat.epoch) != (order.ticket, order.epoch):
                return None
            seat.active = True
            return seat

    def _sit_down(self, order: Order, opening: Opening) -> Seat:
        """A new replica in the state that the client sent, on the connection that the run has."""
        key = order.ticket.key
        replica: Any = _replica.build(opening)
        old = self.seats.get(key)
        channel = self._arrive(order.ticket, replica, opening.rules) if old is None else old.channel
        replica.sync_ = make_sync(replica, channel, order.ticket, opening)
        seat = Seat(order.ticket, replica, replica.sync_, channel, order.epoch, opening.rules, active=True)
        with self.changed:
            if key not in self.over:
                self.seats[key] = seat
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
            self._leave(seat.ticket.key, seat)

    def _leave(self, key: GenerationKey, seat: Seat | None) -> None:
        if seat is not None:
            seat.close()
        news = {"op": LEFT, **key._asdict()}
        # On the event loop, whichever thread this is.
        self.worker.loop.add_callback(self.worker.batched_send, news)


def make_sync(net: Any, channel: Channel, ticket: Ticket, opening: Opening) -> Sync:
    """The exchange that belongs to ``sync_every``."""
    if ticket.world_size == 1:
        return Alone(net)
    if opening.every == 0:
        return GradientSync(net, channel, ticket.rank, opening.rules.bucket_bytes)
    return LocalSGD(net, channel, ticket.rank, opening.every)
