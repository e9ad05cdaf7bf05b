"""The built-in network: a small CNN, sized from the data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn

from daskps._late import Late

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

__all__ = ["CNN", "default_net", "input_statistics"]

# Upper limits of what the first dense layer sees, so that its weights stay few for large inputs.
MAX_POSITIONS_2D = 8  # per side
MAX_POSITIONS_1D = 256

CHUNK_VALUES = 2**20  # 8 MiB of float64


class CNN(nn.Module):
    """A small convolutional network that returns logits.

    Images pass two convolutions with pooling and a dense layer, with dropout. Rows of features
    pass one one-dimensional convolution and a dense layer, without dropout. No row has an
    influence on another one's output.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input: ``(channels, height, width)``, ``(height, width)`` or
        ``(features,)``.
    n_classes : int
        Number of outputs.
    dropout : float, default=0.25
        Probability with which a value is dropped in training. Without effect on features.
    mean, std : float or array that broadcasts against one input, default=0.0 and 1.0
        The input is standardised to ``(x - mean) / std``. A `std` of 0 counts as 1. Both become
        buffers of the module.
    width : int, default=32
        Channels of the first convolution. The second has twice as many, the dense layer four
        times as many.
    dtype : torch.dtype, default=torch.float32
        Floating-point type of the parameters. An input of another type is cast to it.

    Raises
    ------
    ValueError
        `input_shape` has not one to three sides, or an empty one.
    """

    mean: torch.Tensor
    std: torch.Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        n_classes: int,
        *,
        dropout: float = 0.25,
        mean: ArrayLike = 0.0,
        std: ArrayLike = 1.0,
        width: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_input_shape(input_shape)
        if len(input_shape) == 1:
            self.layers = _feature_layers(input_shape[0], n_classes, width)
        else:
            self.layers = _image_layers(input_shape, n_classes, width, dropout)
        self.register_buffer("mean", _constant(mean))
        self.register_buffer("std", _constant(std))
        self.to(dtype)
        # After the cast: a small std may only have become 0 by it.
        self.std[self.std == 0] = 1
        self.has_channel_axis = len(input_shape) == 3

    def forward(self, X: torch.Tensor) -> torch.Tensor:
        """Return the logits.

        Parameters
        ----------
        X : tensor of shape (n, *input_shape), any real dtype
            The inputs.

        Returns
        -------
        tensor of shape (n, n_classes), the module's dtype
        """
        X = (X.to(self.mean.dtype) - self.mean) / self.std
        logits: torch.Tensor = self.layers(X if self.has_channel_axis else X.unsqueeze(1))
        return logits


def default_net(
    input_shape: Sequence[int],
    n_classes: int,
    *,
    dtype: torch.dtype,
    mean: ArrayLike,
    std: ArrayLike,
) -> NeuralNetClassifier:
    """Make the skorch net that is used where the user gives none.

    Parameters
    ----------
    input_shape : sequence of int
        The shape of one input, ``X.shape[1:]``: ``(channels, height, width)``,
        ``(height, width)`` or ``(features,)``.
    n_classes : int
        Number of classes.
    dtype : torch.dtype
        What the net computes in, float32 or float64.
    mean, std : float or array
        What :func:`input_statistics` returns for X.

    Returns
    -------
    skorch.NeuralNetClassifier
        Not initialized. It takes X as it is, and y as integers 0 to n_classes - 1 (int64).
    """
    return NeuralNetClassifier(
        CNN,
        module__input_shape=tuple(input_shape),
        module__n_classes=n_classes,
        module__mean=mean,
        module__std=std,
        module__dtype=dtype,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        lr=_learning_rate(input_shape),
        batch_size=128,
        max_epochs=10,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
    )


def input_statistics(X: Any, sample_weight: Any = None) -> tuple[Any, Any]:
    """Return mean and standard deviation of X, to standardise the input of :class:`CNN`.

    Parameters
    ----------
    X : ndarray, torch tensor or dask array of shape (n, features), (n, h, w) or (n, c, h, w)
        The training rows, of any real dtype. A dask array is reduced where its chunks are, in
        one pass.
    sample_weight : array of shape (n,), optional
        A row with the weight 2 counts like two equal rows, a row with the weight 0 not at all.
        For a dask array X whose chunk sizes are unknown, a dask array chunked like X.

    Returns
    -------
    mean, std : float64 arrays of shape (features,), or floats if X holds images
        Features one by one, images over all pixels and channels. A std of 0 is replaced by 1.

    Raises
    ------
    ValueError
        There is no row, or every weight is 0; or the chunks of `sample_weight` do not fit.
    """
    moments = (_dask_moments if hasattr(X, "dask") else _moments)(X, sample_weight)
    if moments.weight == 0:
        raise ValueError("X has no row with a sample weight other than 0")
    std = np.sqrt(moments.squares / moments.weight)
    std[std == 0] = 1
    if X.ndim > 2:
        return float(moments.mean[0]), float(std[0])
    return moments.mean, std


# --- the layers ---


def _check_input_shape(input_shape: Sequence[int]) -> None:
    if not 1 <= len(input_shape) <= 3 or min(input_shape) < 1:
        raise ValueError(
            "input_shape must be (channels, height, width), (height, width) or (features,), "
            f"all at least 1, got {tuple(input_shape)}"
        )


def _image_layers(input_shape: Sequence[int], n_classes: int, width: int, dropout: float) -> nn.Sequential:
    *channels, height, width_in = input_shape
    sides = [_ceil_div(side, 2) for side in (height, width_in)]
    pool = tuple(max(2, _ceil_div(side, MAX_POSITIONS_2D)) for side in sides)
    positions = math.prod(_ceil_div(side, step) for side, step in zip(sides, pool, strict=True))
    return nn.Sequential(
        nn.Conv2d(channels[0] if channels else 1, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(pool, ceil_mode=True),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * positions, 4 * width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, n_classes),
    )


def _feature_layers(features: int, n_classes: int, width: int) -> nn.Sequential:
    stride = _ceil_div(features, MAX_POSITIONS_1D)
    positions = _ceil_div(features, stride)
    return nn.Sequential(
        nn.Conv1d(1, width, 2 * stride + 1, stride=stride, padding=stride),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * positions, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, n_classes),
    )


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _constant(value: ArrayLike) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64).detach().clone()


# --- the settings ---


def _learning_rate(input_shape: Sequence[int]) -> float:
    """Adam moves every weight by about lr, so a unit with many inputs moves further."""
    return min(0.01, 0.08 / math.sqrt(math.prod(input_shape)))


# --- the statistics ---


class _Moments(NamedTuple):
    """Sum of the weights, weighted mean, and weighted sum of squared differences from it."""

    weight: float
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]


def _dask_moments(X: Any, sample_weight: Any) -> _Moments:
    import dask

    X = X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
    blocks = X.to_delayed().ravel()
    weights = _weight_blocks(X, sample_weight)
    moments_of = dask.delayed(Late(__name__, "_moments"))
    merged = dask.delayed(Late(__name__, "_merge_all"))
    parts = [moments_of(*pair) for pair in zip(blocks, weights, strict=True)]
    while len(parts) > 1:
        parts = [merged(parts[i : i + 16]) for i in range(0, len(parts), 16)]
    moments: _Moments = parts[0].compute()
    return moments


def _weight_blocks(X: Any, sample_weight: Any) -> Sequence[Any]:
    import dask.array as da

    rows = X.chunks[0]
    if sample_weight is None:
        return [None] * len(rows)
    weights = da.asarray(sample_weight)
    if not np.isnan([*rows, *weights.chunks[0]]).any():
        weights = weights.rechunk((rows,))
    if weights.numblocks != (len(rows),):
        raise ValueError(
            f"the chunk sizes of X or sample_weight are unknown, and sample_weight has "
            f"{weights.numblocks[0]} chunks, X has {len(rows)}: chunk sample_weight like X"
        )
    blocks: Sequence[Any] = weights.to_delayed().ravel()
    return blocks


def _moments(X: Any, sample_weight: Any) -> _Moments:
    return reduce(_merge, _chunk_moments(X, sample_weight))


def _merge_all(parts: Sequence[_Moments]) -> _Moments:
    return reduce(_merge, parts)


def _merge(a: _Moments, b: _Moments) -> _Moments:
    weight = a.weight + b.weight
    share = b.weight / weight if weight else 0.0
    difference = b.mean - a.mean
    squares = a.squares + b.squares + a.weight * share * difference**2
    return _Moments(weight, a.mean + share * difference, squares)


def _chunk_moments(X: Any, sample_weight: Any) -> Iterator[_Moments]:
    """Cut X into chunks of rows, so that never the whole of it stands in memory as float64."""
    weights = np.ones(len(X)) if sample_weight is None else np.asarray(sample_weight, np.float64)
    if weights.shape != (len(X),):
        raise ValueError(f"sample_weight has the shape {weights.shape}, expected ({len(X)},)")
    step = max(1, CHUNK_VALUES // max(1, math.prod(X.shape[1:])))
    for start in range(0, max(1, len(X)), step):
        rows = slice(start, start + step)
        yield _weighted_moments(np.asarray(X[rows], np.float64), weights[rows])


def _weighted_moments(X: NDArray[np.float64], weights: NDArray[np.float64]) -> _Moments:
    X, weights = X[weights != 0], weights[weights != 0]
    if X.ndim > 2:
        weights = np.repeat(weights, math.prod(X.shape[1:]))
        X = X.reshape(-1, 1)
    if not len(X):
        return _Moments(0.0, np.zeros(X.shape[1]), np.zeros(X.shape[1]))
    # Measured from the first row, a constant feature has a deviation of exactly 0.
    origin, weight = X[0], weights.sum()
    X = X - origin
    mean = weights @ X / weight
    return _Moments(float(weight), origin + mean, weights @ (X - mean) ** 2)
