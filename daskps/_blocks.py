"""Rows that stay in blocks on their worker, which may spill them: they are read a block at a time.

A task that has blocks among its arguments has all of them in memory at once. So a shard only names them,
and they are taken out of the worker's data when their rows are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from daskps._environment import release_freed
from daskps._partitions import Shard
from daskps.exceptions import DaskpsError


class Blocks(NamedTuple):
    """The X of a shard whose rows are not put together. A tuple, so that Dask sees its size."""

    keys: list[str]
    """Under which the worker holds the blocks."""
    bounds: np.ndarray
    """(n_blocks + 1,) where each block's rows begin, and the last one's end."""
    window: int
    """How many blocks to hold at a time."""
    rows: np.ndarray
    """Which rows of the blocks, one after the other, these are."""
    like: np.ndarray
    """No rows, of the shape and dtype of these."""


@contextmanager
def readable(shard: Shard, data: Mapping[Any, Any]) -> Iterator[Shard]:
    """The shard with rows that can be read out of a worker's data, for the length of the block."""
    if not isinstance(shard.X, Blocks):
        yield shard
        return
    reader = _Reader(shard.X, data)
    try:
        yield shard._replace(X=BlockRows(shard.X, reader), X_valid=BlockRows(shard.X_valid, reader))
    finally:
        reader.close()


class BlockRows:
    """Looks like an array to whoever takes rows, and reads the blocks that these are in."""

    def __init__(self, blocks: Blocks, reader: _Reader) -> None:
        self.shape = (len(blocks.rows), *blocks.like.shape[1:])
        self.ndim = len(self.shape)
        self.dtype = blocks.like.dtype
        self._blocks = blocks
        self._reader = reader

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> np.ndarray:
        if isinstance(index, tuple):
            if index[1:] != (Ellipsis,):
                raise IndexError(f"Of rows in blocks only whole ones can be taken, got the index {index}.")
            index = index[0]
        rows = self._blocks.rows[index]
        return self._gathered(rows) if rows.ndim else self._gathered(rows[np.newaxis])[0]

    def _gathered(self, rows: np.ndarray) -> np.ndarray:
        """A copy: a view would keep the whole block in memory."""
        owners = np.searchsorted(self._blocks.bounds, rows, side="right") - 1
        taken = self._blocks.like
        for number in dict.fromkeys(owners.tolist()):  # as they come: the next window's last
            here, block = owners == number, self._reader.block(number)
            if not len(taken):  # of the block's own dtype, whatever the array says
                taken = np.empty((len(rows), *block.shape[1:]), block.dtype)
            taken[here] = block[rows[here] - self._blocks.bounds[number]]
        return taken


class _Reader:
    """The blocks that were read last, in memory.

    A worker's data may be used by several threads. It would keep a spilled value that it is asked for, and
    spill another for that; so what is on disk is read from there.
    """

    def __init__(self, blocks: Blocks, data: Mapping[Any, Any]) -> None:
        self._keys = blocks.keys
        self._most = blocks.window
        self._data = data
        self._disk: Mapping[Any, Any] = getattr(data, "disk", {})
        self._held: OrderedDict[int, np.ndarray] = OrderedDict()

    def block(self, number: int) -> np.ndarray:
        """One block."""
        if number not in self._held:
            self._drop(self._most - 1)
            self._held[number] = self._read(self._keys[number])
        self._held.move_to_end(number)
        return self._held[number]

    def close(self) -> None:
        """Have none at hand."""
        self._drop(0)

    def _drop(self, most: int) -> None:
        """Have at most so many blocks at hand."""
        while len(self._held) > most:
            self._held.popitem(last=False)
        release_freed()  # or Dask spills, and pauses, for memory that nobody uses

    def _read(self, key: str) -> np.ndarray:
        for held in (self._disk, self._data):
            try:
                return held[key]
            except KeyError:
                continue
        raise DaskpsError(
            f"The block {key} of X is no longer on its worker: something moved or cancelled it, such as"
            " Client.rebalance or Client.restart, while the fit went on."
        )
