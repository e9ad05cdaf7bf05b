"""Where the rows come from: arrays on the client or a dask array on the cluster."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from dask import delayed
from distributed import Client, Future
from skorch import NeuralNet
from skorch.utils import multi_indexing
from torch.utils.data import Dataset, Subset, default_collate

from daskps import _folds, _loading
from daskps._blocks import Blocks
from daskps._inputs import TrainingData, encode
from daskps._late import Late
from daskps._loading import ItemDataset
from daskps._partitions import (
    Cut,
    Layout,
    Shard,
    contiguous,
    cut_blocks,
    deal_validation,
    plan_batches,
    plan_local,
)

# What of a worker's memory limit a rank's stretch of a dask array may take to be put together to one
# array, which for a moment takes three times that.
_TOGETHER = 0.2

# Bytes of the blocks among which rows are shuffled, and which a rank that reads them keeps at hand.
_WINDOW = 2**26


class Source(Protocol):
    """Training and validation rows that can be cut and brought to workers."""

    dataset_train: Any
    dataset_valid: Any

    def cut(self, net: NeuralNet, world_size: int, local: bool, seed: int) -> Cut:
        """Decide who gets which rows."""

    def place(self, client: Client, cut: Cut, addresses: Sequence[str]) -> list[Future]:
        """Bring one shard to every address; what these refer to comes after them."""

    def batch(self, rows: np.ndarray, training: bool) -> LazyBatch:
        """The rows of one batch, as callbacks on the client see them."""


class LazyBatch(Sequence):
    """A batch (X, y) that is gathered when a callback looks at it; most never do."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._parts: tuple | None = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        if self._parts is None:
            self._parts = self._make()
        return self._parts[index]

    def __iter__(self) -> Iterator:
        return iter(self[:])


class ArraySource:
    """Rows in the client's memory.

    Parameters
    ----------
    net : NeuralNet
        Its ``get_split_datasets`` decides, once, which rows train and which validate.
    X : array of shape (n_samples, ...)
        In the place of ``data.X``.
    data : TrainingData
    """

    def __init__(self, net: NeuralNet, X: Any, data: TrainingData) -> None:
        given = ItemDataset(X, data.y) if isinstance(X, Dataset) else X
        self.dataset_train, self.dataset_valid = net.get_split_datasets(given, data.y)
        self._net = net
        self._weights = data.weights
        self._parts = {True: _unrolled(self.dataset_train)}
        own_rows = self._parts[True][1] is not data.y
        if own_rows and data.weights is not None:
            raise ValueError("weights are not possible with a train_split that makes rows of its own")
        if self.dataset_valid is not None:
            X_valid, y_valid, rows = _unrolled(self.dataset_valid)
            if not own_rows and y_valid is not data.y:  # a validation set that the user brought along
                _refuse_another_kind(self.dataset_valid, self.dataset_train)
                y_valid = encode(y_valid, data.classes).astype(data.y.dtype)
                encoded = net.get_dataset(X_valid, y_valid)
                self.dataset_valid = encoded if rows is None else Subset(encoded, rows.tolist())
            self._parts[False] = X_valid, y_valid, rows

    def cut(self, net: NeuralNet, world_size: int, local: bool, seed: int) -> Cut:
        planned = plan_local if local else plan_batches
        n_train = len(self.dataset_train)
        training = planned(n_train, _loading.batching(net, True), world_size, seed)
        n_valid = 0 if self.dataset_valid is None else len(self.dataset_valid)
        valid = deal_validation(n_valid, _loading.batching(net, False), world_size)
        return Cut(training, valid)

    def place(self, client: Client, cut: Cut, addresses: Sequence[str]) -> list[Future]:
        shards = [self._shard(cut, rank) for rank in range(len(addresses))]
        owners = _folds.current_fold()
        if not owners:
            return scatter(client, "shard", shards, addresses)
        return _scatter_once(client, shards, addresses, owners)

    def batch(self, rows: np.ndarray, training: bool) -> LazyBatch:
        def make() -> tuple:
            if not _loading.takes_rows_as_they_are(self._net, training):
                dataset = self.dataset_train if training else self.dataset_valid
                return _loading.batch_of(self._net, dataset, rows, training)
            X, y = self._take(rows, training)
            return _tensors(X), _tensors(y)

        return LazyBatch(make)

    def _shard(self, cut: Cut, rank: int) -> Shard:
        X, y = self._take(cut.training.rows[rank], True)
        batches = cut.validation_of(rank)
        X_valid, y_valid = self._take(np.concatenate(batches), False) if batches else (None, None)
        weights = self._weights_of(cut.training.rows[rank])
        return Shard(X, y, cut.training.sizes[rank], X_valid, y_valid, _lengths(batches), weights)

    def _weights_of(self, rows: np.ndarray) -> np.ndarray | None:
        if self._weights is None:
            return None
        held = self._parts[True][2]
        return self._weights[rows if held is None else held[rows]]

    def _take(self, rows: np.ndarray, training: bool) -> tuple[Any, np.ndarray]:
        X, y, held = self._parts[training]
        if held is not None:
            rows = held[rows]
        if len(rows) == len(y) and np.array_equal(rows, np.arange(len(y))):
            return X, y
        if isinstance(X, Dataset):
            return Subset(X, rows.tolist()), y[rows]
        return multi_indexing(X, rows), y[rows]


class DaskSource:
    """Rows in a dask array: its blocks go from worker to worker, never through the client.

    Parameters
    ----------
    net : NeuralNet
    data : TrainingData
        X is chunked along the first axis only, with known chunk sizes. Of y the client holds one
        integer a row.
    """

    def __init__(self, net: NeuralNet, data: TrainingData) -> None:
        self._X = data.X
        self._y = y = data.y
        self._weights = data.weights
        # The split sees row numbers in place of rows.
        self.dataset_train, self.dataset_valid = net.get_split_datasets(np.arange(len(y)), y)
        self._rows = {True: np.sort(_row_numbers(self.dataset_train, len(y)))}
        self._rows[False] = np.sort(_row_numbers(self.dataset_valid, len(y)))

    def cut(self, net: NeuralNet, world_size: int, local: bool, seed: int) -> Cut:
        train = self._rows[True]
        # Equal in training rows: a split may take all of a block for validation.
        inner = train[contiguous(len(train), world_size)[1:-1]]
        self._bounds = np.array([0, *inner, len(self._y)])
        batchings = _loading.batching(net, True), _loading.batching(net, False)
        cut = cut_blocks(train, self._rows[False], *batchings, self._bounds, local)
        self._window = self._blocks_at_hand(batchings[0].shuffle)
        layouts = [self._layout(rank, rows) for rank, rows in enumerate(cut.training.rows)]
        return replace(cut, training=replace(cut.training, layouts=layouts))

    def place(self, client: Client, cut: Cut, addresses: Sequence[str]) -> list[Future]:
        limits = _memory_limits(client)
        placed = [
            self._place_one(client, cut, rank, (address, limits.get(address, np.inf)))
            for rank, address in enumerate(addresses)
        ]
        return [shard for shard, _ in placed] + [block for _, blocks in placed for block in blocks]

    def batch(self, rows: np.ndarray, training: bool) -> LazyBatch:
        return LazyBatch(lambda: (None, torch.as_tensor(self._y[self._rows[training][rows]])))

    def _stretch(self, rank: int) -> Any:
        return self._X[self._bounds[rank] : self._bounds[rank + 1]]

    def _layout(self, rank: int, rows: np.ndarray) -> Layout:
        """How a rank's training rows lie in blocks. It hangs on the data alone, and so do a fit's bits."""
        bounds = self._bounds[rank] + _bounds(self._stretch(rank))
        return Layout(np.searchsorted(self._rows[True][rows], bounds), self._window)

    def _blocks_at_hand(self, shuffle: bool) -> int:
        if not shuffle:
            return 1
        largest = max(self._X.chunks[0]) * math.prod(self._X.shape[1:]) * self._X.dtype.itemsize
        return max(2, _WINDOW // max(1, largest))

    def _place_one(
        self, client: Client, cut: Cut, rank: int, worker: tuple[str, float]
    ) -> tuple[Future, list[Future]]:
        """A rank's shard, and the blocks that it names."""
        address, limit = worker
        start, stretch = self._bounds[rank], self._stretch(rank)
        batches = cut.validation_of(rank)
        train = self._rows[True][cut.training.rows[rank]]
        valid = self._rows[False][np.concatenate(batches)] if batches else np.empty(0, np.intp)
        X: tuple = (train - start, valid - start)
        kept: list[Future] = []
        if stretch.nbytes <= _TOGETHER * limit:
            task, needed = "assemble", _compute(client, stretch.to_delayed().ravel().tolist(), address)
        else:
            task, (kept, needed) = "in_blocks", _keep_blocks(client, stretch, address)
            X = tuple(_rows_in_blocks(kept, stretch, self._window, rows) for rows in X)
        weights = None if self._weights is None else self._weights[train]
        # Too large for a graph.
        sent = scatter(client, "rows", (X, (self._y[train], self._y[valid]), weights), [address] * 3)
        shard = client.submit(
            Late(__name__, task),
            needed,
            *sent[:2],
            (cut.training.sizes[rank], _lengths(batches)),
            sent[2],
            cut.training.layout(rank),
            workers=[address],
            pure=False,
            key=f"daskps-shard-{uuid.uuid4().hex}",
        )
        return shard, kept


def _bounds(array: Any) -> np.ndarray:
    """Where each block of a dask array begins, and the last one ends."""
    return np.cumsum([0, *array.chunks[0]])


def _memory_limits(client: Client) -> dict[str, float]:
    # Not its scheduler_info: the client itself overwrites that with one of no workers every now and then.
    scheduler: Any = client.scheduler
    workers = client.sync(scheduler.identity, n_workers=-1)["workers"]
    return {address: worker["memory_limit"] or np.inf for address, worker in workers.items()}


def _compute(client: Client, values: list, address: str) -> list[Future]:
    return client.compute(values, workers=[address])


def _keep_blocks(client: Client, stretch: Any, address: str) -> tuple[list[Future], list[Future]]:
    """Compute blocks on the worker where they stay; what a shard can wait for without having them all."""
    name = f"daskps-block-{uuid.uuid4().hex}"
    blocks = [
        delayed(Late(__name__, "checked"))(block, dask_key_name=f"{name}-{number}")
        for number, block in enumerate(stretch.to_delayed().ravel())
    ]
    counts = [delayed(len)(block, dask_key_name=f"{block.key}-rows") for block in blocks]
    futures = _compute(client, [*blocks, *counts], address)  # in one graph, so that each is counted at once
    return futures[: len(blocks)], futures[len(blocks) :]


def _rows_in_blocks(kept: list[Future], stretch: Any, window: int, rows: np.ndarray) -> Blocks:
    like = np.empty((0, *stretch.shape[1:]), stretch.dtype)
    return Blocks([str(block.key) for block in kept], _bounds(stretch), window, rows, like)


def checked(block: Any) -> np.ndarray:
    """A block, if all of its values are finite."""
    X = np.asarray(block)
    if X.dtype.kind == "f" and not np.isfinite(X).all():
        raise ValueError("X contains NaN or infinity: every value has to be finite.")
    return X


def assemble(
    blocks: list[np.ndarray],
    rows: tuple[np.ndarray, np.ndarray],
    labels: tuple[np.ndarray, np.ndarray],
    sizes: tuple[np.ndarray, np.ndarray],
    weights: np.ndarray | None,
    layout: Layout | None = None,
) -> Shard:
    """Make a rank's shard out of its blocks, on its worker."""
    X = checked(np.concatenate([np.asarray(block) for block in blocks]))
    return in_blocks([], (X[rows[0]], X[rows[1]]), labels, sizes, weights, layout)


def in_blocks(
    counts: list[int],
    X: tuple[Any, Any],
    labels: tuple[np.ndarray, np.ndarray],
    sizes: tuple[np.ndarray, np.ndarray],
    weights: np.ndarray | None,
    layout: Layout | None = None,
) -> Shard:
    """A rank's shard whose blocks are on its worker, as their counts tell."""
    return Shard(X[0], labels[0], sizes[0], X[1], labels[1], sizes[1], weights, layout)


def scatter(client: Client, name: str, values: Sequence[Any], addresses: Sequence[str]) -> list[Future]:
    """Send one value to each address, side by side, under keys that nobody else has."""

    async def send_all() -> list[Future]:
        keys = [f"daskps-{name}-{uuid.uuid4().hex}" for _ in values]
        # One after the other would take as long as all together.
        sending = [
            asyncio.ensure_future(
                client.scatter({key: value}, workers=[address], hash=False, asynchronous=True)
            )
            for key, value, address in zip(keys, values, addresses, strict=True)
        ]
        together = asyncio.gather(*sending)
        try:
            # A scatter that is cancelled half-way leaves its keys in the cluster: Dask keeps them for the
            # client, which has no futures to let go of.
            arrived = await asyncio.shield(together)
        except BaseException:
            together.add_done_callback(_look_at)  # asyncio prints errors that nobody has looked at
            for task in sending:
                task.add_done_callback(_let_go)
            raise
        return [futures[key] for key, futures in zip(keys, arrived, strict=True)]

    return client.sync(send_all)


def _look_at(future: asyncio.Future) -> None:
    if not future.cancelled():
        future.exception()


def _let_go(sending: asyncio.Task) -> None:
    """Release what has arrived, of which the error's traceback may keep futures."""
    if not sending.cancelled() and sending.exception() is None:
        for future in sending.result().values():
            future.release()


def _scatter_once(
    client: Client, shards: Sequence[Shard], addresses: Sequence[str], owners: list[Any]
) -> list[Future]:
    """Send what no other candidate of the search has sent."""
    keys = [_folds.key_of(client, *pair) for pair in zip(addresses, shards, strict=True)]
    futures = [_folds.find(key) for key in keys]
    missing = [rank for rank, future in enumerate(futures) if future is None]
    sent = scatter(client, "shard", [shards[r] for r in missing], [addresses[r] for r in missing])
    for rank, future in zip(missing, sent, strict=True):
        futures[rank] = future
        _folds.keep(keys[rank], future, owners)
    return [future for future in futures if future is not None]


def _refuse_another_kind(valid: Any, train: Any) -> None:
    """Refuse a validation set of another class: ranks make theirs with the net's own."""
    kind, own = (type(_base(dataset)) for dataset in (valid, train))
    if kind is not own:
        raise TypeError(
            f"train_split gives a validation set of {kind.__name__}, the net's dataset is {own.__name__}:"
            f" make the validation set with {own.__name__}, or give the net dataset={kind.__name__}."
        )


def _base(dataset: Any) -> Any:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _unrolled(dataset: Any) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """The X and y under a dataset and its subsets, and which of their rows it shows."""
    rows: np.ndarray | None = None
    while isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices)
        rows = indices if rows is None else indices[rows]
        dataset = dataset.dataset
    if not hasattr(dataset, "X") or not hasattr(dataset, "y"):
        raise TypeError(
            f"The net's dataset is a {type(dataset).__name__} without the attributes X and y: rows"
            " cannot be dealt to workers. Use a subclass of skorch.dataset.Dataset."
        )
    return dataset.X, dataset.y if isinstance(dataset.y, np.ndarray) else np.asarray(dataset.y), rows


def _row_numbers(dataset: Any, n_rows: int) -> np.ndarray:
    if dataset is None:
        return np.empty(0, np.intp)
    numbers, y, rows = _unrolled(dataset)
    if len(y) != n_rows:
        raise ValueError("train_split returned rows of its own: not possible with a dask array.")
    return np.asarray(numbers) if rows is None else np.asarray(numbers)[rows]


def _lengths(batches: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([len(rows) for rows in batches], dtype=np.intp)


def _tensors(values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _tensors(value) for key, value in values.items()}
    if isinstance(values, Subset):
        return default_collate([values[row][0] for row in range(len(values))])
    return torch.as_tensor(np.asarray(values))
