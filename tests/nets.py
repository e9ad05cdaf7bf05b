"""Modules, nets and criteria that the tests train. Workers import them from here."""

from __future__ import annotations

import json
import os
import sys

import torch
from probes import wait_until
from skorch import NeuralNetClassifier
from torch import nn


class Flat(nn.Module):
    """One linear layer on flattened rows: every number can be recomputed by hand."""

    def __init__(self, n_in, n_out, dtype=torch.float32):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(n_in, n_out)).to(dtype)

    def forward(self, X):
        return self.layers(X)


class CNN3(nn.Module):
    """The module of the cases from the field: 1x8x8 images, logits."""

    def __init__(self, n=10, dtype=torch.float32, dropout=0.0):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(144, n)
        ).to(dtype)

    def forward(self, X):
        return self.layers(X)


class Softmax(CNN3):
    """Probabilities, as NLLLoss in skorch wants them."""

    def forward(self, X):
        return super().forward(X).softmax(dim=1)


class Normed(nn.Module):
    """Batch normalisation between two linear layers."""

    def __init__(self, n_in=64, n_out=10, dtype=torch.float32):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(n_in, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, n_out)
        ).to(dtype)

    def forward(self, X):
        return self.layers(X)


class Logged(CNN3):
    """Writes a line for every training batch: process, threads, scheduling policy and first pixels.

    The first pixel of a row can hold its number, so that a test knows which rows came by.
    """

    def __init__(self, n=10, path=None):
        super().__init__(n)
        self.path = path

    def forward(self, X):
        if self.training:
            rows = X.flatten(1)[:, 0].tolist()
            policy = os.sched_getscheduler(0) if hasattr(os, "sched_getscheduler") else None
            threads = torch.get_num_threads()
            write(self.path, pid=os.getpid(), threads=threads, policy=policy, rows=rows)
        return super().forward(X)


class LoggedDropout(CNN3):
    """Writes which values its dropout keeps, at every training batch."""

    def __init__(self, n=10, path=None):
        super().__init__(n)
        self.path = path

    def forward(self, X):
        if self.training:
            mask = nn.functional.dropout(torch.ones_like(X[0]), 0.5)
            write(self.path, pid=os.getpid(), mask=(mask.flatten() > 0).int().tolist())
            X = X * mask
        return super().forward(X)


class Boom(CNN3):
    """Raises if a pixel is 99."""

    def forward(self, X):
        if (X == 99).any():
            raise ValueError("boom")
        return super().forward(X)


class Leaves(CNN3):
    """Ends the process, as it thinks, if a pixel is 99."""

    def forward(self, X):
        if (X == 99).any():
            sys.exit(3)
        return super().forward(X)


class BadLoss(CNN3):
    """A loss that is NaN for a row with a pixel of 99."""

    def forward(self, X):
        out = super().forward(X)
        return out * float("nan") if (X == 99).any() else out


class BadGradient(CNN3):
    """A loss as always, and a gradient that is NaN, for a row with a pixel of 99."""

    def forward(self, X):
        out = super().forward(X)
        if self.training and (X == 99).any():
            zero = (self.layers[0].bias.sum() * 0).sqrt()  # its derivative at 0 is infinite, times 0
            out = out + zero
        return out


class EvalBoom(CNN3):
    """Raises if a pixel is 99, but not in training."""

    def forward(self, X):
        if not self.training and (X == 99).any():
            raise ValueError("boom")
        return super().forward(X)


class Gated(CNN3):
    """Says that it has come to its first training batch, and waits there until a file is there."""

    def __init__(self, n=10, path=None, gate=None):
        super().__init__(n)
        self.path = path
        self.gate = gate

    def forward(self, X):
        if self.training:
            write(self.path, pid=os.getpid())
            wait_until(lambda: os.path.exists(self.gate))
        return super().forward(X)


class GatedBoom(Gated):
    """Raises if a pixel is 99, as soon as another process has come to its gate."""

    def forward(self, X):
        if (X == 99).any():
            wait_until(lambda: os.path.exists(self.path))
            raise ValueError("boom")
        return super().forward(X)


MARK = 0.5078125


class Halting(CNN3):
    """Halts at a marked row in a training or validation batch, once there is a file "halt", until "go".

    Whoever halts says who it is. The first who did may then have to raise or to abort. A mark is a
    pixel that random images do not have.
    """

    def __init__(self, n=10, path=None, dtype=torch.float32, dropout=0.0, training=True):
        super().__init__(n, dtype, dropout)
        self.path = path
        self.when = training

    def forward(self, X):
        if self.training == self.when and (X == MARK).any() and self.there_is("halt"):
            self.halt()
        return super().forward(X)

    def halt(self):
        halted = os.path.join(self.path, "halted")
        write(halted, pid=os.getpid())
        wait_until(lambda: self.there_is("go"), seconds=90)
        if read(halted)[0]["pid"] != os.getpid():
            return
        if self.there_is("raise"):
            raise ValueError("boom")
        if self.there_is("abort"):
            os.abort()

    def there_is(self, name):
        return os.path.exists(os.path.join(self.path, name))


class Built(CNN3):
    """Writes a line whenever it is built."""

    def __init__(self, n=10, path=None):
        super().__init__(n)
        self.path = path
        write(path, pid=os.getpid())


class Stalled(CNN3):
    """Waits for a file if a pixel is 99."""

    def __init__(self, n=10, path=None):
        super().__init__(n)
        self.path = path

    def forward(self, X):
        if (X == 99).any():
            wait_until(lambda: os.path.exists(os.path.join(self.path, "go")))
        return super().forward(X)


class Heads(nn.Module):
    """One layer for all rows, one that only rows marked in the first pixel use, one that none does."""

    def __init__(self, n=3, dtype=torch.float32):
        super().__init__()
        self.body = nn.Linear(64, n).to(dtype)
        self.some = nn.Linear(64, n).to(dtype)
        self.none = nn.Linear(64, n).to(dtype)

    def forward(self, X):
        X = X.flatten(1)
        logits = self.body(X)
        marked = X[:, 0] > 0.5
        if marked.any():
            logits = logits + torch.where(marked[:, None], self.some(X), torch.zeros_like(logits))
        return logits


class Strange(nn.Module):
    """Parameters of every kind that a transport could lose."""

    def __init__(self, n=3, dtype=torch.float32):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.frozen = nn.Linear(144, 144)
        self.frozen.requires_grad_(False)
        self.turned = nn.Parameter(torch.randn(144, n).mul_(0.1).t())  # not contiguous
        self.scale = nn.Parameter(torch.tensor(1.0))  # no dimension
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.bias = nn.Parameter(torch.zeros(n, dtype=dtype))

    def forward(self, X):
        if self.training:
            self.calls += 1
        X = self.frozen(self.conv(X).relu().flatten(1))
        return X @ self.turned.t() * self.scale + self.bias.float()


class Bulky(nn.Module):
    """A small layer, and 20 MB of parameters that cost no time."""

    def __init__(self, n_in=1024, n_out=3):
        super().__init__()
        self.bulk = nn.Parameter(torch.ones(5_000_000))
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(n_in, n_out))

    def forward(self, X):
        return self.layers(X) * self.bulk[:1]


class OwnCriterion(nn.Module):
    """Cross entropy in a class that nobody knows."""

    def forward(self, y_pred, y_true):
        return nn.functional.cross_entropy(y_pred, y_true)


class WithPenalty(NeuralNetClassifier):
    """A mean over rows, and a term without rows."""

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        loss = super().get_loss(y_pred, y_true, *args, **kwargs)
        return loss + 0.01 * sum(p.abs().sum() for p in self.module_.parameters())


def write(path, **values):
    """Append a line, whole, whoever else does the same."""
    line = json.dumps(values) + "\n"
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def read(path):
    """All lines, in the order in which they came."""
    with open(path) as file:
        return [json.loads(line) for line in file]
