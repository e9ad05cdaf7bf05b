"""What a fit measured, and the speedup that it predicts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RankEpoch:
    """One rank's epoch.

    Attributes
    ----------
    epoch, rank : int
        Counted from 0.
    rows, steps, rounds : int
        Training rows, optimizer steps, exchanges with the parameter server.
    compute_seconds : float
        Everything that was neither waiting nor moving data.
    wait_seconds : float
        Waiting for ranks that were not there yet.
    sync_seconds : float
        Moving and combining data.
    bytes : int
        Sent and received.
    transport : str
        'shared-memory', 'comm', or 'comm (messages)' where Dask had no socket to hand over; 'none' if
        there was one rank.
    """

    epoch: int
    rank: int
    rows: int
    steps: int
    rounds: int
    compute_seconds: float
    wait_seconds: float
    sync_seconds: float
    bytes: int
    transport: str


@dataclass(frozen=True)
class FitEvent:
    """Something that happened to the workers of a fit.

    Attributes
    ----------
    epoch : int
        Counted from 0.
    worker : str
        Its address; empty if it is not known.
    what : str
        What happened to it, and what was done about it.
    """

    epoch: int
    worker: str
    what: str


@dataclass
class FitReport:
    """What one fit measured.

    The model is that of a parameter server: with C the seconds that one worker computes for the
    gradient of one batch, and S the seconds of waiting and moving data per batch, K workers take
    C/K + S for a batch, so their speedup is C/(C/K + S).

    Attributes
    ----------
    world_size : int
        Ranks that trained, K; at the end, if workers were lost or joined.
    sync_every : {'batch', 'epoch'} or int
    batch_size : int
        Rows that one optimizer step sees.
    startup_seconds : dict of str to float
        What had to happen before the first step, by name.
    epoch_seconds : list of float
        Wall time of every epoch on the client, validation and callbacks included.
    ranks : list of RankEpoch
    events : list of FitEvent
        Workers that were lost or joined.
    """

    world_size: int
    sync_every: str | int
    batch_size: int
    startup_seconds: dict[str, float] = field(default_factory=dict)
    epoch_seconds: list[float] = field(default_factory=list)
    ranks: list[RankEpoch] = field(default_factory=list)
    events: list[FitEvent] = field(default_factory=list)

    @property
    def n_batches(self) -> float:
        """How many batches of ``batch_size`` rows all epochs and ranks went through together."""
        return sum(entry.rows for entry in self.ranks) / self.batch_size

    @property
    def C(self) -> float:
        """Seconds of computing per batch, as one worker alone would need them."""
        return _ratio(sum(entry.compute_seconds for entry in self.ranks), self.n_batches)

    @property
    def S(self) -> float:
        """Seconds of waiting and moving data per batch."""
        idle = sum(entry.wait_seconds + entry.sync_seconds for entry in self.ranks)
        return _ratio(idle / self.world_size, self.n_batches)

    @property
    def predicted_speedup(self) -> float:
        """C/(C/K + S) for the K of this fit."""
        return _ratio(self.C, self.C / self.world_size + self.S)

    def to_dict(self) -> dict[str, Any]:
        """All that was measured, in plain Python types."""
        derived = {"C": self.C, "S": self.S, "predicted_speedup": self.predicted_speedup}
        return {**asdict(self), **derived}

    def to_frame(self) -> Any:
        """One row for every epoch and rank.

        Returns
        -------
        pandas.DataFrame

        Raises
        ------
        ImportError
            If pandas is not installed.
        """
        import pandas as pd

        columns = list(RankEpoch.__dataclass_fields__)
        return pd.DataFrame([asdict(entry) for entry in self.ranks], columns=columns)

    def __str__(self) -> str:
        events = [f"epoch {e.epoch + 1}: {e.worker} {e.what}" for e in self.events]
        return "\n".join([*self._summary(), *events, "", *self._table()])

    def _summary(self) -> list[str]:
        startup = sum(self.startup_seconds.values())
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.startup_seconds.items())
        return [
            f"{self.world_size} rank(s), sync_every={self.sync_every!r}, batch_size={self.batch_size}",
            f"transport {', '.join(sorted({e.transport for e in self.ranks}))}",
            f"start-up  {startup:.2f} s ({parts})",
            f"epochs    {len(self.epoch_seconds)} in {sum(self.epoch_seconds):.2f} s",
            f"C         {1000 * self.C:.2f} ms of computing per batch",
            f"S         {1000 * self.S:.2f} ms of waiting and moving data per batch",
            f"speedup   {self.predicted_speedup:.2f} predicted by C/(C/K + S)",
        ]

    def _table(self) -> list[str]:
        head = "epoch  rank     rows   steps  compute s   wait s   sync s        MB"
        rows = [
            f"{e.epoch + 1:>5}  {e.rank:>4}  {e.rows:>7}  {e.steps:>6}  {e.compute_seconds:>9.2f}"
            f"  {e.wait_seconds:>7.2f}  {e.sync_seconds:>7.2f}  {e.bytes / 1e6:>8.1f}"
            for e in self.ranks
        ]
        return [head, *rows]


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
