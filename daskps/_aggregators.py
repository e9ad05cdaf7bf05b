"""How the contributions of one round become one result."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from daskps._spec import Contribution


def combine(contributions: Iterable[Contribution]) -> np.ndarray:
    """Add the weighted buffers in rank order and, for a mean, divide once.

    The fixed order makes the bits independent of who came first. Contributions of weight 0 are left
    out instead of multiplied, since theirs may be NaN. An empty result says that nobody contributed.
    """
    counted = sorted((c for c in contributions if c.weight > 0), key=lambda c: c.rank)
    if not counted:
        return np.empty(0)
    total = counted[0].buffer.copy()
    for contribution in counted[1:]:
        np.add(total, contribution.buffer, out=total)
    if counted[0].reduction == "mean":
        np.true_divide(total, sum(c.weight for c in counted), out=total)
    return total
