"""A fit's report as HTML, for notebooks."""

from __future__ import annotations

from html import escape
from typing import Any

# As in the plot. Text takes the notebook's own colour, light or dark.
COLOURS = {"compute": "#4c78a8", "wait": "#f2a03d", "sync": "#c44e52"}

_TABLE = "border-collapse:collapse;margin:.5em 0;color:inherit;font-size:inherit"
_CELL = "padding:.15em .8em;text-align:right;white-space:nowrap"
_BAR_PIXELS = 320


def report_html(report: Any) -> str:
    """What was measured, what it means, and a bar for each rank, over all epochs."""
    return (
        '<div style="max-width:60em;line-height:1.4">'
        f"{_title(report)}{_summary(report)}{_events(report)}<p>{escape(report.advice())}</p>"
        f"{_legend()}{_ranks(report)}</div>"
    )


def _title(report: Any) -> str:
    title = f"{report.world_size} rank(s), sync_every={report.sync_every!r}, batch_size={report.batch_size}"
    return f"<b>{escape(title)}</b>"


def _summary(report: Any) -> str:
    cells = [
        f'<tr><th style="{_CELL};text-align:left">{escape(name)}</th>'
        f'<td style="{_CELL};text-align:left">{escape(value)}</td></tr>'
        for name, value in report.summary().items()
    ]
    return f'<table style="{_TABLE}">{"".join(cells)}</table>'


def _events(report: Any) -> str:
    """Workers that were lost or joined. Their addresses may be longer than a line, and break anywhere."""
    lines = [f"<li>{escape(line)}</li>" for line in report.event_lines()]
    return f'<ul style="overflow-wrap:anywhere">{"".join(lines)}</ul>' if lines else ""


def _legend() -> str:
    parts = [
        f'<span style="display:inline-block;width:.8em;height:.8em;background:{colour}"></span> {name}'
        for name, colour in COLOURS.items()
    ]
    return (
        f'<p style="margin:.3em 0">Seconds of each rank, all epochs together: {" &nbsp; ".join(parts)}</p>'
    )


def _ranks(report: Any) -> str:
    seconds = report.seconds_by_rank()
    longest = max((sum(parts.values()) for parts in seconds.values()), default=0.0)
    heads = ["rank", *(f"{name} (s)" for name in COLOURS), ""]
    head = "".join(f'<th style="{_CELL}">{name}</th>' for name in heads)
    rows = "".join(_rank(rank, parts, longest) for rank, parts in seconds.items())
    return f'<table style="{_TABLE}"><tr>{head}</tr>{rows}</table>'


def _rank(rank: int, parts: dict[str, float], longest: float) -> str:
    cells = "".join(f'<td style="{_CELL}">{parts[name]:.2f}</td>' for name in COLOURS)
    bar = "".join(
        f'<span style="display:inline-block;height:1em;background:{colour};'
        f'width:{_BAR_PIXELS * parts[name] / longest if longest else 0:.1f}px"></span>'
        for name, colour in COLOURS.items()
    )
    # Without a font size the white space between the pieces would be drawn.
    bar_cell = f'<td style="{_CELL};text-align:left;vertical-align:middle;line-height:0">{bar}</td>'
    return f'<tr><td style="{_CELL}">{rank}</td>{cells}{bar_cell}</tr>'
