"""Nets, modules, optimizers, iterators and datasets of users, on two workers, against plain skorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import CNN3, Heads, Strange
from reference import ADAM, PLAIN_SGD, distance, fit_daskps, fit_plain, state
from skorch import NeuralNetBinaryClassifier
from skorch.callbacks import BatchScoring, Callback, EpochScoring
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from skorch_parity import (
    Accumulates,
    Affine,
    LossWithoutGetLoss,
    OneLogit,
    OwnEpoch,
    OwnFit,
    OwnIterator,
    OwnLoop,
    OwnStep,
    OwnSteps,
    Probabilities,
    RandomSteps,
    Scales,
    SharpnessAware,
    StretchedAtOnce,
    TakesLargest,
    TellsMore,
    Tiny,
    Transformed,
    TwoLooks,
    TwoOptimizers,
    TwoOutputs,
    assert_same_rows,
    brighter,
    collate_and_shift,
    compare,
    data,
    net,
)
from torch import nn
from torch.utils.data import DataLoader

from daskps import DaskpsError

# Nets of users


@pytest.mark.parametrize(
    "options",
    [
        {"net_class": OwnStep},
        {"net_class": LossWithoutGetLoss},
        {"net_class": Scales},
        {"net_class": TellsMore, "callbacks": [("largest", TakesLargest())]},
        {"module": Tiny, "module__input_dim": 64, "net_class": TwoOptimizers},
        {"module": TwoOutputs},
        {
            "module": TwoOutputs,
            "callbacks": [("train", EpochScoring("accuracy", on_train=True, name="mine"))],
        },
    ],
    ids=[
        "own step",
        "own step without get_loss",
        "own infer",
        "own validation_step",
        "two optimizers",
        "two outputs",
        "two outputs, scored",
    ],
)
def test_nets_of_users(client, options):
    if options.get("module") is TwoOutputs:
        options = {**options, "net_class": FirstOutput}
    compare(client, net(**options))


class FirstOutput(OwnStep):
    """A loss of the first of two outputs."""

    def get_loss(self, y_pred, y_true, *args, **kwargs):
        logits, sums = y_pred
        return super().get_loss(logits, y_true, *args, **kwargs) + 1e-3 * (sums * logits).pow(2).mean()


def test_step_that_looks_at_its_batch_in_parts(client):
    """Equal parts of equal pieces; the gradient of a step is the mean of its looks."""
    X, y = data(128)
    compare(client, net(net_class=TwoLooks, train_split=None), X, y)


@pytest.mark.parametrize("n_rows", [203, 202])
def test_step_with_two_gradients(client, n_rows):
    """Ranks meet twice in a step, also where one of them has no rows."""
    compare(client, net(net_class=SharpnessAware), *data(n_rows))


def test_step_with_more_meetings_than_optimizers_where_a_rank_has_no_rows(client):
    X, y = data(34)
    compare(client, net(net_class=SharpnessAware, train_split=None), X, y)


def test_accumulated_gradients_are_refused(client):
    """The recipe of skorch's documentation makes its steps without telling."""
    with pytest.raises(DaskpsError, match=r"Accumulates\.train_step.*on_grad_computed"):
        fit_daskps(client, net(net_class=Accumulates), *data(), n_workers=2)
    compare(client, net())


def test_steps_that_are_not_alike_on_all_ranks_are_an_error(client):
    with pytest.raises(DaskpsError, match=r"drifted apart.*random numbers"):
        fit_daskps(client, net(net_class=RandomSteps), *data(), n_workers=2)


@pytest.mark.parametrize(
    ("net_class", "method", "remedy"),
    [
        (OwnLoop, "fit_loop", "train_step"),
        (OwnEpoch, "run_single_epoch", "train_step"),
        (OwnFit, "fit", "train_step"),
        (OwnIterator, "get_iterator", "iterator_train"),
    ],
)
def test_own_loops_are_refused(client, net_class, method, remedy):
    with pytest.raises(TypeError, match=f"{net_class.__name__} overrides {method}, .*{remedy}"):
        fit_daskps(client, net(net_class=net_class), *data(), n_workers=2)


# Modules


def test_module_as_an_instance(client):
    """Its own weights are the first ones, and stay what they are."""
    torch.manual_seed(5)
    module = CNN3(dtype=torch.float64)
    before = state(module)
    ours, _ = compare(client, net(module))
    assert all(torch.equal(value, before[name]) for name, value in state(module).items())
    assert distance(ours, module) > 1e-3


def test_criterion_as_an_instance(client):
    weight = torch.linspace(0.1, 2, 10, dtype=torch.float64)
    compare(client, net(criterion=nn.CrossEntropyLoss(weight=weight)))


@pytest.mark.parametrize(
    "options",
    [
        {"criterion__weight": torch.linspace(0.2, 2, 10, dtype=torch.float64)},
        {"criterion__reduction": "sum", "lr": 0.001},
        {"criterion__label_smoothing": 0.1},
        {"module": Probabilities, "criterion": nn.NLLLoss},
        {
            "module": Probabilities,
            "criterion": nn.NLLLoss,
            "criterion__weight": torch.linspace(0.2, 2, 10, dtype=torch.float64),
        },
    ],
    ids=["weight", "sum", "smoothing", "nll", "weighted nll"],
)
def test_criteria(client, options):
    compare(client, net(**options))


def marked(n_rows=90):
    """Images of which only those of class 0 are marked in the first pixel."""
    X, y = np.random.RandomState(0).rand(n_rows, 1, 8, 8), np.arange(n_rows) % 3
    X[:, 0, 0, 0] = y == 0
    return X, y


@pytest.mark.parametrize("batch_size", [32, -1, 3])
def test_parameters_without_a_gradient(client, batch_size):
    """BR-40: unused ones are bit for bit what they were; one that some rows use moves as it should."""
    X, y = marked(90 if batch_size != 3 else 32)
    options = {"optimizer": torch.optim.SGD, "optimizer__momentum": 0.9, "optimizer__weight_decay": 0.1}
    given = net(
        Heads, lr=0.05, **options, batch_size=batch_size, iterator_train__shuffle=False, train_split=None
    )
    torch.manual_seed(0)
    first = state(given.initialize())
    ours, _ = compare(client, given, X, y)
    trained = state(ours)
    assert torch.equal(trained["none.weight"], first["none.weight"])
    assert not torch.equal(trained["some.weight"], first["some.weight"])


@pytest.mark.parametrize("optimizer", [PLAIN_SGD, ADAM], ids=["sgd", "adam"])
def test_parameters_of_many_kinds(client, optimizer):
    """Two dtypes, frozen, not contiguous, without a dimension, and an integer buffer."""
    X, y = marked()
    given = net(Strange, module__n=3, module__dtype=torch.float64, **optimizer)
    compare(client, given, X.astype(np.float32), y, within=2e-6)


# Optimizers


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.parametrize("n_rows", [128, 130])
def test_lbfgs(client, search, n_rows):
    """A convex problem; with 130 rows the last batch has two, and only one of the ranks takes part."""
    X, y = data(n_rows)
    given = net(
        Affine,
        optimizer=torch.optim.LBFGS,
        optimizer__line_search_fn=search,
        optimizer__max_iter=8,
        net_class=OwnSteps,
        lr=1.0 if search else 0.1,
        batch_size=64,
        train_split=None,
        max_epochs=2,
    )
    ours, plain = compare(client, given, X, y, within=1e-8)
    assert n_rows == 130 or ours.history_[-1, "train_loss"] < ours.history_[0, "train_loss"]
    assert plain.n_looks_ > 4


def test_lbfgs_with_a_loss_that_the_net_computes_itself(client):
    """The line search has to see the loss of all ranks whoever computes it, or they part."""
    X, y = data(128)
    for net_class in (OwnStep, LossWithoutGetLoss):
        given = net(
            Affine,
            optimizer=torch.optim.LBFGS,
            optimizer__line_search_fn="strong_wolfe",
            optimizer__max_iter=8,
            net_class=net_class,
            lr=1.0,
            batch_size=64,
            train_split=None,
            max_epochs=2,
        )
        compare(client, given, X, y, within=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": torch.optim.AdamW, "lr": 0.01, "optimizer__amsgrad": True},
        {"optimizer": torch.optim.RMSprop, "lr": 0.01, "optimizer__momentum": 0.5},
        {"optimizer": torch.optim.Adagrad, "lr": 0.01},
        {
            "optimizer": torch.optim.SGD,
            "lr": 0.05,
            "optimizer__nesterov": True,
            "optimizer__momentum": 0.9,
            "optimizer__param_groups": [("layers.4*", {"lr": 0.01})],
        },
    ],
    ids=["adamw", "rmsprop", "adagrad", "groups"],
)
def test_optimizers(client, options):
    compare(client, net(**options))


# Iterators and datasets


@pytest.mark.parametrize(
    "options",
    [
        {"iterator_train__drop_last": True},
        {"iterator_train__batch_size": 50, "iterator_valid__batch_size": 7},
        {"iterator_train__collate_fn": collate_and_shift, "iterator_valid__collate_fn": collate_and_shift},
        {"iterator_train__pin_memory": False, "iterator_train__num_workers": 0},
        {"iterator_train": type("OwnLoader", (DataLoader,), {})},
        {"dataset": Transformed, "dataset__transform": brighter},
        {"dataset": Transformed, "dataset__transform": brighter, "train_split": None},
        {"train_split": ValidSplit(3, stratified=False)},
    ],
    ids=["drop_last", "sizes", "collate_fn", "loader options", "loader", "dataset", "no split", "split"],
)
def test_batches(client, options):
    compare(client, net(**options))


def test_validation_scores_see_the_batches_of_the_net(client):
    """What the dataset and the iterator of the net make of the rows, not the bare rows."""
    options = {
        "dataset": Transformed,
        "dataset__transform": brighter,
        "iterator_valid__collate_fn": collate_and_shift,
    }
    score = BatchScoring(mean_of_all, use_caching=False, name="mine")
    ours, _ = compare(client, net(callbacks=[("score", score)], **options))
    assert 0.6 < ours.history_[-1, "mine"] < 3  # the mean of digits is 0.3


def mean_of_all(net, X, y):
    return X.mean().item()


def test_scores_of_rows_of_another_dtype(client):
    """Rows in float32 and a net in float64: a client-side prediction casts them as the ranks do."""
    X, y = data()
    callbacks = [
        ("epoch", EpochScoring("accuracy", use_caching=False, name="epoch_score", lower_is_better=False)),
        ("train", EpochScoring("accuracy", use_caching=False, on_train=True, name="train_score")),
        ("batch", BatchScoring("accuracy", use_caching=False, name="batch_score", lower_is_better=False)),
    ]
    ours = fit_daskps(client, net(callbacks=callbacks), (X * 16).astype(np.uint8), y, n_workers=2)
    assert_same_rows(ours.history_, fit_plain(net(callbacks=callbacks), X * 16, y).history)


def test_dataset_that_changes_the_rows_when_it_is_made(client):
    """Every worker would change its own rows once more."""
    with pytest.raises(TypeError, match=r"StretchedAtOnce changes X or y .* transform or __getitem__"):
        fit_daskps(client, net(dataset=StretchedAtOnce), *data(), n_workers=2)


def test_shuffled_batches_use_every_row_once_an_epoch(client):
    X, y = data()
    seen = []

    class Note(Callback):
        def on_batch_end(self, net, batch=None, training=None, **kwargs):
            seen.append(batch[0][:, 0, 0, 0].numpy())

    X = X.copy()
    X[:, 0, 0, 0] = np.arange(len(X))
    given = net(callbacks=[("note", Note())], iterator_train__shuffle=True, train_split=None, max_epochs=2)
    ours = fit_daskps(client, given, X, y, n_workers=2, random_state=0)
    assert ours.history_[-1, "batches", :, "train_batch_size"] == [32] * 6 + [11]
    epochs = [np.concatenate(seen[:7]), np.concatenate(seen[7:])]
    for rows in epochs:
        np.testing.assert_array_equal(np.sort(rows), np.arange(len(X)))
    assert not np.array_equal(*epochs)


@pytest.mark.parametrize("name", ["iterator_train", "iterator_valid"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_workers", 2, "child processes.*Set it to 0"),
        ("sampler", [0, 1, 2], "decided for all workers together.*shuffle"),
        ("batch_sampler", [[0, 1, 2]], "decided for all workers together.*shuffle"),
    ],
)
def test_iterator_options_that_cannot_work(client, name, option, value, message):
    """BR-46, and samplers: before anything is sent."""
    with pytest.raises(ValueError, match=f"{name}__{option}.*{message}"):
        fit_daskps(client, net(**{f"{name}__{option}": value}), *data(), n_workers=2)


# Two classes, and validation rows of the user's own


@pytest.mark.parametrize("threshold", [0.5, 0.8])
def test_binary_classifier(client, threshold):
    X, y = data()
    y = (y > 4).astype(np.float64)
    given = net(
        OneLogit, net_class=NeuralNetBinaryClassifier, criterion=nn.BCEWithLogitsLoss, threshold=threshold
    )
    ours, plain = compare(client, given, X, y)
    names = np.array(["no", "yes"])
    np.testing.assert_array_equal(ours.predict(X), plain.predict(X))
    np.testing.assert_allclose(ours.predict_proba(X), plain.predict_proba(X), atol=1e-10)
    named = fit_daskps(client, given, X, names[y.astype(int)], n_workers=2)
    np.testing.assert_array_equal(named.predict(X), names[plain.predict(X)])
    assert distance(named, plain) <= 1e-10


def test_binary_classifier_of_a_column(client):
    """Also with more labels it is refused in one sentence."""
    X, y = data()
    given = net(OneLogit, net_class=NeuralNetBinaryClassifier, criterion=nn.BCEWithLogitsLoss)
    with pytest.raises(ValueError, match="2 classes"):
        fit_daskps(client, given, X, y, n_workers=2)


@pytest.mark.parametrize(
    "names",
    [np.array([f"class {digit}" for digit in range(10)]), np.arange(10) * 3 - 5, np.arange(10)],
    ids=["strings", "gaps", "numbers"],
)
def test_predefined_split(client, names):
    """Validation labels are the user's own, and are encoded as y is."""
    X, y = data()
    X_valid, y_valid = X[150:], y[150:]
    score = EpochScoring("accuracy", use_caching=False, name="uncached", lower_is_better=False)
    options = {"callbacks": [("score", score)]}
    plain = fit_plain(
        net(train_split=predefined_split(Dataset(X_valid, y_valid)), **options), X[:150], y[:150]
    )
    split = predefined_split(Dataset(X_valid, names[y_valid]))
    ours = fit_daskps(client, net(train_split=split, **options), X[:150], names[y[:150]], n_workers=2)
    assert_same_rows(ours.history_, plain.history)
    assert distance(ours, plain) <= 1e-10
    np.testing.assert_array_equal(ours.predict(X), names[plain.predict(X)])


def test_predefined_split_of_another_kind_of_dataset(client):
    """Its rows would not be transformed on the ranks, which know only the net's own dataset."""
    X, y = data()
    split = predefined_split(Transformed(X[150:], y[150:], transform=brighter))
    with pytest.raises(TypeError, match=r"validation set of Transformed.*dataset=Transformed"):
        fit_daskps(client, net(train_split=split), X[:150], y[:150], n_workers=2)
    options = {"dataset": Transformed, "dataset__transform": brighter}
    compare(client, net(train_split=split, **options), X[:150], y[:150])


# Devices and compilers


def test_on_the_cpu_by_name(client):
    compare(client, net(device="cpu", max_epochs=1))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_gpu_where_there_is_none(client):
    """BR-59: one error that names it, before anything is sent."""
    with pytest.raises(ValueError, match=r"device='cuda'.*(?i:cuda)"):
        fit_daskps(client, net(device="cuda"), *data(), n_workers=2)


def test_compiled_by_a_backend_that_needs_no_compiler(client):
    """The plumbing of ``compile``: names of parameters, copies, and the way back."""
    ours, _ = compare(client, net(compile=True, compile__backend="eager", max_epochs=2))
    assert type(ours.net_.module_).__name__ == "OptimizedModule"
