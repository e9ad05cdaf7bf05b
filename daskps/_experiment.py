"""The speedup, measured: a grid of workers and threads, in turns, beside plain skorch on one core."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from daskps import _machine
from daskps._trial import Outcome, Trial

Mode = str | int

# Enough for a hundred steps of a usual batch.
_BENCHMARK_ROWS = 3200
# Of the stand-in, for each row, before it is known how many take as long as the net that is asked about.
_FIRST_IMAGES = 3.0


class Cell(NamedTuple):
    """So many workers of so many threads."""

    workers: int
    threads: int

    def __str__(self) -> str:
        return f"{self.workers}x{self.threads}"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes
    ----------
    base : Trial
        Plain skorch on one core.
    grid : tuple of Cell
    modes : tuple of {'batch', 'epoch'} or int
    repeats : int
    fit_to : tuple of int
        The numbers of workers that the models are fitted to; empty for all that are measured.
    """

    base: Trial
    grid: tuple[Cell, ...]
    modes: tuple[Mode, ...]
    repeats: int
    fit_to: tuple[int, ...] = ()

    def trials(self) -> list[Trial]:
        """All fits of one turn, the baseline first."""
        cells = [
            replace(self.base, sync_every=mode, workers=cell.workers, threads=cell.threads)
            for cell in self.grid
            for mode in self.modes
        ]
        return [self.base, *cells]


@dataclass(frozen=True)
class Results:
    """What was measured, and where.

    Attributes
    ----------
    command : str
        What to type to measure it again.
    machine : dict of str to str
    fit_to : tuple of int
    turns : list of list of Outcome
        In each turn every trial once.
    benchmarks : list of Outcome
        For models that see one worker only. Fits of a stand-in, by one worker and by two: how much slower
        a worker computes beside another, and what rounds take between ranks that compute. In batch mode
        also fits of one worker with half the batch: what does not shrink with the rows.
    """

    command: str
    machine: dict[str, str]
    fit_to: tuple[int, ...]
    turns: list[list[Outcome]]
    benchmarks: list[Outcome]

    @property
    def base(self) -> Trial:
        """The trial of plain skorch."""
        return self.turns[0][0].trial

    def save(self, file: str) -> None:
        """Write everything as JSON."""
        Path(file).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: str | Path) -> Results:
        """Read what `save` wrote."""
        plain = json.loads(Path(file).read_text(encoding="utf-8"))
        return cls(
            plain["command"],
            plain["machine"],
            tuple(plain["fit_to"]),
            [[Outcome.from_dict(outcome) for outcome in turn] for turn in plain["turns"]],
            [Outcome.from_dict(outcome) for outcome in plain["benchmarks"]],
        )


def measure(
    plan: Plan, command: str, run: Callable[[Trial], Outcome], note: Callable[[str], None]
) -> Results:
    """Let every trial of a plan run once in each turn: a machine is disturbed for minutes at a time.

    Parameters
    ----------
    plan : Plan
    command : str
    run : callable
        Runs a trial.
    note : callable
        Is told of each outcome in a line.

    Raises
    ------
    ValueError
        If models are to see one worker only, and there is none in the grid.
    """
    if plan.fit_to == (1,) and Cell(1, 1) not in plan.grid:
        raise ValueError("a model that is fitted to one worker needs 1x1 in the grid.")

    def told(trial: Trial, turn: int) -> Outcome:
        outcome = run(trial)
        seconds = f"{outcome.epoch_seconds:>9.2f} s an epoch"
        note(f"turn {turn + 1} of {plan.repeats}: {name(trial):<28}{seconds}")
        return outcome

    turns: list[list[Outcome]] = []
    trials: list[Trial] = []
    benchmarks: list[Outcome] = []
    for turn in range(plan.repeats):
        turns.append([told(trial, turn) for trial in plan.trials()])
        if plan.fit_to == (1,):
            trials = trials or _benchmark_trials(plan, _like(plan, turns[0], run))
            benchmarks += [told(trial, turn) for trial in trials]
    return Results(command, _machine.describe(), plan.fit_to, turns, benchmarks)


def _like(plan: Plan, turn: Sequence[Outcome], run: Callable[[Trial], Outcome]) -> Trial:
    """A short fit of one worker whose steps take about as long as those of the net that is asked about."""
    short = replace(plan.base, rows=min(_BENCHMARK_ROWS, turn[0].rows))
    if short.emulate is not None:
        return short  # it waits: neighbours do not make it slower
    alone = [_compute_seconds(o) for o in turn if o.report and _is_alone(o.trial)]
    first = replace(short, sync_every=plan.modes[0], stand_in=_FIRST_IMAGES)
    return replace(first, stand_in=_FIRST_IMAGES * statistics.median(alone) / _compute_seconds(run(first)))


def _benchmark_trials(plan: Plan, like: Trial) -> list[Trial]:
    """For each mode one rank alone, with the rows of a step of two, and then two."""
    half = max(1, plan.base.batch_size // 2)
    trials = []
    for mode in plan.modes:
        two = replace(like, sync_every=mode, workers=2)
        alone = replace(two, workers=1, batch_size=half) if mode == "batch" else replace(two, workers=1)
        trials += [alone, two]
    if "batch" in plan.modes and plan.base.batch_size > 1:
        trials.append(replace(like, sync_every="batch", batch_size=half, stand_in=None))
    return trials


def _compute_seconds(outcome: Outcome) -> float:
    return float(outcome.report["C"]) if outcome.report else 0.0


def _is_alone(trial: Trial) -> bool:
    return trial.workers == trial.threads == 1


def name(trial: Trial) -> str:
    """How a table calls a trial."""
    other = ", emulated" if trial.emulate is not None else ""
    other = ", a stand-in" if trial.stand_in is not None else other
    where = "" if trial.sync_every is None else f", {Cell(trial.workers, trial.threads)}"
    return f"{mode_name(trial.sync_every)}{where}{other}"


def mode_name(mode: Mode | None) -> str:
    """How a table calls a mode."""
    if mode is None:
        return "plain skorch"
    return mode if isinstance(mode, str) else f"H={mode}"
