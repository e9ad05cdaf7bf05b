"""Values of 16 bits for the way through a connection. numpy alone: the scheduler has no torch."""

from __future__ import annotations

import numpy as np


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to 'bfloat16' or 'float16', to the nearest and to even, as their 16 bits."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    # Half of what is cut off is added, and one less to an even number, so that the cut rounds.
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0  # which the addition may have made an infinity
    return rounded


def widened(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values behind such bits."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_in_place(values: np.ndarray, dtype: str) -> None:
    """Give float32 values what is left of them after the way."""
    np.copyto(values, widened(narrowed(values, dtype), dtype))
