"""What a rank's task answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from daskps._transport import Traffic
from daskps.exceptions import RunAbortedError, StaleMessageError, WorkerLostError

# Under this key a validation step holds what callbacks on its rank recorded for its batch.
RECORDED = "daskps_recorded"


class Records(NamedTuple):
    """What callbacks on a rank recorded in its history, and what became of them."""

    batches: list[dict]
    epoch: dict
    callbacks: bytes


@dataclass
class Result:
    """What a rank brings back from an epoch."""

    losses: np.ndarray
    """(n_steps,) the loss of every step; in batch mode that of all ranks."""
    weights: np.ndarray
    """(n_steps,) by what this rank's loss was divided."""
    rows: int
    compute_seconds: float
    setup_seconds: float
    traffic: Traffic
    transport: str
    """Which road the rank's values took."""
    uniform: bool
    """Whether all ranks hold the same state now."""
    validation: bytes
    state: bytes
    """The replica's state, from rank 0; empty from the others, whose is the same."""
    records: Records | None
    """What callbacks on rank 0 left behind."""
    predictions: bytes
    norms: np.ndarray
    """Of all values, to see whether ranks that should hold the same do."""
    diverged: str
    """What was not finite; empty if everything was."""


class StateNeeded:
    """A rank's answer if it has no replica of exactly this run, generation and epoch."""


class Left(NamedTuple):
    """A rank's answer if it left because its run ended elsewhere: what is raised Dask logs as a failure."""

    why: str


# What a rank meets where its run has ended elsewhere.
CONSEQUENCES = (RunAbortedError, StaleMessageError, WorkerLostError)
