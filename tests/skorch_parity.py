"""Comparison of a fit on two workers with plain skorch, and nets and callbacks that it needs."""

from __future__ import annotations

import os
from numbers import Real
from types import SimpleNamespace

import numpy as np
import torch
from nets import CNN3, read, write
from probes import wait_until
from reference import DOUBLE, digits, distance, fit_daskps, fit_plain, make_net
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, Checkpoint
from skorch.dataset import Dataset
from torch import nn

# 162 training rows make five batches of 32 and one of two rows, in which only one of two ranks takes
# part; 41 validation rows make two batches.
N_ROWS = 203
N_STEPS = 6


def data(n_rows=N_ROWS):
    """Images of digits and their labels."""
    return digits(n_rows)


def net(module=CNN3, **options):
    """A small net that computes in float64."""
    double = DOUBLE if isinstance(module, type) and "module__dtype" not in options else {}
    return make_net(module, **{**double, **options})


def compare(client, given, X=None, y=None, within=1e-10, **options):
    """Fit in both ways from the same weights; returns both after they were found equal."""
    if X is None:
        X, y = data()
    plain = fit_plain(given, X, y)
    ours = fit_daskps(client, given, X, y, **{"n_workers": 2, **options})
    assert ours.report_.world_size == options.get("n_workers", 2)
    assert_same(ours.net_, plain, within)
    return ours, plain


def assert_same(ours, plain, within=1e-10):
    """Parameters, buffers, the state of optimizers, learning rates and the history."""
    assert_same_rows(ours.history, plain.history, within)
    assert distance(ours, plain) <= within
    assert_same_optimizers(ours, plain, within)


def assert_same_rows(ours, plain, within=1e-10):
    """Key by key, with all batches; only how long an epoch took may differ."""
    assert len(ours) == len(plain)
    for row, expected in zip(ours, plain, strict=True):
        assert row.keys() == expected.keys()
        for key in expected.keys() - {"dur", "batches"}:
            assert_same_value(row[key], expected[key], within, f"epoch {expected['epoch']}, {key}")
        assert len(row["batches"]) == len(expected["batches"])
        for number, batch in enumerate(expected["batches"]):
            where = f"epoch {expected['epoch']}, batch {number}"
            assert row["batches"][number].keys() == batch.keys(), where
            for key, value in batch.items():
                assert_same_value(row["batches"][number][key], value, within, f"{where}, {key}")


def assert_same_value(value, expected, within, where):
    if isinstance(expected, Real) and not isinstance(expected, bool):
        np.testing.assert_allclose(value, expected, rtol=0, atol=within, err_msg=where)
    else:
        assert value == expected, where


def assert_same_optimizers(ours, plain, within=1e-10):
    for name in plain._optimizers:
        held, expected = (getattr(side, name + "_").state_dict() for side in (ours, plain))
        assert held["param_groups"] == expected["param_groups"]
        assert held["state"].keys() == expected["state"].keys()
        for number, values in expected["state"].items():
            assert held["state"][number].keys() == values.keys()
            for key, value in values.items():
                _assert_close(held["state"][number][key], value, within)


def _assert_close(value, expected, within):
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(value, expected, rtol=within, atol=within)
    elif isinstance(expected, list):
        for one, other in zip(value, expected, strict=True):
            _assert_close(one, other, within)
    elif isinstance(expected, float):
        np.testing.assert_allclose(value, expected, rtol=within, atol=within)
    else:
        assert value == expected


def validation_loss(fitted, X, y):
    """The mean loss of the rows that a net does not train on."""
    _, valid = fitted.get_split_datasets(X, y)
    batches = fitted.get_iterator(valid, training=False)
    steps = [(fitted.validation_step(batch)["loss"].item(), len(batch[1])) for batch in batches]
    losses, sizes = zip(*steps, strict=True)
    return np.average(losses, weights=sizes)


# Callbacks


class ClampWeights(Callback):
    """Changes parameters after every step."""

    def on_batch_end(self, net, training=None, **kwargs):
        if training:
            for parameter in net.module_.parameters():
                parameter.data.clamp_(-0.05, 0.05)


class LowerRate(Callback):
    """Changes the learning rate after every step."""

    def on_batch_end(self, net, training=None, **kwargs):
        if training:
            net.optimizer_.param_groups[0]["lr"] *= 0.9


class GradientNorm(Callback):
    """Records for every batch, and counts over all of the training."""

    def initialize(self):
        self.n_calls_, self.ended_ = 0, False
        return self

    def on_grad_computed(self, net, named_parameters, **kwargs):
        self.n_calls_ += 1
        norm = sum(parameter.grad.norm().item() for _, parameter in named_parameters)
        net.history.record_batch("norm", norm)

    def on_epoch_end(self, net, **kwargs):
        net.history.record("n_calls", self.n_calls_)

    def on_train_end(self, net, **kwargs):
        self.ended_ = True


class GradientNoise(Callback):
    """Draws random numbers on the ranks."""

    def on_grad_computed(self, net, named_parameters, **kwargs):
        for _, parameter in named_parameters:
            parameter.grad += 0.1 * torch.randn_like(parameter)


class CountsAllBatches(Callback):
    """Runs on ranks, and records for training and validation batches alike."""

    def on_grad_computed(self, net, named_parameters, **kwargs):
        pass

    def on_batch_end(self, net, batch=None, training=None, **kwargs):
        net.history.record_batch("seen", "training" if training else "validation")


class Witness(Callback):
    """Notes on the client what every hook sees."""

    def initialize(self):
        self.calls_ = []
        return self

    def on_train_begin(self, net, X=None, y=None, **kwargs):
        self.calls_.append(("train begins", X.shape, np.array(y)))

    def on_train_end(self, net, X=None, y=None, **kwargs):
        self.calls_.append(("train ends", X.shape, np.array(y)))

    def on_epoch_begin(self, net, dataset_train=None, dataset_valid=None, **kwargs):
        self.calls_.append(("epoch begins", len(dataset_train), len(dataset_valid), weight_sum(net)))

    def on_epoch_end(self, net, dataset_train=None, dataset_valid=None, **kwargs):
        self.calls_.append(("epoch ends", len(dataset_train), len(dataset_valid), weight_sum(net)))

    def on_batch_begin(self, net, batch=None, training=None, **kwargs):
        X, y = batch
        self.calls_.append(("batch begins", training, X.numpy().copy(), y.numpy().copy()))

    def on_batch_end(self, net, batch=None, training=None, loss=None, y_pred=None, **kwargs):
        X, y = batch
        seen = ("batch ends", training, X.numpy().copy(), y.numpy().copy(), loss.item())
        self.calls_.append((*seen, net.history[-1, "batches", -1]))


def weight_sum(net):
    return sum(parameter.sum().item() for parameter in net.module_.parameters())


class Shared(list):
    """A list that a clone of its owner goes on with."""

    def __deepcopy__(self, memo):
        return self


class StopAt(Callback):
    """Stops the training in a hook, as a user does with Ctrl-C."""

    def __init__(self, hook, epoch=2, batch=3, error=KeyboardInterrupt):
        self.hook = hook
        self.epoch = epoch
        self.batch = batch
        self.error = error

    def _maybe(self, hook, net):
        in_batch = "batch" not in hook or len(net.history[-1, "batches"]) == self.batch
        if hook == self.hook and len(net.history) == self.epoch and in_batch:
            raise self.error("stop")

    def on_epoch_begin(self, net, **kwargs):
        self._maybe("on_epoch_begin", net)

    def on_epoch_end(self, net, **kwargs):
        self._maybe("on_epoch_end", net)

    def on_batch_begin(self, net, **kwargs):
        self._maybe("on_batch_begin", net)

    def on_batch_end(self, net, **kwargs):
        self._maybe("on_batch_end", net)


class StopAtGradient(Callback):
    """The same on the ranks."""

    def __init__(self, step, error=KeyboardInterrupt):
        self.step = step
        self.error = error

    def initialize(self):
        self.n_steps_ = 0
        return self

    def on_grad_computed(self, net, named_parameters, **kwargs):
        self.n_steps_ += 1
        if self.n_steps_ == self.step:
            raise self.error("stop")


class LoggedCheckpoint(Checkpoint):
    """Writes down which process saves."""

    def save_model(self, net):
        write(os.path.join(self.dirname, "saves"), pid=os.getpid())
        super().save_model(net)


class Recorder:
    """Stands for the client of a logging service; keeps the calls, and is no copy of itself."""

    def __init__(self):
        self.calls = []

    def __deepcopy__(self, memo):
        return self

    def _note(self, *args, **kwargs):
        self.calls.append((args, kwargs))

    add_scalar = close = log_scalar = log = log_metric = log_batch = set_terminated = _note
    info = SimpleNamespace(run_id="run")

    def watch(self, module):
        self.calls.append(type(module).__name__)


class Begun(Callback):
    """Tells whether an epoch began; its copies share what they know."""

    def __init__(self, epochs=None):
        self.epochs = Shared() if epochs is None else epochs

    def on_epoch_begin(self, net, **kwargs):
        self.epochs.append(len(net.history))


# Modules


class Waiting(CNN3):
    """Writes down that it had a training batch, and waits in all but the first until a file is there."""

    def __init__(self, n=10, path=None, gate=None, dtype=torch.float64):
        super().__init__(n, dtype)
        self.path = path
        self.gate = gate

    def forward(self, X):
        if self.training:
            write(self.path, pid=os.getpid())
            is_first = [line["pid"] for line in read(self.path)].count(os.getpid()) == 1
            wait_until(lambda: is_first or os.path.exists(self.gate), seconds=90)
        return super().forward(X)


class Tiny(nn.Module):
    """Two linear layers, whose input width may be set later."""

    def __init__(self, input_dim=1, n=10, dtype=torch.float64):
        super().__init__()
        self.first = nn.Linear(input_dim, 12).to(dtype)
        self.second = nn.Linear(12, n).to(dtype)

    def forward(self, X):
        return self.second(torch.tanh(self.first(X.flatten(1))))


class TwoOutputs(CNN3):
    """Logits, and something else."""

    def forward(self, X):
        return super().forward(X), X.flatten(1).sum(1, keepdim=True)


class OneLogit(nn.Module):
    """For two classes."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.layer = nn.Linear(64, 1).to(dtype)

    def forward(self, X):
        return self.layer(X.flatten(1))


class Affine(nn.Module):
    """One linear layer with few inputs: a convex problem of good condition."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.layer = nn.Linear(16, 10).to(dtype)

    def forward(self, X):
        return self.layer(nn.functional.avg_pool2d(X, 2).flatten(1) - 0.3)


class Probabilities(nn.Module):
    """For NLLLoss."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.layer = nn.Linear(64, 10).to(dtype)

    def forward(self, X):
        return self.layer(X.flatten(1)).softmax(1)


# Nets


class OwnStep(NeuralNetClassifier):
    """Computes its loss in its own step, not in get_loss, and gives a tensor that is new."""

    def train_step_single(self, batch, **fit_params):
        self._set_training(True)
        X, y = batch
        y_pred = self.infer(X, **fit_params)
        loss = self.get_loss(y_pred, y, X=X, training=True)
        loss = loss + 0.001 * sum(p.pow(2).sum() for p in self.module_.parameters())
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}


class LossWithoutGetLoss(NeuralNetClassifier):
    """Never calls get_loss in training."""

    def train_step_single(self, batch, **fit_params):
        self._set_training(True)
        X, y = batch
        y_pred = self.infer(X, **fit_params)
        loss = nn.functional.cross_entropy(y_pred, y)
        loss.backward()
        return {"loss": loss, "y_pred": y_pred}


class OwnSteps(NeuralNetClassifier):
    """Counts how often it looks at a batch, and keeps its parameters small."""

    def train_step_single(self, batch, **fit_params):
        self.n_looks_ = getattr(self, "n_looks_", 0) + 1
        return super().train_step_single(batch, **fit_params)

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        loss = super().get_loss(y_pred, y_true, *args, **kwargs)
        return loss + 0.1 * sum(p.pow(2).sum() for p in self.module_.parameters())


class TwoLooks(NeuralNetClassifier):
    """Looks at every batch twice, in halves, and makes one step."""

    def train_step(self, batch, **fit_params):
        X, y = batch
        half = max(1, len(y) // 2)
        self._zero_grad_optimizer()
        parts = [(X[:half], y[:half]), (X[half:], y[half:])]
        steps = [self.train_step_single(part, **fit_params) for part in parts]
        self.notify("on_grad_computed", named_parameters=list(self.module_.named_parameters()), batch=batch)
        for parameter in self.module_.parameters():
            parameter.grad /= 2
        self.optimizer_.step()
        loss = sum(step["loss"].detach() for step in steps) / 2
        return {"loss": loss, "y_pred": torch.cat([step["y_pred"] for step in steps])}


class SharpnessAware(NeuralNetClassifier):
    """Two gradients for each step, the second one at the weights that the first leads to."""

    def train_step(self, batch, **fit_params):
        step = self._gradient(batch)
        with torch.no_grad():
            held = [parameter.clone() for parameter in self.module_.parameters()]
            for parameter in self.module_.parameters():
                parameter += 0.01 * parameter.grad
        self._gradient(batch)
        with torch.no_grad():
            for parameter, value in zip(self.module_.parameters(), held, strict=True):
                parameter.copy_(value)
        self.optimizer_.step()
        return step

    def _gradient(self, batch):
        self._zero_grad_optimizer()
        step = self.train_step_single(batch)
        named = list(self.module_.named_parameters())
        self.notify("on_grad_computed", named_parameters=named, batch=batch)
        return step


class Accumulates(NeuralNetClassifier):
    """The recipe of skorch's documentation: a step every second batch."""

    def get_loss(self, *args, **kwargs):
        return super().get_loss(*args, **kwargs) / 2

    def train_step(self, batch, **fit_params):
        n_train_batches = len(self.history[-1, "batches"])
        step = self.train_step_single(batch, **fit_params)
        if n_train_batches % 2 == 0:
            named = list(self.module_.named_parameters())
            self.notify("on_grad_computed", named_parameters=named, batch=batch)
            self.optimizer_.step()
            self.optimizer_.zero_grad()
        return step


class TellsMore(NeuralNetClassifier):
    """A validation step with a value of its own."""

    def validation_step(self, batch, **fit_params):
        step = super().validation_step(batch, **fit_params)
        return {**step, "largest": step["y_pred"].abs().max()}


class TakesLargest(Callback):
    def on_batch_end(self, net, training=None, largest=None, **kwargs):
        if not training:
            net.history.record_batch("largest", largest.item())


class Scales(NeuralNetClassifier):
    """An own infer."""

    def infer(self, x, **fit_params):
        return super().infer(2 * x - 1, **fit_params)


class OwnLoop(NeuralNetClassifier):
    def fit_loop(self, *args, **kwargs):
        return super().fit_loop(*args, **kwargs)


class OwnEpoch(NeuralNetClassifier):
    def run_single_epoch(self, *args, **kwargs):
        return super().run_single_epoch(*args, **kwargs)


class OwnIterator(NeuralNetClassifier):
    def get_iterator(self, *args, **kwargs):
        return super().get_iterator(*args, **kwargs)


class OwnFit(NeuralNetClassifier):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class RandomSteps(NeuralNetClassifier):
    """Moves parameters at random, by numbers that belong to its rank."""

    def train_step(self, batch, **fit_params):
        step = super().train_step(batch, **fit_params)
        for parameter in self.module_.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        return step


class TwoOptimizers(NeuralNetClassifier):
    """Each layer of the module has an optimizer of its own."""

    def initialize_optimizer(self, *args, **kwargs):
        args, kwargs = self.get_params_for_optimizer("optimizer", self.module_.first.named_parameters())
        self.optimizer_ = self.optimizer(*args, **kwargs)
        self.other_ = torch.optim.Adam(self.module_.second.parameters(), lr=0.01)
        return self


# Datasets


class Transformed(Dataset):
    """Changes a row when it is taken."""

    def __init__(self, X, y=None, transform=None):
        super().__init__(X, y)
        self.apply = transform

    def transform(self, X, y):
        X, y = super().transform(X, y)
        return (X if self.apply is None else self.apply(X)), y


class StretchedAtOnce(Dataset):
    """Changes all rows when it is made."""

    def __init__(self, X, y=None):
        super().__init__(X * 2 - X.mean(), y)


def brighter(X):
    return X * 3 + 1


def collate_and_shift(rows):
    """A collate function that changes the batch."""
    X, y = torch.utils.data.default_collate(rows)
    return X - 0.5, y
