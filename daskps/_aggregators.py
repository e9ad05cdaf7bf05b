"""How the contributions of one round become one result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

# Reads the values from one position to another of a rank's contribution.
Reader = Callable[[int, int], np.ndarray]

# 256 KiB of float32: what is added stays in a core's cache until it is divided.
CHUNK = 65_536


def combine(readers: Sequence[Reader], divisor: float, out: np.ndarray) -> bool:
    """Add contributions in the given order, chunk by chunk, and divide once.

    The order is that of the ranks, whoever came first, so that the bits do not depend on it.

    Parameters
    ----------
    readers : sequence of callable
        One for every contribution that counts. Contributions of weight 0 are left out instead of
        multiplied, since theirs may be NaN.
    divisor : float
        The sum of the weights for a mean, 1 for a sum.
    out : ndarray
        Takes the result.

    Returns
    -------
    bool
        Whether all values of the result are finite: looked at here, once and where they are in a
        cache, instead of by every rank.
    """
    finite = True
    for start in range(0, len(out), CHUNK):
        total = out[start : start + CHUNK]
        stop = start + len(total)
        parts = [read(start, stop) for read in readers]
        np.add(parts[0], parts[1], out=total) if len(parts) > 1 else np.copyto(total, parts[0])
        for part in parts[2:]:
            np.add(total, part, out=total)
        if divisor != 1:
            np.true_divide(total, divisor, out=total)
        finite = finite and bool(np.isfinite(total).all())
    return finite
