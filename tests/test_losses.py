"""The weights of contributions, and that with them unequal pieces give the gradient of the batch."""

import numpy as np
import pytest
import torch
from ranks import combined
from skorch import NeuralNet, NeuralNetClassifier
from torch import nn

from daskps import _losses
from daskps._packing import FlatBuffer

CLASS_WEIGHTS = torch.tensor([1.0, 1.0, 10.0], dtype=torch.float64)


class LogSoftmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 3, dtype=torch.float64)

    def forward(self, X):
        return self.linear(X.flatten(1)).log_softmax(1)


class Probabilities(LogSoftmax):
    def forward(self, X):
        return super().forward(X).exp()


class Logits(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 3, dtype=torch.float64))


class OwnMean(nn.Module):
    """A mean over rows that has no 'reduction'."""

    def forward(self, y_pred, y_true):
        return (y_pred.gather(1, y_true[:, None]) ** 2).mean()


class OwnCrossEntropy(nn.CrossEntropyLoss):
    def forward(self, y_pred, y_true):
        return super().forward(2 * y_pred, y_true) + 0.5


class NarrowCrossEntropy(nn.CrossEntropyLoss):
    """A subclass that only sets defaults."""

    def __init__(self):
        super().__init__(weight=CLASS_WEIGHTS)


class OwnGetLoss(NeuralNetClassifier):
    def get_loss(self, y_pred, y_true, X=None, training=False):
        loss = super().get_loss(y_pred, y_true, X=X, training=training)
        return loss.mean() + 0.1 * self.module_[1].weight.abs().sum()


def rows(ignored=()):
    """70 rows of three classes, sorted, so that the pieces differ in their classes."""
    X = torch.as_tensor(np.random.RandomState(0).rand(70, 1, 4, 4))
    y = torch.arange(70).remainder(3).sort().values
    y[list(ignored)] = -100
    return X, y


def probabilities(n_rows=70):
    return torch.as_tensor(np.random.RandomState(1).dirichlet([1, 1, 1], n_rows))


def net_for(criterion, module=Logits, kind=NeuralNetClassifier, **options):
    torch.manual_seed(0)
    options = {f"criterion__{key}": value for key, value in options.items()}
    return kind(module, criterion=criterion, **options).initialize()


def gradient(net, X, y):
    """Loss and gradients of one batch, as skorch computes them."""
    net.module_.zero_grad()
    step = net.train_step_single((X, y))
    return step["loss"].item(), [p.grad.clone() for p in net.module_.parameters()]


def combined_gradient(net, X, y, cut):
    """The same from two pieces, as two ranks and the server compute it."""
    flat, parts, reduction = None, [], _losses.reduction(net)
    for piece in (slice(cut), slice(cut, None)):
        weight = _losses.divisor(net, type(net), y[piece])
        loss, grads = gradient(net, X[piece], y[piece])
        flat = FlatBuffer(grads)
        packed = flat.pack(grads, loss, weight if reduction == "mean" else 1.0)
        parts.append((packed, weight, reduction))
    grads, loss = flat.unpack(combined(*parts))
    return loss, grads


CASES = {
    "cross entropy": (net_for(nn.CrossEntropyLoss), *rows()),
    "class weights": (net_for(nn.CrossEntropyLoss, weight=CLASS_WEIGHTS), *rows()),
    "ignored rows": (net_for(nn.CrossEntropyLoss), *rows(ignored=[0, 3, 5, 66, 69])),
    "other ignore_index": (net_for(nn.CrossEntropyLoss, ignore_index=1), *rows()),
    "label smoothing": (net_for(nn.CrossEntropyLoss, label_smoothing=0.2), *rows()),
    "smoothing, class weights and ignored rows": (
        net_for(nn.CrossEntropyLoss, label_smoothing=0.2, weight=CLASS_WEIGHTS),
        *rows(ignored=[1, 65]),
    ),
    "probabilities as targets": (
        net_for(nn.CrossEntropyLoss, weight=CLASS_WEIGHTS), rows()[0], probabilities(),
    ),
    "sum": (net_for(nn.CrossEntropyLoss, reduction="sum"), *rows()),
    "sum with class weights": (
        net_for(nn.CrossEntropyLoss, reduction="sum", weight=CLASS_WEIGHTS),
        *rows(ignored=[1, 65]),
    ),
    "nll of probabilities": (net_for(nn.NLLLoss, Probabilities, weight=CLASS_WEIGHTS), *rows()),
    "nll of log probabilities": (
        net_for(nn.NLLLoss, LogSoftmax, NeuralNet, weight=CLASS_WEIGHTS),
        *rows(ignored=[2, 68]),
    ),
    "nll sum": (net_for(nn.NLLLoss, LogSoftmax, NeuralNet, reduction="sum"), *rows()),
    "subclass with defaults": (net_for(NarrowCrossEntropy), *rows()),
    "subclass with its own forward": (net_for(OwnCrossEntropy), *rows()),
    "own criterion": (net_for(OwnMean), *rows()),
    "own get_loss": (net_for(nn.CrossEntropyLoss, kind=OwnGetLoss), *rows()),
    "own get_loss that reduces": (
        net_for(nn.CrossEntropyLoss, kind=OwnGetLoss, reduction="none"), *rows(),
    ),
    "rows of the squared error": (
        net_for(nn.MSELoss, kind=NeuralNet), rows()[0], probabilities(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("cut", [64, 35, 2])
@pytest.mark.parametrize("name", CASES)
def test_unequal_pieces_give_loss_and_gradient_of_the_whole_batch(name, cut):
    net, X, y = CASES[name]
    loss, grads = gradient(net, X, y)
    combined_loss, combined_grads = combined_gradient(net, X, y, cut)
    assert combined_loss == pytest.approx(loss, rel=1e-12)
    for grad, other in zip(grads, combined_grads, strict=True):
        assert (grad - other).abs().max() <= 1e-10


def test_rows_as_weights_would_be_wrong_for_class_weights(monkeypatch):
    net, X, y = CASES["class weights"]
    monkeypatch.setattr(_losses, "divisor", lambda net, owner, y_true: float(len(y_true)))
    _, grads = gradient(net, X, y)
    _, others = combined_gradient(net, X, y, 64)
    assert (grads[0] - others[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["cross entropy", "class weights", "sum"])
def test_piece_without_any_row_that_counts_is_left_out(name):
    net, X, y = CASES[name]
    y = y.clone()
    y[64:] = -100
    _, grads = gradient(net, X[:64], y[:64])
    _, others = combined_gradient(net, X, y, 64)
    assert all((g - c).abs().max() <= 1e-10 for g, c in zip(grads, others, strict=True))


class TestDivisor:
    Y = torch.tensor([0, 2, 2, 1])

    @pytest.mark.parametrize(("criterion", "options", "expected"), [
        (nn.CrossEntropyLoss, {}, 4.0),
        (nn.CrossEntropyLoss, {"ignore_index": 2}, 2.0),
        (nn.CrossEntropyLoss, {"label_smoothing": 0.3}, 4.0),
        (nn.CrossEntropyLoss, {"weight": CLASS_WEIGHTS}, 22.0),
        (nn.CrossEntropyLoss, {"weight": CLASS_WEIGHTS, "ignore_index": 2}, 2.0),
        (nn.NLLLoss, {"weight": CLASS_WEIGHTS}, 22.0),
        (NarrowCrossEntropy, {}, 22.0),
        (OwnCrossEntropy, {"weight": CLASS_WEIGHTS}, 4.0),
        (OwnMean, {}, 4.0),
    ])  # fmt: skip
    def test_of_class_indices(self, criterion, options, expected):
        net = net_for(criterion, **options)
        divisor = _losses.divisor(net, type(net), self.Y)
        assert (divisor, type(divisor)) == (expected, float)

    def test_of_an_own_get_loss_is_rows(self):
        net = net_for(nn.CrossEntropyLoss, kind=OwnGetLoss, weight=CLASS_WEIGHTS)
        assert _losses.divisor(net, OwnGetLoss, self.Y) == 4.0

    def test_of_targets_in_more_dimensions_counts_each(self):
        net = net_for(nn.CrossEntropyLoss)
        assert _losses.divisor(net, type(net), torch.tensor([[0, 1], [2, -100]])) == 3.0

    def test_of_probabilities_is_rows(self):
        net = net_for(nn.CrossEntropyLoss, weight=CLASS_WEIGHTS)
        assert _losses.divisor(net, type(net), probabilities(5)) == 5.0

    def test_of_ignored_rows_only_is_zero(self):
        net = net_for(nn.CrossEntropyLoss)
        assert _losses.divisor(net, type(net), torch.full((3,), -100)) == 0.0


class TestReduction:
    @pytest.mark.parametrize(("options", "expected"), [
        ({}, "mean"), ({"reduction": "mean"}, "mean"), ({"reduction": "sum"}, "sum"),
    ])  # fmt: skip
    def test_of_torchs_losses(self, options, expected):
        assert _losses.reduction(net_for(nn.CrossEntropyLoss, **options)) == expected

    def test_of_an_own_criterion_is_mean(self):
        assert _losses.reduction(net_for(OwnMean)) == "mean"

    def test_of_losses_that_get_loss_reduces_is_mean(self):
        net = net_for(nn.CrossEntropyLoss, kind=OwnGetLoss, reduction="none")
        assert _losses.reduction(net) == "mean"
