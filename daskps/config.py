"""The settings under ``daskps:`` in Dask's configuration."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import Any

import dask.config
import yaml
from dask.utils import parse_bytes, parse_timedelta

from daskps._spec import Rules

TRANSPORTS = ("auto", "shared-memory", "comm")
WIRE_DTYPES = (None, "bfloat16", "float16")
ON_DIVERGENCE = ("warn", "raise", "ignore")

# How one writes None in an environment variable, or in a file that one takes for Python. YAML's own null
# and an empty value in a file are None already.
NONE = ("", "none", "null")


def get(key: str) -> Any:
    """The value of ``daskps.<key>``."""
    # A block of dask.config.set around the first import takes all of daskps's settings along when it ends.
    return dask.config.get(f"daskps.{key}", default=_default(key))


def seconds(key: str) -> float:
    """The duration under ``daskps.<key>``, in seconds.

    Raises
    ------
    ValueError
        If it is none.
    """
    value = get(key)
    try:
        duration = float(parse_timedelta(value, default="s"))
    except (KeyError, ValueError, TypeError, AttributeError):
        duration = -1.0
    if not duration >= 0:
        raise ValueError(f"daskps.{key} must be a duration such as '30s', got {value!r} instead.")
    return duration


def count(key: str) -> int:
    """The number under ``daskps.<key>``.

    Raises
    ------
    ValueError
        If it is no integer >= 1.
    """
    value = get(key)
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"daskps.{key} must be an integer >= 1, got {value!r} instead.")
    return int(value)


def rules() -> Rules:
    """The settings that hold for a whole run.

    Raises
    ------
    ValueError
        If one has no meaning.
    """
    return Rules(
        workers=seconds("timeouts.workers"),
        connect=seconds("timeouts.connect"),
        start=seconds("timeouts.start"),
        round=seconds("timeouts.round"),
        silence=seconds("timeouts.silence"),
        close=seconds("timeouts.close"),
        report_interval=seconds("report-interval"),
        transport=_one_of("transport", TRANSPORTS),
        bucket_bytes=_bytes("bucket-size"),
        wire_dtype=_one_of("wire-dtype", WIRE_DTYPES),
        on_divergence=_one_of("on-divergence", ON_DIVERGENCE),
    )


def _one_of(key: str, allowed: tuple) -> Any:
    value = get(key)
    if None in allowed and str(value).lower() in NONE:
        return None
    if value not in allowed:
        raise ValueError(f"daskps.{key} must be one of {allowed}, got {value!r} instead.")
    return value


def _bytes(key: str) -> int:
    value = get(key)
    try:
        size = int(parse_bytes(value))
    except (ValueError, TypeError, AttributeError):
        size = -1
    if size < 0:
        raise ValueError(f"daskps.{key} must be a size such as '1MiB', or 0, got {value!r} instead.")
    return size


def _default(key: str) -> Any:
    value = _DEFAULTS["daskps"]
    for part in key.split("."):
        value = value[part]
    return value


_DEFAULTS: dict[str, Any] = yaml.safe_load(
    Path(__file__).with_name("daskps.yaml").read_text(encoding="utf-8")
)
dask.config.update_defaults(_DEFAULTS)
