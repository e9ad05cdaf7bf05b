"""The messages of a rank's data connection: small headers and one opaque buffer.

Buffers travel as frames that Dask does not look into. Nothing here is pickled or unpickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed.protocol import Serialized

from daskps import exceptions
from daskps._spec import Contribution, Ticket
from daskps.exceptions import DaskpsError, InvalidMessageError

DTYPES = ("float32", "float64")

_HEADER: dict[str, type | tuple[type, ...]] = {
    "run_id": str,
    "generation": int,
    "rank": int,
    "round": int,
    "weight": (int, float),
    "reduction": str,
}


def push(ticket: Ticket, round_: int, weight: float, reduction: str, buffer: np.ndarray) -> dict:
    """What a rank sends to contribute to a round."""
    return {
        "run_id": ticket.run_id,
        "generation": ticket.generation,
        "rank": ticket.rank,
        "round": round_,
        "weight": weight,
        "reduction": reduction,
        "dtype": str(buffer.dtype),
        "buffer": _frame(buffer),
    }


def contribution(message: Any) -> Contribution:
    """Read a rank's message.

    Raises
    ------
    InvalidMessageError
        If it is not a contribution.
    """
    try:
        fields = dict(message)
        for name, kind in _HEADER.items():
            if not isinstance(fields[name], kind):
                raise TypeError(f"{name} is {fields[name]!r}")
        fields["buffer"] = _array(fields["buffer"], fields.pop("dtype"))
        return Contribution(**fields)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise InvalidMessageError(f"not a contribution: {error!r}") from None


def answer(mean: np.ndarray, waited: float) -> dict:
    """What the server sends back: the result, and how long the rank waited for the others."""
    return {"status": "OK", "dtype": str(mean.dtype), "buffer": _frame(mean), "waited": waited}


def refusal(error: DaskpsError) -> dict:
    """What the server sends instead of a result."""
    return {"status": "refused", "kind": type(error).__name__, "reason": str(error)}


def result(message: dict) -> tuple[np.ndarray, float]:
    """Read the server's answer; a refusal is raised as the error that it names."""
    if message["status"] != "OK":
        raise getattr(exceptions, message["kind"], DaskpsError)(message["reason"])
    return _array(message["buffer"], message["dtype"]), message["waited"]


def _frame(buffer: np.ndarray) -> Serialized:
    return Serialized({}, [buffer.data.cast("B")] if buffer.size else [])


def _array(serialized: Serialized, dtype: str) -> np.ndarray:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {DTYPES}")
    if not serialized.frames:
        return np.empty(0, dtype)
    (frame,) = serialized.frames
    return np.frombuffer(frame, dtype)
