"""What the commands train: data by name, and a net that fits it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch import nn

from daskps import datasets
from daskps._emulation import Waiting
from daskps._standin import StandIn
from daskps.modules import CNN

DATA = ("digits", "fashion-mnist", "synthetic")

_SYNTHETIC_ROWS = 10_000
_SYNTHETIC_TEST_ROWS = 2_000


class Split(NamedTuple):
    """Images and classes, to train with and to test with."""

    X_train: np.ndarray
    X_test: np.ndarray
    y_train: np.ndarray
    y_test: np.ndarray
    lr: float
    """The learning rate that suits them, with any number of rows: how fast a net computes depends on it."""


def load(data: str, n_rows: int | None = None) -> Split:
    """The data set of that name, with at most so many training rows.

    All images are as large as those of Fashion-MNIST: digits of 8x8 pixels would leave nothing to compute.
    There are as many synthetic ones as are asked for.

    Raises
    ------
    FileNotFoundError
        If its files are not on this machine.
    """
    if data == "synthetic":
        return _synthetic(n_rows or _SYNTHETIC_ROWS)
    loaded = _digits() if data == "digits" else Split(*datasets.load_fashion_mnist(), lr=0.01)
    return loaded._replace(X_train=loaded.X_train[:n_rows], y_train=loaded.y_train[:n_rows])


def _digits() -> Split:
    X_train, X_test, y_train, y_test = datasets.load_digits_images()
    return Split(_enlarged(X_train), _enlarged(X_test), y_train, y_test, lr=0.03)


def _enlarged(X: np.ndarray) -> np.ndarray:
    """From 8x8 pixels to 28x28."""
    return np.pad(X.repeat(3, axis=2).repeat(3, axis=3), ((0, 0), (0, 0), (2, 2), (2, 2)))


def _synthetic(n_rows: int) -> Split:
    """Ten patterns in noise: they can be learned, but not from a few rows."""
    rng = np.random.default_rng(0)
    n_all = n_rows + _SYNTHETIC_TEST_ROWS
    y = rng.integers(0, 10, n_all)
    X = rng.standard_normal((n_all, 1, 28, 28), dtype="float32")
    X += 0.15 * rng.standard_normal((10, 1, 28, 28), dtype="float32")[y]
    return Split(X[:n_rows], X[n_rows:], y[:n_rows], y[n_rows:], lr=0.01)


def new_net(split: Split, batch_size: int, max_epochs: int, **settings: Any) -> NeuralNetClassifier:
    """The built-in CNN with dropout, SGD with momentum; always the same initial weights."""
    settings |= {"module__input_shape": split.X_train.shape[1:]}
    return _training_net(CNN, split, batch_size, max_epochs, **settings)


def stand_in_net(
    split: Split, batch_size: int, max_epochs: int, images_per_row: float
) -> NeuralNetClassifier:
    """A net that computes so many images of noise for each row, and is about as large as the CNN."""
    settings = {"module__n_parameters": _n_parameters(split), "module__images_per_row": images_per_row}
    return _training_net(StandIn, split, batch_size, max_epochs, **settings)


def _training_net(
    module: type[nn.Module], split: Split, batch_size: int, max_epochs: int, **settings: Any
) -> NeuralNetClassifier:
    torch.manual_seed(0)
    return NeuralNetClassifier(
        module,
        module__n_classes=_n_classes(split),
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=split.lr,
        batch_size=batch_size,
        max_epochs=max_epochs,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
        **settings,
    )


def waiting_net(
    split: Split, batch_size: int, max_epochs: int, c0: float, c1: float
) -> NeuralNetClassifier:
    """A net that waits for c0 + c1 * rows seconds in each step, with as many parameters as the CNN."""
    return NeuralNetClassifier(
        Waiting,
        module__n_parameters=_n_parameters(split),
        module__n_classes=_n_classes(split),
        module__c0=c0,
        module__c1=c1,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        batch_size=batch_size,
        max_epochs=max_epochs,
        train_split=None,
        verbose=0,
    )


def _n_parameters(split: Split) -> int:
    """Of the CNN."""
    cnn = CNN(split.X_train.shape[1:], _n_classes(split))
    return sum(parameter.numel() for parameter in cnn.parameters())


def _n_classes(split: Split) -> int:
    return int(split.y_train.max()) + 1
