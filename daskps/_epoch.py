"""One rank's epoch: the loop over its steps, and what it finds on the way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
from distributed import Worker

from daskps import _random, _replica, _state
from daskps._answers import RECORDED, Records, Result
from daskps._loading import train_batches, validation_batches
from daskps._news import Reporter, tell
from daskps._partitions import Shard, epoch_order, pieces
from daskps._spec import Order
from daskps._worker_plugin import Seat
from daskps.exceptions import DaskpsError, DivergenceError, RunAbortedError, StoppedError


class Epoch:
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
        self.reporter = Reporter(worker, order, self.losses, self.weights, interval)

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
        tell(self.worker, self.order.ticket, diverged=self.diverged)

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
