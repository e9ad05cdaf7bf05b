"""What the tests compare with: plain skorch on the same data, from the same weights."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

from daskps import DistributedCNNClassifier

MOMENTUM = {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "lr": 0.05}
ADAM = {"optimizer": torch.optim.Adam, "lr": 0.001}
PLAIN_SGD = {"optimizer": torch.optim.SGD, "lr": 0.1}
DOUBLE = {"module__dtype": torch.float64}


def digits(n=1003, dtype=np.float64):
    """The first digits, as images of 1x8x8."""
    X, y = load_digits(return_X_y=True)
    return (X[:n] / 16).reshape(-1, 1, 8, 8).astype(dtype), y[:n].astype(np.int64)


def xy(n, k, seed=0):
    """Random images and labels that follow each other."""
    X = np.random.RandomState(seed).rand(n, 1, 8, 8).astype(np.float32)
    return X, np.arange(n) % k


def numbered(n):
    """Rows that carry their number in the first pixel."""
    X, y = xy(n, 10)
    X[:, 0, 0, 0] = np.arange(n)
    return X, y


def separable(n, k, by=2.0):
    """The same, and every class has a bright row of pixels of its own."""
    X, y = xy(n, k)
    X[np.arange(n), 0, y] += by
    return X, y


def make_net(module, **options):
    """A net with the settings that most tests share."""
    defaults = {
        "criterion": nn.CrossEntropyLoss,
        "max_epochs": 3,
        "batch_size": 32,
        "verbose": 0,
        **({} if "optimizer" in options else MOMENTUM),
    }
    net_class = options.pop("net_class", NeuralNetClassifier)
    return net_class(module, **{**defaults, **options})


def fit_plain(net, X, y, seed=0):
    torch.manual_seed(seed)
    return clone(net).fit(X, y)


def fit_daskps(client, net, X, y, seed=0, **options):
    torch.manual_seed(seed)
    return DistributedCNNClassifier(net, client=client, **options).fit(X, y)


def state(fitted):
    """Parameters and buffers of an estimator, a net or a module."""
    fitted = getattr(fitted, "net_", fitted)
    module = getattr(fitted, "module_", fitted)
    return {
        name: value.detach().to(torch.float64, copy=True) for name, value in module.state_dict().items()
    }


def distance(a, b):
    """The largest difference between two states."""
    a, b = state(a), state(b)
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


def identical(a, b):
    """Whether two states have the same bits."""
    a, b = state(a), state(b)
    return all(torch.equal(a[name], b[name]) for name in a)


def assert_same_history(ours, plain, within):
    """Every epoch has the same keys, losses and accuracies, and as many batches of the same size."""
    ours, plain = getattr(ours, "history_", ours), getattr(plain, "history_", plain)
    assert len(ours) == len(plain)
    for row, expected in zip(ours, plain, strict=True):
        assert row.keys() == expected.keys()
        for key in {"train_loss", "valid_loss", "valid_acc"} & expected.keys():
            np.testing.assert_allclose(row[key], expected[key], rtol=0, atol=within, err_msg=key)
        batches = zip(row["batches"], expected["batches"], strict=True)
        for batch, expected_batch in batches:
            assert batch.keys() == expected_batch.keys()
            for key, value in expected_batch.items():
                np.testing.assert_allclose(batch[key], value, rtol=0, atol=within, err_msg=key)


def rows_reordered(X, y, batch_size, seed=None):
    """The same batches, with the rows inside each in another order: reversed, or shuffled by a seed."""
    rng = np.random.default_rng(seed)
    batches = [np.arange(start, min(start + batch_size, len(y))) for start in range(0, len(y), batch_size)]
    order = np.concatenate([rows[::-1] if seed is None else rng.permutation(rows) for rows in batches])
    return X[order], y[order]
