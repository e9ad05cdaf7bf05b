"""The results of an experiment as a table, for a terminal or a page."""

from __future__ import annotations

from daskps._comparison import Row, fitted, rows
from daskps._experiment import Cell, Mode, Results, mode_name, name

# So many times longer than it was told to, a step did not only wait.
_CROWDED = 1.5

_HEADS = [
    "mode",
    "workers x threads",
    "speedup",
    "spread",
    "efficiency",
    "predicted",
    "off",
    "C ms",
    "S ms",
    "test acc.",
    "train acc.",
    "start-up s",
    "client MB",
    "scheduler MB",
    "worker MB",
]


def text(results: Results) -> str:
    """The table in columns, with what has to be known to read it."""
    cells = [_HEADS, *(_cells(row, results.fit_to) for row in rows(results))]
    widths = [max(len(line[column]) for line in cells) for column in range(len(_HEADS))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([*_warning(results), *lines, "", *notes(results)])


def markdown(results: Results, command: str) -> str:
    """The table for a page of the documentation, after the command that measures it."""
    lines = [_HEADS, ["---"] * len(_HEADS), *(_cells(row, results.fit_to) for row in rows(results))]
    table = ["| " + " | ".join(line) + " |" for line in lines]
    below = [f"- {note}" for note in notes(results)]
    return "\n".join([f"    {command}", "", *_warning(results), "", *table, "", *below, ""])


def notes(results: Results) -> list[str]:
    """What the figures mean, what they were measured on, and the models."""
    base = results.base
    machine = ", ".join(f"{key} {value}" for key, value in results.machine.items())
    what = f"{base.data}, {results.turns[0][0].rows} training rows, batch_size={base.batch_size}"
    turns = f"{base.epochs} epoch(s), {len(results.turns)} turn(s)"
    models = fitted(results).items()
    return [
        f"{what}, {turns}. Medians; as spread the smallest and the largest.",
        f"Machine: {machine}.",
        "Speedup: over plain skorch on one core in the same turn, by epochs. Efficiency: for each core.",
        "C, S: computing, and waiting and moving data, for a batch.",
        f"Predicted: {_fit(results)}. Off: predicted over measured.",
        *(f"Model, {_model_name(*key)}: {_one_line(str(model))}" for key, model in models),
        *_crowded(results),
    ]


def _crowded(results: Results) -> list[str]:
    """Where waiting took far longer than it was told to: the cores were busy with other ranks."""
    emulate = results.base.emulate
    if emulate is None:
        return []
    lines = []
    for row in rows(results):
        trial, report = row.trial, row.report
        if report is None:
            continue
        shared = trial.workers if trial.sync_every == "batch" else 1
        asked = emulate[0] + emulate[1] * trial.batch_size / shared
        took = report.C / shared
        if took > _CROWDED * asked:
            lines.append(
                f"Too few cores for {name(trial)}: steps took {1000 * took:.3g} ms in place of"
                f" {1000 * asked:.3g} ms. Wait longer with --emulate."
            )
    return lines


def _warning(results: Results) -> list[str]:
    if results.base.emulate is None:
        return []
    c0, c1 = results.base.emulate
    waited = f"{1000 * c0:g} ms + {1000 * c1:.4g} ms for each row"
    return [
        f"EMULATED: nothing was computed. Each step waited {waited}, and exchanged as many parameters",
        "as the CNN has: only waiting and moving data are real.",
        "",
    ]


def _model_name(mode: Mode, threads: int) -> str:
    return f"{mode_name(mode)}, {threads} thread(s)"


def _fit(results: Results) -> str:
    if results.benchmarks:
        half = "from 1 worker, in batch mode with half the batch too"
        if any(outcome.trial.stand_in is not None for outcome in results.benchmarks):
            return f"{half}, and a stand-in's fits with 1 and 2 workers, which give S and the contention"
        return f"{half}, and rounds of 2 workers that wait"
    if results.fit_to:
        return (
            f"by the model fitted to {', '.join(map(str, results.fit_to))} workers; * marks other numbers"
        )
    return "by the model fitted to all fits of the mode, this one too"


def _one_line(model: str) -> str:
    return "; ".join(line.rstrip(".") for line in model.splitlines()) + "."


def _cells(row: Row, fit_to: tuple[int, ...]) -> list[str]:
    trial, report = row.trial, row.report
    return [
        mode_name(trial.sync_every),
        str(Cell(trial.workers, trial.threads)),
        f"{row.speedup:.2f}",
        f"{min(row.speedups):.2f} to {max(row.speedups):.2f}",
        f"{row.efficiency:.2f}",
        _prediction(row, fit_to),
        "-" if row.predicted is None else f"{row.predicted / row.speedup - 1:+.0%}",
        "-" if report is None else f"{1000 * report.C:.2f}",
        "-" if report is None else f"{1000 * report.S:.2f}",
        _number(row.accuracy.get("test"), 1, ".4f"),
        _number(row.accuracy.get("train"), 1, ".4f"),
        "-" if report is None else f"{row.startup_seconds:.1f}",
        *(_number(row.memory.get(who), 1e6, ".0f") for who in ("client", "scheduler", "worker")),
    ]


def _prediction(row: Row, fit_to: tuple[int, ...]) -> str:
    if row.predicted is None:
        return "-"
    return f"{row.predicted:.2f}" + ("*" if fit_to and row.trial.workers not in fit_to else "")


def _number(value: float | None, unit: float, form: str) -> str:
    return "-" if value is None else format(value / unit, form)
