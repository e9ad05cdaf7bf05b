"""Pictures, with matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from statistics import mean
from typing import Any

from daskps._html import COLOURS

# More ticks than this overlap.
_MOST_TICKS = 24


def pyplot() -> Any:
    """Matplotlib's state of figures.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Drawing needs matplotlib: pip install 'daskps[plot]'.") from error
    return plt


def draw_report(report: Any, ax: Any = None) -> Any:
    """A bar for each epoch and rank, of its seconds of computing, waiting and moving data."""
    entries = sorted(report.ranks, key=lambda entry: (entry.epoch, entry.rank))
    ax = ax if ax is not None else _axes(len(entries))
    epochs = sorted({entry.epoch for entry in entries})
    most = max((entry.rank for entry in entries), default=0) + 1
    # One place between two epochs stays empty.
    places = [epochs.index(entry.epoch) * (most + 1) + entry.rank for entry in entries]
    bottom = [0.0] * len(entries)
    width = 0.9 if len(entries) < 50 else 1.0  # narrow gaps come out uneven
    for name, colour in COLOURS.items():
        heights = [getattr(entry, f"{name}_seconds") for entry in entries]
        ax.bar(places, heights, width=width, bottom=bottom, color=colour, label=name)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    of_epoch: dict[int, list[int]] = {}
    for entry, place in zip(entries, places, strict=True):
        of_epoch.setdefault(entry.epoch, []).append(place)
    _label(ax, report, {epoch: mean(at) for epoch, at in of_epoch.items()}, most)
    return ax


def _axes(n_bars: int) -> Any:
    width = min(14.0, max(6.4, 2.0 + 0.25 * n_bars))
    return pyplot().subplots(figsize=(width, 4.0), layout="constrained")[1]


def _label(ax: Any, report: Any, centres: dict[int, float], most: int) -> None:
    """Each epoch's number stands under the middle of the ranks that it had."""
    every = max(1, -(-len(centres) // _MOST_TICKS))
    ax.set_xticks(list(centres.values())[::every], [str(epoch + 1) for epoch in list(centres)[::every]])
    ranks = "rank 0" if most == 1 else f"ranks 0 to {most - 1} side by side"
    ax.set_xlabel(f"epoch ({ranks})")
    ax.set_ylabel("time of a rank (s)")
    ax.set_ylim(bottom=0)
    ax.margins(x=0.02)
    ax.set_title(
        f"{report.world_size} rank(s), sync_every={report.sync_every!r}, batch_size={report.batch_size}",
        fontsize="medium",
    )
    if not centres:
        return
    # Beside the bars, which may fill the whole of the axes.
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
