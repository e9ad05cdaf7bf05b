"""The fit loop on the client: skorch's, with the steps of an epoch made elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from skorch import NeuralNet

from daskps import _hooks, _loading, _random, _replica, _state
from daskps._callbacks import EpochReplay, Snapshot, forget_epoch, step_without_gradients
from daskps._launch import Run
from daskps._partitions import Cut
from daskps._replica import Opening
from daskps._sources import Source
from daskps._spec import Order
from daskps._worker import Result
from daskps.exceptions import DaskpsError
from daskps.report import FitReport, RankEpoch


@dataclass(frozen=True)
class Job:
    """What is to be trained.

    Attributes
    ----------
    net : NeuralNet
        Initialised. At the end of every epoch it holds what it would hold in one process.
    source : Source
    every : int or None
        Steps between two averages; 0 for gradients at every step, None for one average an epoch.
    seed : int
        Of everything random on the ranks.
    """

    net: NeuralNet
    source: Source
    every: int | None
    seed: int

    @property
    def batch_size(self) -> int:
        """Rows that one optimizer step sees."""
        size = _loading.batching(self.net, True).batch_size
        return len(self.source.dataset_train) if size == -1 else size


class Training:
    """Trains the client's net on the ranks of a run.

    Parameters
    ----------
    job : Job
    run : Run
    report : FitReport
        Filled in as epochs end.
    """

    def __init__(self, job: Job, run: Run, report: FitReport) -> None:
        self.net = job.net
        self._source = job.source
        self._every = job.every
        self._seed = job.seed
        self._run = run
        self._report = report
        self._shuffle = _loading.batching(job.net, True).shuffle
        self._cut: Cut = job.source.cut(job.net, run.world_size, job.every != 0, job.seed)
        self._held: Snapshot | None = None  # what all ranks hold, if they hold the same
        self._on_ranks = _hooks.rank_side(job.net)
        self._callbacks = _state.dump_callbacks(job.net, self._on_ranks) if self._on_ranks else b""
        self._predictions = _hooks.wants_predictions(job.net)
        self._settled = False  # whether the ranks and the client are at the end of the same epoch

    def place(self) -> None:
        """Bring the shards to the workers."""
        self._run.shards = self._source.place(self._run.client, self._cut, self._run.addresses)

    def run(self) -> None:
        """Train for the net's ``max_epochs``, with all hooks of the net and its callbacks."""
        datasets = {
            "dataset_train": self._source.dataset_train,
            "dataset_valid": self._source.dataset_valid,
        }
        done = len(self.net.history)
        for epoch in range(done, done + self.net.max_epochs):
            begun = perf_counter()
            with self._seeded_weights(epoch):
                self.net.notify("on_epoch_begin", **datasets)
            self._settled = False
            self._train(epoch)
            self._settled = True
            try:
                with _random.LOCK:  # a score draws a number too, and another thread may have seeded
                    self.net.notify("on_epoch_end", **datasets)
            finally:  # EarlyStopping leaves by KeyboardInterrupt
                self._note_seconds(perf_counter() - begun)

    def end(self) -> None:
        """Let the callbacks on the ranks end their training, and take them back.

        The ranks of an epoch that was given up are still busy, and are left alone.
        """
        if self._on_ranks and self._settled:
            orders = self._orders(len(self.net.history))
            self._callbacks = self._run.end_training(orders)

    def take_callbacks_back(self) -> None:
        """Put rank 0's callbacks into the client's net."""
        if self._on_ranks:
            _hooks.replace(self.net, _state.load_callbacks(self.net, self._callbacks))

    @contextmanager
    def _seeded_weights(self, epoch: int) -> Iterator[None]:
        """Seed what an Initializer draws."""
        if not _hooks.sets_parameters(self.net):
            yield
            return
        with _random.LOCK, _random.seeded(_random.stream(self._seed, epoch)):
            yield

    def _train(self, epoch: int) -> None:
        orders = self._orders(epoch)
        opening = None
        if not self._ranks_are_current():
            opening = self._opening()
        replay = EpochReplay(self.net, self._source, self._cut, orders[0])
        results = self._run.epoch(orders, opening, replay.advance)
        replay.finish(results)
        step_without_gradients(self.net)
        # Not before the replay: a schedule that a callback advances there would count twice.
        self._load(results)
        replay.validate(results)
        if results[0].records is not None:
            self._callbacks = results[0].records.callbacks
        self._note(results)

    def _opening(self) -> Opening:
        return _replica.open_with(self.net, self._every, self._callbacks, self._run.rules)

    def _orders(self, epoch: int) -> list[Order]:
        settings = _state.dump_settings(self.net)
        return [
            Order(
                self._run.ticket(rank),
                epoch,
                not self._report.ranks,
                self._seed,
                self._shuffle,
                settings,
                self._predictions,
            )
            for rank in range(self._run.world_size)
        ]

    def _ranks_are_current(self) -> bool:
        """Whether every rank holds what the client's net holds; a callback may have changed that."""
        return self._held is not None and self._held.holds(self.net)

    def _load(self, results: Sequence[Result]) -> None:
        _state.load(self.net, results[0].state)
        uniform = all(result.uniform for result in results)
        if uniform:
            _refuse_drift(results)
        self._held = Snapshot(self.net) if uniform else None

    def _note_seconds(self, seconds: float) -> None:
        if not self._report.epoch_seconds:  # its first part was start-up, and counts as that
            seconds -= self._report.startup_seconds["replicas"]
        self._report.epoch_seconds.append(seconds)

    def _note(self, results: Sequence[Result]) -> None:
        slowest = max(result.setup_seconds for result in results)
        if not self._report.ranks:
            self._report.startup_seconds["replicas"] = slowest
        epoch = len(self._report.epoch_seconds)
        self._report.ranks += [_entry(epoch, rank, r, slowest) for rank, r in enumerate(results)]


def fit(training: Training, X: Any, y: Any) -> None:
    """What skorch's ``partial_fit`` does around its loop, after ``on_train_begin``.

    A KeyboardInterrupt ends the training and keeps the last whole epoch.
    """
    net = training.net
    with _hooks.client_side_only(net):
        with suppress(KeyboardInterrupt):
            training.run()
        forget_epoch(net)
        training.end()
        net.notify("on_train_end", X=X, y=y)
    training.take_callbacks_back()


def _refuse_drift(results: Sequence[Result]) -> None:
    """Ranks that saw the same gradients hold the same values, unless user code makes them differ."""
    first = results[0].norms
    if not all(np.allclose(r.norms, first, rtol=1e-4, atol=1e-8, equal_nan=True) for r in results):
        raise DaskpsError(
            "The ranks' parameters have drifted apart. Something on them changes parameters by more than"
            " the gradient that they share: a train_step that draws random numbers or makes a step before"
            " it notifies 'on_grad_computed', or a callback that looks at the rank's own rows."
        )


def _entry(epoch: int, rank: int, result: Result, slowest_setup: float) -> RankEpoch:
    traffic = result.traffic
    # In its first round a rank also waits for those that are not set up yet: that is start-up.
    early = slowest_setup - result.setup_seconds
    return RankEpoch(
        epoch=epoch,
        rank=rank,
        rows=result.rows,
        steps=len(result.losses),
        rounds=traffic.rounds,
        compute_seconds=result.compute_seconds,
        wait_seconds=max(0.0, traffic.wait_seconds - early),
        sync_seconds=traffic.sync_seconds,
        bytes=traffic.bytes,
        transport=result.transport,
    )
