"""How rows become shards and steps. Nothing else knows how data is cut.

Index arithmetic only: no data, no cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np


class Shard(NamedTuple):
    """What one rank holds: its rows, and how they fall into steps.

    A tuple of arrays, so that Dask sees its size and can spill it.
    """

    X: Any
    y: np.ndarray
    sizes: np.ndarray
    """(n_steps,) rows of every step."""
    X_valid: Any
    y_valid: np.ndarray | None
    valid_sizes: np.ndarray
    """(n_batches,) rows of every validation batch of this rank."""
    weights: np.ndarray | None = None
    """(n_rows,) what every training row counts; None if all count the same."""
    layout: Layout | None = None
    """Of the training rows, where these lie in blocks."""


class Layout(NamedTuple):
    """How a rank's rows lie in blocks, of which it reads a few at a time."""

    bounds: np.ndarray
    """(n_blocks + 1,) where each block's rows begin, and the last one's end."""
    window: int
    """How many blocks can be in memory."""


@dataclass(frozen=True)
class Batching:
    """The options of a serial iterator that decide which rows make up a batch."""

    batch_size: int
    shuffle: bool = False
    drop_last: bool = False

    def sizes(self, n_rows: int) -> np.ndarray:
        """Rows of every serial batch."""
        size = n_rows if self.batch_size == -1 else self.batch_size
        full, rest = divmod(n_rows, size) if n_rows else (0, 0)
        keep_rest = rest and not self.drop_last
        return np.array([size] * full + [rest] * bool(keep_rest), dtype=np.intp)


@dataclass(frozen=True)
class Plan:
    """Who holds which training rows, and when they are used."""

    rows: list[np.ndarray]
    """For every rank the positions of its rows in the training data, in the order of use."""
    sizes: np.ndarray
    """(world_size, n_steps) rows of every step on every rank."""
    layouts: list[Layout] | None = None
    """For every rank how its rows lie in blocks; None where they are in memory as one array."""

    def layout(self, rank: int) -> Layout | None:
        """The layout of one rank's rows."""
        return None if self.layouts is None else self.layouts[rank]


def plan_batches(n_rows: int, batching: Batching, world_size: int, seed: int) -> Plan:
    """Deal the rows of every serial batch to the ranks: the ranks' t-th pieces are the t-th batch."""
    order = serial_order(n_rows, batching, seed)
    sizes = deal_batches(batching.sizes(n_rows), world_size)
    return Plan(dealt_rows(order, sizes), sizes)


def plan_local(n_rows: int, batching: Batching, world_size: int, seed: int) -> Plan:
    """Deal the rows one by one, and let every rank make steps of ``batch_size`` rows of its own."""
    order = serial_order(n_rows, batching, seed)[: batching.sizes(n_rows).sum()]
    n_ranks = np.count_nonzero(deal(len(order), world_size))
    rows = [order[rank::n_ranks] if rank < n_ranks else order[:0] for rank in range(world_size)]
    return Plan(rows, local_steps([len(held) for held in rows], batching.batch_size))


def serial_order(n_rows: int, batching: Batching, seed: int) -> np.ndarray:
    """The order in which the serial iterator would go through the rows, or a shuffled one."""
    if not batching.shuffle:
        return np.arange(n_rows)
    return np.random.default_rng(seed).permutation(n_rows)


def deal(n_rows: int, world_size: int) -> np.ndarray:
    """Rows of one step for each rank, at least two each, rank 0 first.

    BatchNorm cannot normalise a single row, so nobody gets one unless the step has only one.
    """
    n_ranks = min(world_size, max(1, n_rows // 2))
    base, extra = divmod(n_rows, n_ranks)
    sizes = np.zeros(world_size, dtype=np.intp)
    sizes[:n_ranks] = base
    sizes[:extra] += 1
    return sizes


def deal_batches(batch_sizes: np.ndarray, world_size: int) -> np.ndarray:
    """(world_size, n_steps) rows of every serial batch on every rank."""
    dealt = {size: deal(size, world_size) for size in np.unique(batch_sizes)}
    columns = [dealt[size] for size in batch_sizes]
    return np.stack(columns, axis=1) if columns else np.zeros((world_size, 0), dtype=np.intp)


def dealt_rows(order: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """For every rank the rows that it is dealt, step by step."""
    owners = np.repeat(np.tile(np.arange(len(sizes)), sizes.shape[1]), sizes.T.ravel())
    used = order[: len(owners)]
    return [used[owners == rank] for rank in range(len(sizes))]


def local_steps(lengths: Sequence[int], batch_size: int) -> np.ndarray:
    """(world_size, n_steps) rows of every local step, as many steps on every rank.

    The longest shards are cut as the serial iterator cuts them. A shard that this would leave with
    fewer steps, or with a rest of one row, is cut evenly. A rank alone makes the serial steps.
    """
    if len(lengths) == 1:
        return Batching(batch_size).sizes(lengths[0])[np.newaxis]
    size = max(lengths) if batch_size == -1 else batch_size
    n_steps = -(-max(lengths) // size)
    return np.stack([_local_sizes(n, size, n_steps) for n in lengths])


def _local_sizes(n_rows: int, batch_size: int, n_steps: int) -> np.ndarray:
    if batch_size == 1:
        return (np.arange(n_steps) < n_rows).astype(np.intp)
    serial = Batching(batch_size).sizes(n_rows)
    if len(serial) == n_steps and serial[-1] != 1:
        return serial
    return spread([n_rows], n_steps)[0]


def spread(lengths: Sequence[int], n_steps: int, least: int = 2) -> np.ndarray:
    """(world_size, n_steps): cut every shard evenly, so that the steps differ by at most a row.

    A shard of few rows takes part in fewer steps, with ``least`` rows each or one more.
    """
    sizes = np.zeros((len(lengths), n_steps), dtype=np.intp)
    start = 0  # what not every step gets goes round, so that no step gets it from every rank
    for rank, n_rows in enumerate(lengths):
        taken = min(n_steps, max(1, n_rows // least))
        base, extra = divmod(n_rows, taken)
        steps = (start + np.arange(taken)) % n_steps
        sizes[rank, steps] = base
        sizes[rank, steps[:extra]] += 1
        start = (start + (extra if taken == n_steps else taken)) % n_steps
    return sizes


def contiguous(n_rows: int, world_size: int) -> np.ndarray:
    """(world_size + 1,) where each rank's block of rows begins and ends."""
    return np.linspace(0, n_rows, world_size + 1).round().astype(np.intp)


def epoch_order(
    seed: int, epoch: int, rank: int, n_rows: int, shuffle: bool, layout: Layout | None = None
) -> np.ndarray:
    """The order in which a rank goes through its rows in one epoch.

    Rows that lie in blocks are shuffled so that each block is read once: the blocks, and then the rows
    within every window of blocks.
    """
    if not shuffle:
        return np.arange(n_rows)
    rng = np.random.default_rng((seed, epoch, rank))
    if layout is None:
        return rng.permutation(n_rows)
    held = [np.arange(start, stop) for start, stop in pairwise(layout.bounds)]
    blocks = rng.permutation(len(held))
    windows = [blocks[first : first + layout.window] for first in range(0, len(blocks), layout.window)]
    return np.concatenate([rng.permutation(np.concatenate([held[b] for b in w])) for w in windows])


def pieces(rows: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    """Cut rows into pieces of the given sizes."""
    return np.split(rows, np.cumsum(sizes))[:-1]


def step_rows(plan: Plan, seed: int, epoch: int, shuffle: bool) -> list[np.ndarray]:
    """The rows that all ranks together use in every step of an epoch, in rank order."""
    by_rank = [
        pieces(rows[epoch_order(seed, epoch, rank, len(rows), shuffle, plan.layout(rank))], sizes)
        for rank, (rows, sizes) in enumerate(zip(plan.rows, plan.sizes, strict=True))
    ]
    return [np.concatenate(parts) for parts in zip(*by_rank, strict=True)]


@dataclass(frozen=True)
class Cut:
    """Who gets which rows: the plan of the training steps and the owners of validation batches."""

    training: Plan
    validation: list[tuple[int, np.ndarray]]
    """Every validation batch in the order of replay: its rank and its rows of the validation data."""

    @property
    def world_size(self) -> int:
        """How many ranks hold rows."""
        return len(self.training.rows)

    def validation_of(self, rank: int) -> list[np.ndarray]:
        """The rows of every validation batch of one rank."""
        return [rows for owner, rows in self.validation if owner == rank]


def deal_validation(n_rows: int, batching: Batching, world_size: int) -> list[tuple[int, np.ndarray]]:
    """Deal the serial validation batches whole: cut, a class-weighted loss would be another."""
    batches = pieces(np.arange(n_rows), batching.sizes(n_rows))
    return [(number % world_size, rows) for number, rows in enumerate(batches)]


def cut_blocks(
    train_rows: np.ndarray,
    valid_rows: np.ndarray,
    batching: Batching,
    valid: Batching,
    bounds: np.ndarray,
    local: bool,
) -> Cut:
    """Cut data that has to stay in contiguous blocks of rows, as a dask array's.

    Parameters
    ----------
    train_rows, valid_rows : ndarray of int
        Rows of the whole data, ascending, that train and that validate.
    batching, valid : Batching
    bounds : ndarray of int, (world_size + 1,)
        Where each rank's block begins and ends.
    local : bool
        Whether steps are local to a rank.
    """
    n_used = int(batching.sizes(len(train_rows)).sum())
    ends = np.searchsorted(train_rows[:n_used], bounds)
    rows = [np.arange(start, end) for start, end in pairwise(ends)]
    lengths = [len(held) for held in rows]
    batches = batching.sizes(n_used)
    if local:
        sizes = local_steps(lengths, batching.batch_size)
    elif len(lengths) == 1:  # one rank makes the serial steps
        sizes = batches[np.newaxis]
    else:
        sizes = spread(lengths, len(batches), least=1 if batching.batch_size == 1 else 2)
    ends = np.searchsorted(valid_rows, bounds)
    validation = [
        (rank, piece)
        for rank, (start, end) in enumerate(pairwise(ends))
        for piece in pieces(np.arange(start, end), valid.sizes(end - start))
    ]
    return Cut(Plan(rows, sizes), validation)
