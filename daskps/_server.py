"""The parameter server: which contributions make up a round, and which are refused.

A state machine with no I/O, no clock and no event loop. It decides; the scheduler plugin around it
reads, waits, adds and writes.
"""

from __future__ import annotations

import math

from daskps._spec import DTYPES, REDUCTIONS, Contribution
from daskps.exceptions import InvalidMessageError, StaleMessageError


class ParameterServer:
    """The rounds of one run.

    Parameters
    ----------
    run_id : str
    world_size : int
        How many ranks contribute to every round.

    Attributes
    ----------
    capacity : int
        How many bytes a contribution may have; agreed on when ranks join.
    """

    def __init__(self, run_id: str, world_size: int) -> None:
        self.run_id = run_id
        self.world_size = world_size
        self.capacity = 0
        self.generation = 0
        self.round = 0
        self.error: BaseException | None = None
        self._pending: dict[int, Contribution] = {}

    def push(self, contribution: Contribution) -> list[Contribution] | None:
        """Take in one contribution.

        Returns
        -------
        list of Contribution, or None
            All contributions of the round in rank order if this one completed it.

        Raises
        ------
        StaleMessageError
            If it belongs to a generation or a round that is over.
        InvalidMessageError
            If it cannot belong to the round that is open.
        """
        if self.error is not None:
            raise self.error
        self._refuse_stale(contribution)
        self._refuse_invalid(contribution)
        self._refuse_unlike(contribution)
        pending = self._pending  # `fail`, in another thread, puts another one in its place
        pending[contribution.rank] = contribution
        if len(pending) < self.world_size:
            return None
        self._pending = {}
        self.round += 1
        return [pending[rank] for rank in range(self.world_size)]

    def missing(self) -> list[int]:
        """The ranks that the open round waits for."""
        return [rank for rank in range(self.world_size) if rank not in self._pending]

    def fail(self, error: BaseException) -> None:
        """Poison the run: from now on every push raises the first error."""
        if self.error is None:
            self.error = error
        self._pending = {}

    def _refuse_stale(self, c: Contribution) -> None:
        if c.run_id != self.run_id:
            raise StaleMessageError(f"run {c.run_id!r} is not open, {self.run_id!r} is")
        if c.generation < self.generation:
            raise StaleMessageError(f"generation {c.generation} is over, it is {self.generation}")
        if c.round < self.round:
            raise StaleMessageError(f"round {c.round} is over, it is {self.round}")

    def _refuse_invalid(self, c: Contribution) -> None:
        if c.generation != self.generation or c.round != self.round:
            raise InvalidMessageError(
                f"round {c.round} of generation {c.generation} has not begun, it is round {self.round}"
                f" of generation {self.generation}"
            )
        if not 0 <= c.rank < self.world_size:
            raise InvalidMessageError(f"rank {c.rank} is not one of {self.world_size}")
        if c.rank in self._pending:
            raise InvalidMessageError(f"rank {c.rank} contributed twice to round {c.round}")
        if not (math.isfinite(c.weight) and c.weight >= 0):
            raise InvalidMessageError(f"weight {c.weight} of rank {c.rank} is not finite and >= 0")
        if c.reduction not in REDUCTIONS:
            raise InvalidMessageError(f"reduction {c.reduction!r} is not one of {REDUCTIONS}")
        if c.dtype not in DTYPES:
            raise InvalidMessageError(f"dtype {c.dtype!r} is not one of {DTYPES}")
        if (c.weight > 0) != (c.size > 0):
            raise InvalidMessageError(f"rank {c.rank} sent {c.size} values with weight {c.weight}")
        itemsize = int(c.dtype.removeprefix("float")) // 8
        if c.offset % itemsize or c.offset + c.size * itemsize > self.capacity:
            raise InvalidMessageError(
                f"rank {c.rank} sent {c.size} values of {c.dtype} at {c.offset}, of {self.capacity} bytes"
            )
        if c.narrow > c.size or (c.narrow and c.dtype != "float32"):
            raise InvalidMessageError(f"rank {c.rank} narrowed {c.narrow} of {c.size} values of {c.dtype}")

    def _refuse_unlike(self, c: Contribution) -> None:
        """All that count in a round have the same length, dtype and reduction."""
        if c.weight == 0:
            return
        for other in self._pending.values():
            if other.weight > 0 and _shape(other) != _shape(c):
                raise InvalidMessageError(
                    f"rank {c.rank} sent {_shape(c)} in round {c.round}, rank {other.rank} sent"
                    f" {_shape(other)}"
                )


def _shape(c: Contribution) -> tuple[int, str, str, int, int]:
    return c.size, c.dtype, c.reduction, c.offset, c.narrow
