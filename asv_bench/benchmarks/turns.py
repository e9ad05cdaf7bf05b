"""Contenders that take turns, and the table of what they reach.

Every figure is the median of several turns, since other programs disturb a machine for minutes at a time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from .contenders import Contender, Trained, in_fresh_interpreter

Outcomes = dict[str, list[Trained]]


def take_turns(lineup: Mapping[str, Contender], batch_size: int, n_rows: int, repeats: int) -> Outcomes:
    """Let every contender run once in every turn; the first turn is scored too."""
    outcomes: Outcomes = {name: [] for name in lineup}
    for turn in range(repeats):
        for name, contender in lineup.items():
            outcome = in_fresh_interpreter(contender, batch_size, n_rows, scored=turn == 0)
            outcomes[name].append(outcome)
            speed = outcome.images_per_second
            print(f"batch {batch_size}, turn {turn + 1}: {name:<36}{speed:>8.0f} images/s", flush=True)
    return outcomes


def table(outcomes: Outcomes, bases: Mapping[str, tuple[str, ...]]) -> str:
    """Medians, spreads and accuracies, and each median over that of the best of some contenders.

    Parameters
    ----------
    outcomes : dict
    bases : mapping
        What a column is called, and the contenders whose best it divides by.
    """
    medians = {n: statistics.median(o.images_per_second for o in turns) for n, turns in outcomes.items()}
    best = {
        column: max((medians[name] for name in names if name in medians), default=math.nan)
        for column, names in bases.items()
    }
    head = f"{'':<36}{'images/s':>9}{'min':>7}{'max':>7}" + "".join(f"{column:>10}" for column in best)
    return "\n".join([head + f"{'train':>8}{'test':>8}"] + [
        _line(name, turns, [medians[name] / base for base in best.values()])
        for name, turns in outcomes.items()
    ])  # fmt: skip


def _line(name: str, turns: list[Trained], ratios: list[float]) -> str:
    speeds, scored = [turn.images_per_second for turn in turns], turns[0]
    return (
        f"{name:<36}{statistics.median(speeds):>9.0f}{min(speeds):>7.0f}{max(speeds):>7.0f}"
        + "".join(f"{ratio:>10.2f}" for ratio in ratios)
        + f"{scored.train_accuracy:>8.3f}{scored.test_accuracy:>8.3f}"
    )
