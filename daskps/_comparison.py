"""What follows from the results of an experiment: speedups, and what models predict."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from daskps._experiment import Mode, Results
from daskps._trial import Outcome, Trial
from daskps.report import FitReport
from daskps.speedup import SpeedupModel


@dataclass(frozen=True)
class Row:
    """The medians of one trial, and what a model says of it.

    Attributes
    ----------
    trial : Trial
    speedups : list of float
        Of each turn, over plain skorch in the same turn.
    predicted : float or None
    report : FitReport or None
        Of the turn with the median speed.
    accuracy, memory : dict
        Medians.
    startup_seconds : float
    """

    trial: Trial
    speedups: list[float]
    predicted: float | None
    report: FitReport | None
    accuracy: dict[str, float]
    memory: dict[str, float]
    startup_seconds: float

    @property
    def speedup(self) -> float:
        """The median."""
        return statistics.median(self.speedups)

    @property
    def efficiency(self) -> float:
        """Speedup for each core."""
        return self.speedup / (self.trial.workers * self.trial.threads)


def rows(results: Results) -> list[Row]:
    """A row for each trial, the baseline first."""
    models = fitted(results)
    by_trial = [list(outcomes) for outcomes in zip(*results.turns, strict=True)]
    base = by_trial[0]
    return [_row(base, outcomes, models) for outcomes in by_trial]


def _row(base: list[Outcome], outcomes: list[Outcome], models: dict[tuple[Mode, int], SpeedupModel]) -> Row:
    trial = outcomes[0].trial
    middle = sorted(outcomes, key=lambda outcome: outcome.epoch_seconds)[len(outcomes) // 2]
    return Row(
        trial,
        [b.epoch_seconds / o.epoch_seconds for b, o in zip(base, outcomes, strict=True)],
        _predicted(base, trial, models),
        None if middle.report is None else FitReport.from_dict(middle.report),
        _medians([outcome.accuracy for outcome in outcomes]),
        _medians([outcome.memory for outcome in outcomes]),
        statistics.median(outcome.startup_seconds for outcome in outcomes),
    )


def _predicted(
    base: list[Outcome], trial: Trial, models: dict[tuple[Mode, int], SpeedupModel]
) -> float | None:
    if trial.sync_every is None or (trial.sync_every, trial.threads) not in models:
        return None
    return curve(base, models[trial.sync_every, trial.threads], trial.workers)


def curve(base: list[Outcome], model: SpeedupModel, n_workers: int) -> float:
    """The predicted speedup over plain skorch, as the measured one is: not over the model's K = 1."""
    batches = base[0].rows / model.batch_size
    seconds = statistics.median(outcome.epoch_seconds for outcome in base)
    return seconds / (batches * model.seconds_per_batch(n_workers))


def fitted(results: Results) -> dict[tuple[Mode, int], SpeedupModel]:
    """A model for each mode and number of threads of which more than one number of workers ran."""
    reports: dict[tuple[Mode, int], list[FitReport]] = {}
    for turn in results.turns:
        for outcome in turn:
            mode = outcome.trial.sync_every
            if mode is not None and outcome.report is not None:
                report = FitReport.from_dict(outcome.report)
                reports.setdefault((mode, outcome.trial.threads), []).append(report)
    return {
        (mode, threads): _model(mode, _seen(measured, results.fit_to), results.benchmarks)
        for (mode, threads), measured in reports.items()
        if len({report.world_size for report in measured}) > 1 and _seen(measured, results.fit_to)
    }


def _seen(reports: list[FitReport], fit_to: tuple[int, ...]) -> list[FitReport]:
    """The fits that a model may see."""
    return [report for report in reports if not fit_to or report.world_size in fit_to]


def _model(mode: Mode, reports: list[FitReport], benchmarks: list[Outcome]) -> SpeedupModel:
    mine = [outcome for outcome in benchmarks if outcome.trial.sync_every == mode]
    together = [_report(outcome) for outcome in mine if outcome.trial.workers > 1]
    alone = [outcome for outcome in mine if outcome.trial.workers == 1]
    half = [_report(outcome) for outcome in alone if outcome.trial.stand_in is None]
    model = SpeedupModel.from_report(*reports, *half)
    if not together:
        return model
    S = [SpeedupModel.from_report(report).s0 for report in together]
    model = model.with_sync([report.world_size for report in together], S)
    stand_in = [_report(outcome) for outcome in alone if outcome.trial.stand_in is not None]
    return model.with_contention(_contention(stand_in, together)) if stand_in else model


def _report(outcome: Outcome) -> FitReport:
    return FitReport.from_dict(outcome.report or {})


def _contention(alone: list[FitReport], together: list[FitReport]) -> float:
    """How many times as long a step of the same rows takes beside others, turn by turn."""
    return statistics.median(
        _step_seconds(beside) / _step_seconds(one) for one, beside in zip(alone, together, strict=True)
    )


def _step_seconds(report: FitReport) -> float:
    return sum(e.compute_seconds for e in report.ranks) / sum(e.steps for e in report.ranks)


def _medians(values: list[dict]) -> dict[str, float]:
    return {key: statistics.median(value[key] for value in values) for key in values[0]}
