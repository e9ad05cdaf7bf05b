"""What a rank tells its client while it trains."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np
from distributed import Worker
from distributed.comm import get_address_host

from daskps._crowding import Place
from daskps._machine import cores_of_process
from daskps._spec import TOPIC, Order, Ticket


def tell(worker: Worker, ticket: Ticket, **news: Any) -> None:
    """Send news to the client that has opened the run."""
    worker.log_event(TOPIC, {**ticket.key._asdict(), **news})


def say_begun(worker: Worker, ticket: Ticket) -> None:
    """A worker's thread has taken up the rank."""
    place = Place(get_address_host(worker.address), cores_of_process(), worker.state.nthreads)
    tell(worker, ticket, begun=ticket.rank, place=tuple(place))


class Reporter:
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
        tell(
            self.worker,
            self.order.ticket,
            epoch=self.order.epoch,
            rank=self.order.ticket.rank,
            losses=self.losses[news].tolist(),
            weights=self.weights[news].tolist(),
        )
        self.sent = n_steps
        self.due = perf_counter() + self.interval
