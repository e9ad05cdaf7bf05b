"""The fit loop on the client: skorch's, with the steps of an epoch made elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
from skorch import NeuralNet

from daskps import _hooks, _loading, _random, _replica, _state
from daskps._answers import Result
from daskps._callbacks import (
    EpochReplay,
    EpochStart,
    Snapshot,
    forget_epoch,
    step_without_gradients,
)
from daskps._launch import Run
from daskps._partitions import Cut
from daskps._replica import Opening
from daskps._sources import Source
from daskps._spec import Order
from daskps.exceptions import ClusterTooSmallError, DaskpsError, RunAbortedError, WorkerLostError
from daskps.report import FitEvent, FitReport, RankEpoch

logger = logging.getLogger("daskps")

Outcome = TypeVar("Outcome")


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
    resume : bool
        Whether an epoch that loses a worker begins again on those that are left.
    """

    net: NeuralNet
    source: Source
    every: int | None
    seed: int
    resume: bool = True

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
        self._resume = job.resume
        self._run = run
        self._report = report
        self._shuffle = _loading.batching(job.net, True).shuffle
        self._cut: Cut | None = None
        self._held: Snapshot | None = None  # what all ranks hold, if they hold the same
        self._on_ranks = _hooks.rank_side(job.net)
        self._callbacks = _state.dump_callbacks(job.net, self._on_ranks) if self._on_ranks else b""
        self._predictions = _hooks.wants_predictions(job.net)
        self._settled = False  # whether the ranks and the client are at the end of the same epoch
        self._seated = False  # whether the ranks have replicas

    def place(self) -> None:
        """Bring the shards to the workers."""
        self._undisturbed(len(self.net.history), self._cut_and_place)

    def _cut_and_place(self) -> Cut:
        """How the rows are cut for the workers that there are, which hold them afterwards."""
        run = self._run
        if self._cut is None:
            self._cut = self._source.cut(self.net, run.world_size, self._every != 0, self._seed)
        if not run.shards:
            run.shards = self._source.place(run.patient_client, self._cut, run.addresses)
        return self._cut

    def _undisturbed(self, epoch: int, work: Callable[[], Outcome]) -> Outcome:
        """Do something that needs all ranks; again from its beginning whenever a worker is lost.

        Raises
        ------
        WorkerLostError
            If that is what the caller wants, or if it happens too often.
        """
        n_losses = 0
        while True:
            try:
                return work()
            except WorkerLostError as error:
                lost = WorkerLostError(
                    f"{error}, in epoch {epoch + 1}.", error.worker, error.run_id, epoch, error.round
                )
            n_losses += 1
            self._go_on_without(lost, n_losses)

    def _go_on_without(self, lost: WorkerLostError, n_losses: int) -> None:
        if not self._resume:
            raise lost
        if n_losses > self._run.watch.allowed_failures:
            lost.add_note(f"It was loss number {n_losses} of the same epoch, see allowed-failures of Dask.")
            raise lost
        try:
            change = self._run.renew(join=False)
        except RunAbortedError:  # nothing is left to go on with: what happened before that counts
            raise lost from None
        except ClusterTooSmallError as error:
            raise error from lost
        if change is None:
            raise lost
        self._regroup()
        k = self._run.world_size
        logger.warning("%s It begins again on %d worker(s).", lost, k)
        what = "was lost" if change.lost else "a rank's connection was cut"
        what += f": the epoch began again on {k} worker(s)"
        self._report.events += [FitEvent(lost.epoch or 0, worker, what) for worker in change.lost or [""]]

    def _take_in(self, epoch: int) -> None:
        """Go on with workers that joined, and without those that left, since the last epoch."""
        change = self._run.renew(join=True)
        if change is None:
            return
        if change.lost and not self._resume:
            worker, run_id = change.lost[0], self._run.run_id
            reason = f"Worker {worker} of run {run_id} left the cluster before epoch {epoch + 1}."
            raise WorkerLostError(reason, worker, run_id, epoch, 0)
        self._regroup()
        k = self._run.world_size
        what = [(worker, "was lost between two epochs") for worker in change.lost]
        what += [(worker, "joined") for worker in change.joined]
        self._report.events += [FitEvent(epoch, w, f"{news}: {k} worker(s) go on") for w, news in what]
        logger.info("epoch %d begins on %d worker(s)", epoch + 1, k)

    def _regroup(self) -> None:
        """The ranks are others now, and hold nothing."""
        self._cut = self._held = None
        self._seated = False
        self._report.world_size = self._run.world_size

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
            epoch = len(self.net.history)
            self._callbacks = self._undisturbed(epoch, lambda: self._end(epoch))

    def _end(self, epoch: int) -> bytes:
        self._cut_and_place()
        opening = None if self._seated else self._opening()
        return self._run.end_training(self._orders(epoch), opening)

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
        if self._report.ranks:  # not the first
            self._take_in(epoch)
        start = EpochStart(self.net)
        replay, results = self._undisturbed(epoch, lambda: self._on_ranks_from(start, epoch))
        self._seated = True
        replay.finish(results)
        step_without_gradients(self.net)
        # Not before the replay: a schedule that a callback advances there would count twice.
        self._load(results)
        replay.validate(results)
        if results[0].records is not None:
            self._callbacks = results[0].records.callbacks
        self._note(results)

    def _on_ranks_from(self, start: EpochStart, epoch: int) -> tuple[EpochReplay, list[Result]]:
        start.restore()
        cut = self._cut_and_place()
        opening = None if self._ranks_are_current() else self._opening()
        orders = self._orders(epoch)
        replay = EpochReplay(self.net, self._source, cut, orders[0])
        return replay, self._run.epoch(orders, opening, replay.advance)

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
