"""The bytes of a rank's data connection: headers of a fixed length, and values as they lie in memory.

Nothing here is pickled or unpickled, and nothing is believed: the parameter server checks what a
header says before a value is read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from daskps import exceptions
from daskps._spec import DTYPES, REDUCTIONS, Contribution
from daskps.exceptions import DaskpsError, InvalidMessageError

_PUSH = struct.Struct("<32sIIQdBBQQQ")
_ANSWER = struct.Struct("<BBBQQddH")

PUSH_BYTES = _PUSH.size
ANSWER_BYTES = _ANSWER.size

# Of a value in any of the wire dtypes.
NARROW_BYTES = 2

_MOST_TEXT = 4096


class Answer(NamedTuple):
    """What the server announces to send back.

    Attributes
    ----------
    size : int
        How many values; 0 if no rank had any weight.
    dtype : str
    complete : float
        The server's monotonic clock when the round was complete.
    waited : float
        Seconds between the arrival of the rank's contribution and that moment.
    narrow : int
        How many of the values, from the first, come in the run's wire dtype.
    finite : bool
        Whether no value is NaN or infinite.
    """

    size: int
    dtype: str
    complete: float
    waited: float
    narrow: int = 0
    finite: bool = True


def pack_push(c: Contribution) -> bytes:
    """The header of a contribution."""
    return _PUSH.pack(
        c.run_id.encode(),
        c.generation,
        c.rank,
        c.round,
        c.weight,
        REDUCTIONS.index(c.reduction),
        DTYPES.index(c.dtype),
        c.size,
        c.offset,
        c.narrow,
    )


def unpack_push(header: bytes) -> Contribution:
    """Read the header of a contribution.

    Raises
    ------
    InvalidMessageError
        If it is not one.
    """
    try:
        run_id, generation, rank, round_, weight, reduction, dtype, *place = _PUSH.unpack(header)
        size, offset, narrow = place
        return Contribution(
            run_id.decode(),
            generation,
            rank,
            round_,
            weight,
            REDUCTIONS[reduction],
            size,
            DTYPES[dtype],
            offset,
            narrow,
        )
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise InvalidMessageError(f"not the header of a contribution: {error!r}") from None


def pack_answer(answer: Answer) -> bytes:
    """The header of a result."""
    dtype = DTYPES.index(answer.dtype)
    a = answer
    return _ANSWER.pack(0, dtype, a.finite, a.size, a.narrow, a.complete, a.waited, 0)


def pack_refusal(error: BaseException) -> bytes:
    """What the server sends instead of a result."""
    text = f"{type(error).__name__}\n{error}".encode()[:_MOST_TEXT]
    return _ANSWER.pack(1, 0, 0, 0, 0, 0.0, 0.0, len(text)) + text


def following_bytes(header: bytes) -> int:
    """How many bytes of text or values follow the header of an answer."""
    _, dtype, _, size, narrow, _, _, n_text = _ANSWER.unpack(header)
    return int(n_text) + sent_bytes(size, DTYPES[dtype], narrow)


def sent_bytes(size: int, dtype: str, narrow: int) -> int:
    """How many bytes values take that travel."""
    return (size - narrow) * int(dtype.removeprefix("float")) // 8 + narrow * NARROW_BYTES


def unpack_answer(header: bytes, read_text: Callable[[int], bytes]) -> Answer:
    """Read an answer; a refusal, whose text follows, is raised as the error that it names."""
    refused, dtype, finite, size, narrow, complete, waited, n_text = _ANSWER.unpack(header)
    if refused:
        kind, _, reason = read_text(n_text).decode(errors="replace").partition("\n")
        raise error_of(kind, reason)
    return Answer(size, DTYPES[dtype], complete, waited, narrow, bool(finite))


def error_of(kind: str, reason: str) -> DaskpsError:
    """The error that a refusal names."""
    found = getattr(exceptions, kind, DaskpsError)
    known = isinstance(found, type) and issubclass(found, DaskpsError)
    return found(reason) if known else DaskpsError(f"{kind}: {reason}")
