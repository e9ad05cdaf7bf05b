"""The results of an experiment as a picture: speedups over the model's curve, and S(K)."""

from __future__ import annotations

from typing import Any

import numpy as np

from daskps._comparison import Row, curve, fitted, rows
from daskps._drawing import pyplot
from daskps._experiment import Mode, Results, mode_name
from daskps.speedup import SpeedupModel

_COLOURS = ("#4c78a8", "#e4792b", "#3a923a", "#c03d3e", "#8a60b0")
_MARKERS = ("o", "s", "^", "D", "v")


def draw(results: Results) -> Any:
    """A figure with two axes: speedups of the measured fits, and their S.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    measured = [row for row in rows(results) if row.trial.sync_every is not None]
    looks = _Looks(measured)
    _legend(left, looks)
    for row in measured:
        _point(left, row, looks, results)
    for (mode, threads), model in fitted(results).items():
        _curves(left, right, results, (mode, threads, model), looks)
    _label_speedups(left, measured)
    _points_of_sync(right, results, looks)
    _label_sync(right, measured)
    figure.suptitle(_title(results), fontsize="medium")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


class _Looks:
    """One colour for each mode, one marker for each number of threads."""

    def __init__(self, measured: list[Row]) -> None:
        self.modes = list(dict.fromkeys(row.trial.sync_every for row in measured))
        self.threads = sorted({row.trial.threads for row in measured})

    def colour(self, mode: Mode | None) -> str:
        return _COLOURS[self.modes.index(mode) % len(_COLOURS)]

    def marker(self, threads: int) -> str:
        return _MARKERS[self.threads.index(threads) % len(_MARKERS)]

    def place(self, mode: Mode | None, at: float, most: float) -> float:
        """Beside one another where modes share a place."""
        middle = (len(self.modes) - 1) / 2
        return at + 0.015 * most * (self.modes.index(mode) - middle)


def _legend(ax: Any, looks: _Looks) -> None:
    for mode in looks.modes:
        ax.plot([], [], color=looks.colour(mode), marker=_MARKERS[0], label=mode_name(mode))
    for threads in looks.threads if len(looks.threads) > 1 else []:
        label = f"{threads} thread(s) a worker"
        ax.plot([], [], color="grey", marker=looks.marker(threads), linestyle="", label=label)


def _point(ax: Any, row: Row, looks: _Looks, results: Results) -> None:
    """The median, with the smallest and the largest; hollow where the model has not seen it."""
    trial = row.trial
    colour = looks.colour(trial.sync_every)
    seen = not results.fit_to or trial.workers in results.fit_to
    ax.errorbar(
        looks.place(trial.sync_every, trial.workers * trial.threads, _most_cores(results)),
        row.speedup,
        yerr=[[row.speedup - min(row.speedups)], [max(row.speedups) - row.speedup]],
        fmt=looks.marker(trial.threads),
        color=colour,
        markerfacecolor=colour if seen else "white",
        capsize=3,
    )


def _curves(
    left: Any, right: Any, results: Results, fit: tuple[Mode, int, SpeedupModel], looks: _Looks
) -> None:
    mode, threads, model = fit
    colour = looks.colour(mode)
    workers = [o.trial.workers for o in results.turns[0] if _is_of(o.trial, mode, threads)]
    base = [turn[0] for turn in results.turns]
    K = np.arange(1, max(workers) + 1)
    left.plot(K * threads, [curve(base, model, int(k)) for k in K], color=colour)
    # A line through one point is not seen.
    marker = "_" if len(K) == 2 else None
    S = [1000 * model.sync_seconds(int(k)) for k in K[1:]]
    right.plot(K[1:], S, color=colour, marker=marker, markersize=30)


def _points_of_sync(ax: Any, results: Results, looks: _Looks) -> None:
    most = max(outcome.trial.workers for outcome in results.turns[0])
    for turn in results.turns:
        for outcome in turn:
            trial = outcome.trial
            if outcome.report is None or trial.workers < 2:
                continue
            seen = not results.fit_to or trial.workers in results.fit_to
            colour = looks.colour(trial.sync_every)
            ax.plot(
                looks.place(trial.sync_every, trial.workers, most),
                1000 * outcome.report["S"],
                looks.marker(trial.threads),
                color=colour,
                markerfacecolor=colour if seen else "white",
            )


def _most_cores(results: Results) -> int:
    return max(outcome.trial.workers * outcome.trial.threads for outcome in results.turns[0])


def _is_of(trial: Any, mode: Mode, threads: int) -> bool:
    return (trial.sync_every, trial.threads) == (mode, threads)


def _label_speedups(ax: Any, measured: list[Row]) -> None:
    cores = sorted({row.trial.workers * row.trial.threads for row in measured})
    ax.plot([1, max(cores)], [1, max(cores)], color="grey", linestyle="--", label="linear")
    _scale(ax, cores)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("cores (workers x threads)")
    ax.set_ylabel("speedup over plain skorch on one core")
    ax.set_title("points: measured; curves: model; hollow: not seen by it", fontsize="small")


def _label_sync(ax: Any, measured: list[Row]) -> None:
    workers = sorted({row.trial.workers for row in measured if row.trial.workers > 1})
    if not workers:
        ax.set_axis_off()
        return
    _scale(ax, workers)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("workers, K")
    ax.set_ylabel("S for a batch (ms)")
    ax.set_title("waiting and moving data; lines: S(K) of the model", fontsize="small")


def _scale(ax: Any, places: list[int]) -> None:
    ax.set_xticks(places, [str(place) for place in places])
    if len(places) == 1:
        ax.set_xlim(places[0] - 1, places[0] + 1)


def _title(results: Results) -> str:
    base = results.base
    what = f"{base.data}, {results.turns[0][0].rows} rows, batch_size={base.batch_size}"
    if base.emulate is None:
        return what
    return f"EMULATED: steps wait, nothing is computed; {what}"
