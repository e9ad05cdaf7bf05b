"""Values of 16 bits for the way through a connection. numpy alone: the scheduler has no torch."""

from __future__ import annotations

import numpy as np

# A piece whose intermediate values stay in a core's cache.
_PIECE = 16_384

_BFLOAT16_NAN = 0x7FC0


def narrowed(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values rounded to 'bfloat16' or 'float16', to the nearest and to even, as their 16 bits."""
    bits = np.empty(len(values), np.uint16)
    for start in range(0, len(values), _PIECE):
        piece = slice(start, start + _PIECE)
        if dtype == "float16":
            with np.errstate(over="ignore"):
                np.copyto(bits[piece].view(np.float16), values[piece], casting="same_kind")
        else:
            _round_to_bfloat16(values[piece], bits[piece])
    return bits


def widened(bits: np.ndarray, dtype: str, scale: float = 1.0, out: np.ndarray | None = None) -> np.ndarray:
    """The float32 values behind such bits, times ``scale``."""
    values = np.empty(len(bits), np.float32) if out is None else out
    for start in range(0, len(bits), _PIECE):
        piece = slice(start, start + _PIECE)
        if dtype == "float16":
            np.copyto(values[piece], bits[piece].view(np.float16))
        else:
            np.left_shift(bits[piece], 16, out=values[piece].view(np.uint32), dtype=np.uint32)
        if scale != 1:
            values[piece] *= np.float32(scale)
    return values


def round_in_place(values: np.ndarray, dtype: str) -> None:
    """Give float32 values what is left of them after the way."""
    widened(narrowed(values, dtype), dtype, out=values)


def _round_to_bfloat16(values: np.ndarray, out: np.ndarray) -> None:
    bits = values.view(np.uint32)
    # Half of what is cut off is added, and one less to an even number, so that the cut rounds.
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    np.copyto(out, rounded, casting="unsafe")
    # The addition may have made an infinity of it. The sum of infinities is one too: a second look.
    with np.errstate(over="ignore", invalid="ignore"):
        suspicious = np.isnan(values.sum())
    if suspicious:
        out[np.isnan(values)] = _BFLOAT16_NAN
