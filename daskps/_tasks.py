"""The tasks of a rank: an epoch, and the end of the training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from time import perf_counter
from typing import Any, TypeVar

from distributed import get_worker

from daskps import _environment, _state
from daskps._answers import CONSEQUENCES, Left, Result, StateNeeded
from daskps._blocks import readable
from daskps._epoch import Epoch
from daskps._housekeeping import held_back
from daskps._news import say_begun
from daskps._partitions import Shard
from daskps._replica import Opening
from daskps._spec import WORKER_PLUGIN, Order
from daskps.exceptions import StoppedError

Answer = TypeVar("Answer")


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
    say_begun(worker, order.ticket)
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
    say_begun(worker, order.ticket)
    threads, quiet = _environment.torch_threads(worker.state.nthreads), held_back(worker)
    with threads, quiet, plugin.seated(order, opening) as seat, readable(shard, worker.data) as held:
        if seat is None:
            return StateNeeded()
        _state.load_settings(seat.replica, order.settings)
        setup_seconds = perf_counter() - begun
        with _environment.without_preempting():
            return Epoch(seat, order, held, worker).run(setup_seconds)
