"""The settings under ``daskps:`` in Dask's configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_timedelta

from daskps._spec import Rules

TRANSPORTS = ("auto", "shared-memory", "comm")


def get(key: str) -> Any:
    """The value of ``daskps.<key>``."""
    return dask.config.get(f"daskps.{key}")


def seconds(key: str) -> float:
    """The duration under ``daskps.<key>``, in seconds."""
    return float(parse_timedelta(get(key), default="s"))


def rules() -> Rules:
    """The settings that hold for a whole run.

    Raises
    ------
    ValueError
        If one has no meaning.
    """
    transport = get("transport")
    if transport not in TRANSPORTS:
        raise ValueError(f"daskps.transport must be one of {TRANSPORTS}, got {transport!r} instead.")
    return Rules(
        workers=seconds("timeouts.workers"),
        connect=seconds("timeouts.connect"),
        start=seconds("timeouts.start"),
        round=seconds("timeouts.round"),
        silence=seconds("timeouts.silence"),
        close=seconds("timeouts.close"),
        report_interval=seconds("report-interval"),
        transport=transport,
    )


def _load_defaults() -> None:
    text = Path(__file__).with_name("daskps.yaml").read_text(encoding="utf-8")
    dask.config.update_defaults(yaml.safe_load(text))


_load_defaults()
