"""A rank's batches: the user's own dataset and iterator over the rank's rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet
from skorch.dataset import Dataset as SkorchDataset
from torch.utils.data import DataLoader, Dataset

from daskps._partitions import Batching, Shard, pieces
from daskps._weights import WeightedRows

# What the plan of steps decides, so that it must not reach the rank's iterator.
PLANNED = ("batch_size", "shuffle", "drop_last")


def batching(net: NeuralNet, training: bool) -> Batching:
    """Which rows make up a batch, from the net's iterator options."""
    options = net.get_params_for("iterator_train" if training else "iterator_valid")
    return Batching(
        batch_size=options.get("batch_size", net.batch_size),
        shuffle=bool(options.get("shuffle", False)) and training,
        drop_last=bool(options.get("drop_last", False)),
    )


def check_options(net: NeuralNet) -> None:
    """Make both iterators, over nothing, and refuse options that they do not know.

    Raises
    ------
    TypeError, ValueError
        If an option is unknown, or the batch size is none.
    """
    for name in ("iterator_train", "iterator_valid"):
        size = batching(net, name == "iterator_train").batch_size
        if not isinstance(size, Integral) or (size < 1 and size != -1):
            raise ValueError(f"batch_size must be an integer >= 1 or, for all rows, -1, got {size!r}.")
        try:
            _iterator(net, name, [], [])
        except TypeError as error:
            raise TypeError(f"{name} does not take the options of the net: {error}") from error


class ItemDataset(Dataset):
    """A user's map-style dataset of (X, y) with the encoded labels in place of its own."""

    def __init__(self, items: Any, y: np.ndarray) -> None:
        self.X = items
        self.y = y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: Any) -> tuple:
        return self.X[index][0], self.y[index]


def train_batches(net: NeuralNet, shard: Shard, rows: Sequence[np.ndarray]) -> Iterable:
    """The rank's training batches: one for every piece of rows that is not empty."""
    if shard.weights is None and _is_sliced(net, "iterator_train", shard.X, shard.y):
        return Slices(shard.X, shard.y, rows)
    dataset = _dataset(net, shard.X, shard.y)
    if shard.weights is not None:
        dataset = WeightedRows(dataset, shard.weights)
    return _iterator(net, "iterator_train", dataset, rows)


def validation_batches(net: NeuralNet, shard: Shard) -> Iterable:
    """The rank's validation batches, each as the serial iterator makes it."""
    if not len(shard.valid_sizes):
        return ()
    rows = pieces(np.arange(shard.valid_sizes.sum()), shard.valid_sizes)
    if _is_sliced(net, "iterator_valid", shard.X_valid, shard.y_valid):
        return Slices(shard.X_valid, np.asarray(shard.y_valid), rows)
    dataset = _dataset(net, shard.X_valid, shard.y_valid)
    return _iterator(net, "iterator_valid", dataset, rows)


class Slices:
    """Batches taken out of arrays at once: what skorch's own dataset and iterator collate row by row."""

    def __init__(self, X: np.ndarray, y: np.ndarray, rows: Sequence[np.ndarray]) -> None:
        self._X = X
        self._y = y
        self._rows = rows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for piece in self._rows:
            if len(piece):
                yield torch.from_numpy(self._X[piece]), torch.from_numpy(self._y[piece])


def _is_sliced(net: NeuralNet, name: str, X: Any, y: Any) -> bool:
    """Whether nobody but skorch has a say in how rows become a batch."""
    options = net.get_params_for(name).keys() - PLANNED or net.get_params_for("dataset")
    own = net.dataset is SkorchDataset and type(net).get_dataset is NeuralNet.get_dataset
    arrays = all(isinstance(part, np.ndarray) and part.dtype.kind in "fiub" for part in (X, y))
    return getattr(net, name) is DataLoader and own and arrays and not options


def takes_rows_as_they_are(net: NeuralNet, training: bool) -> bool:
    """Whether dataset and iterator are skorch's own, so that a batch is a slice of the arrays."""
    name = "iterator_train" if training else "iterator_valid"
    own = getattr(net, name) is not DataLoader or net.dataset is not SkorchDataset
    return not own and "collate_fn" not in net.get_params_for(name)


def batch_of(net: NeuralNet, dataset: Any, rows: np.ndarray, training: bool) -> tuple:
    """The batch that the net's iterator makes of some rows."""
    return next(iter(_iterator(net, "iterator_train" if training else "iterator_valid", dataset, [rows])))


def check_dataset(net: NeuralNet, X: np.ndarray, y: np.ndarray) -> None:
    """Refuse a dataset that changes rows when it is made: every rank would do so again, with its rows.

    Raises
    ------
    TypeError
        If it does, with these rows.
    """
    dataset = net.get_dataset(X, y)
    held = getattr(dataset, "X", X), getattr(dataset, "y", y)
    if not all(np.allclose(np.asarray(a), b, equal_nan=True) for a, b in zip(held, (X, y), strict=True)):
        raise TypeError(
            f"The dataset {type(dataset).__name__} changes X or y when it is made, and every worker makes"
            " one of its own rows: change them in its transform or __getitem__."
        )


def _dataset(net: NeuralNet, X: Any, y: Any) -> Any:
    return ItemDataset(X, y) if isinstance(X, Dataset) else net.get_dataset(X, y)


def _iterator(net: NeuralNet, name: str, dataset: Any, rows: Sequence[np.ndarray]) -> Iterable:
    options = net.get_params_for(name)
    options = {key: value for key, value in options.items() if key not in PLANNED}
    batches = [piece.tolist() for piece in rows if len(piece)]
    return getattr(net, name)(dataset, batch_sampler=batches, **options)
