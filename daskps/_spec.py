"""The words that client, scheduler and workers share. Importable with numpy alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

# Part of the plugins' names: clients of different protocols can share a cluster.
PROTOCOL = 1

SCHEDULER_PLUGIN = f"daskps-scheduler-{PROTOCOL}"
WORKER_PLUGIN = f"daskps-worker-{PROTOCOL}"

# The topic of Dask's event log under which a run speaks to its client.
TOPIC = f"daskps-{PROTOCOL}"

# The name of tasks that make an adaptive cluster grow. They need a resource of that name, which no worker
# has, and so they run nowhere.
PLACEHOLDER = "daskps-placeholder"

Reduction = Literal["mean", "sum"]

REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")
DTYPES = ("float32", "float64")


class GenerationKey(NamedTuple):
    """What tells the generations of all runs apart; messages name its fields."""

    run_id: str
    generation: int


@dataclass(frozen=True)
class Ticket:
    """Which seat of which run a rank holds; travels in every message of the rank."""

    run_id: str
    generation: int
    rank: int
    world_size: int

    @property
    def key(self) -> GenerationKey:
        """Of the generation that the rank belongs to."""
        return GenerationKey(self.run_id, self.generation)


class Rules(NamedTuple):
    """The client's settings that hold for a whole run, on all sides. Durations in seconds."""

    workers: float
    connect: float
    start: float
    round: float
    silence: float
    close: float
    report_interval: float
    transport: str
    bucket_bytes: int
    wire_dtype: str | None
    on_divergence: str


@dataclass(frozen=True)
class Order:
    """One epoch of one rank. The scheduler unpickles it with the task that it is for."""

    ticket: Ticket
    epoch: int
    """Counted from 0 over all fits of the net: what is random in an epoch hangs on it."""
    first: bool
    """Whether the training begins with this epoch."""
    seed: int
    shuffle: bool
    settings: bytes
    predictions: bool = False
    """Whether the training predictions are to be brought back."""


class Contribution(NamedTuple):
    """What one rank announces to bring to one round.

    A tuple, like an answer: a frozen dataclass takes five times as long to make, in every step.

    The rank has already multiplied its values by ``weight`` where ``reduction`` is 'mean'. A rank of
    weight 0 brings no values.
    """

    run_id: str
    generation: int
    rank: int
    round: int
    weight: float
    reduction: Reduction
    size: int
    """How many values."""
    dtype: str
    offset: int = 0
    """At which byte of the rank's memory the values begin, and of the results' the result."""
    narrow: int = 0
    """How many values, from the first, travel in the run's wire dtype where they travel."""


def operation(name: str) -> str:
    """The name of a handler on the scheduler, by protocol."""
    return f"daskps_{name}_{PROTOCOL}"


OPEN, RENEW, CLOSE = operation("open"), operation("renew"), operation("close")
PAUSED = operation("paused")
JOIN = operation("join")
HELLO, LEFT, FORGET = operation("hello"), operation("left"), operation("forget")
