"""What a fit measured, and the speedup that it predicts."""

from __future__ import annotations

import textwrap
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from daskps import _advice, _drawing, _html


@dataclass(frozen=True)
class RankEpoch:
    """One rank's epoch.

    Attributes
    ----------
    epoch, rank : int
        Counted from 0; the text of a report counts epochs from 1.
    rows, steps, rounds : int
        Training rows, optimizer steps, exchanges with the parameter server.
    compute_seconds : float
        Of its steps, everything that was neither waiting nor moving data.
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

    With C the seconds that one worker computes for the gradient of one batch, and S the seconds of
    waiting and moving data per batch, K workers take C/K + S for a batch, so their speedup is
    C/(C/K + S). A notebook shows it as a table with bars. `SpeedupModel` predicts other numbers of
    workers from one or more of these.

    Attributes
    ----------
    world_size : int
        Ranks that trained, K; at the end, if workers were lost or joined.
    sync_every : {'batch', 'epoch'} or int
    batch_size : int
        Rows that one optimizer step sees.
    startup_seconds : dict of str to float
        Seconds of what had to happen before the first step: 'checks', 'cluster', 'lease', 'scatter' and,
        of the slowest rank, 'replicas'.
    epoch_seconds : list of float
        Wall time of every epoch on the client, validation and callbacks included.
    ranks : list of RankEpoch
        One for every epoch and rank.
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
        n_ranks = Counter(entry.epoch for entry in self.ranks)  # not every epoch need have had all
        idle = sum((entry.wait_seconds + entry.sync_seconds) / n_ranks[entry.epoch] for entry in self.ranks)
        return _ratio(idle, self.n_batches)

    @property
    def predicted_speedup(self) -> float:
        """C/(C/K + S) for the K of this fit."""
        return _ratio(self.C, self.C / self.world_size + self.S)

    @property
    def idle_share(self) -> float:
        """Which part of their time ranks waited or moved data, from 0 to 1."""
        return _ratio(self.S, self.C / self.world_size + self.S)

    @property
    def boundary_share(self) -> float:
        """Which part of the epochs was neither computing, waiting nor moving data, from 0 to 1.

        That is what happens between the ranks' last step and the next epoch's first one: validation,
        callbacks, and the way of the net's state to the client and back.
        """
        total = sum(self.epoch_seconds)
        return max(0.0, _ratio(total - self._stepping_seconds(), total))

    def seconds_by_rank(self) -> dict[int, dict[str, float]]:
        """Seconds of 'compute', 'wait' and 'sync' of every rank, all epochs together.

        Returns
        -------
        dict of int to dict of str to float
            By rank.
        """
        seconds: dict[int, dict[str, float]] = {}
        for entry in sorted(self.ranks, key=lambda entry: entry.rank):
            parts = seconds.setdefault(entry.rank, {"compute": 0.0, "wait": 0.0, "sync": 0.0})
            parts["compute"] += entry.compute_seconds
            parts["wait"] += entry.wait_seconds
            parts["sync"] += entry.sync_seconds
        return seconds

    def advice(self) -> str:
        """What to change, in one or two sentences: where the most time is lost, and what helps.

        Returns
        -------
        str

        Examples
        --------
        >>> from daskps import FitReport
        >>> FitReport(2, "batch", 32).advice()
        'Nothing was measured: no epoch ended.'
        """
        return _advice.advice(self)

    def plot(self, ax: Any = None) -> Any:
        """Draw a bar for every epoch and rank: its seconds of computing, waiting and moving data.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default in a new figure.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        return _drawing.draw_report(self, ax)

    def to_dict(self) -> dict[str, Any]:
        """All that was measured, and what follows from it, in plain Python types.

        Returns
        -------
        dict
            The attributes and properties by their names; `ranks` as a list of dicts.
        """
        names = ("n_batches", "C", "S", "predicted_speedup", "idle_share", "boundary_share")
        return {**asdict(self), **{name: getattr(self, name) for name in names}, "advice": self.advice()}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> FitReport:
        """The report of which `to_dict` made ``plain``, also after a way through JSON.

        Parameters
        ----------
        plain : dict
            What follows from the attributes may be left out.

        Returns
        -------
        FitReport
        """
        values = {name: plain[name] for name in cls.__dataclass_fields__ if name in plain}
        ranks = [RankEpoch(**entry) for entry in plain.get("ranks", ())]
        events = [FitEvent(**event) for event in plain.get("events", ())]
        return cls(**{**values, "ranks": ranks, "events": events})

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

    def summary(self) -> dict[str, str]:
        """The figures of the whole fit as text, with their units.

        Returns
        -------
        dict of str to str
            By name: 'transport', 'start-up', 'epochs', 'C', 'S' and 'speedup'.
        """
        startup = sum(self.startup_seconds.values())
        parts = ", ".join(f"{name} {value:.2f}" for name, value in self.startup_seconds.items())
        return {
            "transport": ", ".join(sorted({entry.transport for entry in self.ranks})),
            "start-up": f"{startup:.2f} s ({parts})" if parts else "0.00 s",
            "epochs": f"{len(self.epoch_seconds)} in {sum(self.epoch_seconds):.2f} s",
            "C": f"{1000 * self.C:.2f} ms of computing per batch",
            "S": f"{1000 * self.S:.2f} ms of waiting and moving data per batch",
            "speedup": f"{self.predicted_speedup:.2f} predicted by C/(C/K + S)",
        }

    def event_lines(self) -> list[str]:
        """The workers that were lost or joined, a line for each.

        Returns
        -------
        list of str
            Epochs are counted from 1.
        """
        return [f"epoch {e.epoch + 1}: {e.worker} {e.what}" for e in self.events]

    def __str__(self) -> str:
        head = f"{self.world_size} rank(s), sync_every={self.sync_every!r}, batch_size={self.batch_size}"
        lines = [f"{name:<9} {value}".rstrip() for name, value in self.summary().items()]
        advice = textwrap.fill(self.advice(), 100)
        return "\n".join([head, *lines, *self.event_lines(), advice, "", *self._table()])

    def _repr_html_(self) -> str:
        return _html.report_html(self)

    def _stepping_seconds(self) -> float:
        """What the slowest rank of each epoch took for its steps."""
        slowest: dict[int, float] = {}
        for e in self.ranks:
            seconds = e.compute_seconds + e.wait_seconds + e.sync_seconds
            slowest[e.epoch] = max(slowest.get(e.epoch, 0.0), seconds)
        return sum(slowest.values())

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
