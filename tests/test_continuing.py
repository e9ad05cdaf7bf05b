"""Training that goes on: ``partial_fit``, ``warm_start``, in plain skorch, and from plain skorch."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from nets import CNN3
from reference import ADAM, MOMENTUM, distance, fit_daskps, fit_plain, identical, state
from skorch import NeuralNetClassifier
from skorch.callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    Freezer,
    LRScheduler,
    TrainEndCheckpoint,
)
from skorch.history import History
from skorch_parity import (
    N_STEPS,
    GradientNorm,
    assert_same,
    assert_same_optimizers,
    assert_same_rows,
    compare,
    data,
    net,
)

from daskps import DistributedCNNClassifier


def trained_by_skorch(given, X, y, seed=0):
    """The net itself, not a clone of it."""
    torch.manual_seed(seed)
    return given.fit(X, y)


def estimator(client, given, **options):
    return DistributedCNNClassifier(given, client=client, n_workers=2, **options)


def partial_fits(client, given, pieces, seed=0, **options):
    """Both ways of training on one piece of data after the other."""
    torch.manual_seed(seed)
    ours = estimator(client, given, **options)
    for X, y in pieces:
        ours.partial_fit(X, y)
    torch.manual_seed(seed)
    plain = copy.deepcopy(given)
    for X, y in pieces:
        plain.partial_fit(X, y)
    return ours, plain


CALLBACKS = {
    "none": [],
    "schedule by epoch": [("lr", LRScheduler("StepLR", step_size=1, gamma=0.8))],
    "schedule by batch": [("lr", LRScheduler("StepLR", step_size=4, gamma=0.9, step_every="batch"))],
    "one cycle": [
        (
            "lr",
            LRScheduler(
                torch.optim.lr_scheduler.OneCycleLR,
                max_lr=0.1,
                total_steps=4 * N_STEPS + 2,
                step_every="batch",
                last_epoch=-1,
            ),
        )
    ],
    "plateau": [("lr", LRScheduler("ReduceLROnPlateau", monitor="valid_loss", patience=0, threshold=0.2))],
    "frozen": [("freeze", Freezer("layers.0.*"))],
    "scores": [("acc", EpochScoring("accuracy", on_train=True, name="acc", lower_is_better=False))],
    "stopping": [("stop", EarlyStopping(patience=1, threshold=0.4, load_best=True))],
    "gradients": [("norm", GradientNorm())],
}


@pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
def test_partial_fit_goes_on_as_in_skorch(client, callbacks):
    """Weights, momentum, history, schedules and frozen parameters."""
    X, y = data()
    given = net(callbacks=callbacks, max_epochs=2)
    ours, plain = partial_fits(client, given, [(X, y), (X, y)])
    assert_same(ours.net_, plain)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("sync_every", ["batch", "epoch", 2])
def test_one_epoch_and_one_more_are_two(client, sync_every, optimizer):
    """BR-58."""
    X, y = data()
    options = {"sync_every": sync_every, "random_state": 0}
    twice = estimator(client, net(max_epochs=1, **optimizer), **options).fit(X, y).partial_fit(X, y)
    once = estimator(client, net(max_epochs=2, **optimizer), **options).fit(X, y)
    assert_same(twice.net_, once.net_)


def test_partial_fit_with_dropout_repeats_itself_with_a_random_state(client):
    """The second call draws what the second epoch would have drawn."""
    X, y = data()
    given = net(module__dropout=0.5, max_epochs=1)
    twice = estimator(client, given, random_state=0).partial_fit(X, y).partial_fit(X, y)
    once = estimator(client, given.set_params(max_epochs=2), random_state=0).fit(X, y)
    assert_same(twice.net_, once.net_)


def test_partial_fit_on_other_data(client):
    X, y = data(400)
    pieces = [(X[:150], y[:150]), (X[150:250], y[150:250]), (X[250:], y[250:])]
    ours, plain = partial_fits(client, net(max_epochs=1), pieces)
    assert_same(ours.net_, plain)
    assert len(ours.history_) == 3


def test_classes_that_are_announced(client):
    """BR-58: the second piece has only one label, and the classes stay what they are."""
    X, y = data()
    few, rest = y < 2, y == 2
    ours = estimator(client, net(module__n=3, max_epochs=1, train_split=None))
    ours.partial_fit(X[few], y[few], classes=[0, 1, 2])
    np.testing.assert_array_equal(ours.classes_, [0, 1, 2])
    ours.partial_fit(X[rest], y[rest])
    np.testing.assert_array_equal(ours.classes_, [0, 1, 2])
    assert ours.predict_proba(X).shape == (len(X), 3)
    assert len(ours.history_) == 2
    ours.partial_fit(X[few], y[few], classes=[0, 1, 2])
    with pytest.raises(ValueError, match="classes"):
        ours.partial_fit(X[few], y[few], classes=[0, 1, 2, 3])


def test_classes_that_are_announced_as_words(client):
    X, y = data()
    names = np.array(["cat", "dog", "eel"])
    few = y < 2
    ours = estimator(client, net(module__n=3, max_epochs=1, train_split=None))
    ours.partial_fit(X[few], names[y[few]], classes=names[::-1])
    np.testing.assert_array_equal(ours.classes_, names)
    ours.partial_fit(X[y == 2], names[y[y == 2]])
    assert set(ours.predict(X)) <= set(names)


def test_label_that_was_not_announced(client):
    """BR-58."""
    X, y = data()
    few = y < 2
    ours = estimator(client, net(module__n=3, max_epochs=1, train_split=None))
    ours.partial_fit(X[few], y[few])
    before = state(ours)
    with pytest.raises(ValueError, match=r"\[2\].*\[0, 1\]"):
        ours.partial_fit(X[y == 2], y[y == 2])
    assert all(torch.equal(value, before[name]) for name, value in state(ours).items())
    np.testing.assert_array_equal(ours.classes_, [0, 1])


def test_label_outside_the_announced_ones(client):
    X, y = data()
    ours = estimator(client, net(max_epochs=1))
    with pytest.raises(ValueError, match=r"\[2, 3"):
        ours.partial_fit(X, y, classes=[0, 1])


# fit, again


def test_fit_starts_anew(client):
    """BR-58: weights, optimizer, history and callbacks."""
    X, y = data()
    given = net(callbacks=CALLBACKS["schedule by batch"])
    ours = estimator(client, given)
    torch.manual_seed(0)
    first = ours.fit(X, y).net_
    torch.manual_seed(0)
    second = ours.fit(X, y).net_
    assert second is not first
    assert_same(second, first, within=0)


def test_fit_after_partial_fit_starts_anew(client):
    X, y = data()
    ours = estimator(client, net(max_epochs=1), random_state=0).partial_fit(X, y)
    first = state(ours)
    ours.fit(X, y)
    assert all(torch.equal(value, first[name]) for name, value in state(ours).items())
    assert len(ours.history_) == 1


@pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
def test_warm_start_goes_on(client, callbacks):
    X, y = data()
    given = net(callbacks=callbacks, max_epochs=2, warm_start=True)
    ours = estimator(client, given)
    torch.manual_seed(0)
    ours.fit(X, y).fit(X, y)
    plain = copy.deepcopy(given)
    torch.manual_seed(0)
    plain.fit(X, y).fit(X, y)
    assert_same(ours.net_, plain)
    if callbacks != CALLBACKS["stopping"]:
        assert len(ours.history_) == 4


def test_parameters_that_are_set_between_two_calls_count(client):
    """As in skorch, and as everywhere in scikit-learn."""
    X, y = data()
    given = net(max_epochs=1)
    ours = estimator(client, given)
    torch.manual_seed(0)
    ours.partial_fit(X, y)
    ours.set_params(net__max_epochs=2, net__lr=0.01, net__batch_size=16)
    ours.partial_fit(X, y)
    torch.manual_seed(0)
    plain = net(max_epochs=1).fit(X, y)
    plain.set_params(max_epochs=2, lr=0.01, batch_size=16).partial_fit(X, y)
    assert_same(ours.net_, plain)


def test_parameters_of_the_trained_net_that_are_set_between_two_calls_count(client):
    X, y = data()
    ours = estimator(client, net(max_epochs=1))
    torch.manual_seed(0)
    ours.partial_fit(X, y)
    ours.net_.set_params(lr=0.01)
    ours.partial_fit(X, y)
    torch.manual_seed(0)
    plain = net(max_epochs=1).fit(X, y)
    plain.set_params(lr=0.01).partial_fit(X, y)
    assert_same(ours.net_, plain)


# From skorch to daskps


@pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
@pytest.mark.parametrize("how", ["partial_fit", "warm_start"])
def test_net_of_skorch_goes_on(client, how, callbacks):
    """Optimizer state, schedule and history included; and the net that was given is not touched."""
    X, y = data()
    given = trained_by_skorch(net(callbacks=callbacks, max_epochs=2), X, y)
    plain = trained_by_skorch(net(callbacks=callbacks, max_epochs=2), X, y)
    before, history = state(given), copy.deepcopy(list(given.history))
    moments = copy.deepcopy(given.optimizer_.state_dict())
    if how == "partial_fit":
        ours = estimator(client, given).partial_fit(X, y)
    else:
        ours = estimator(client, given.set_params(warm_start=True)).fit(X, y)
    plain.partial_fit(X, y)
    assert_same(ours.net_, plain)
    assert all(torch.equal(value, before[name]) for name, value in state(given).items())
    assert list(given.history) == history
    assert_identical_content(given.optimizer_.state_dict(), moments)


def assert_identical_content(one, other):
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_identical_content(one[key], other[key])
    elif isinstance(other, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def test_net_of_skorch_is_not_continued_by_fit(client):
    X, y = data()
    given = trained_by_skorch(net(max_epochs=2), X, y, seed=3)
    ours, _ = compare(client, given)
    assert len(ours.history_) == 2
    assert len(given.history) == 2
    assert not identical(ours, given)


@pytest.mark.parametrize("initialised", [False, True])
def test_net_that_is_given_stays_bit_for_bit_what_it_is(client, initialised):
    X, y = data()
    torch.manual_seed(7)
    module = CNN3(dtype=torch.float64)
    given = net(module, callbacks=[("stop", EarlyStopping())])
    if initialised:
        given.initialize()
    before = pickle.dumps([value.numpy() for value in module.state_dict().values()])
    parameters = set(vars(given))
    for method in ("fit", "partial_fit"):
        getattr(estimator(client, given), method)(X, y)
        assert pickle.dumps([value.numpy() for value in module.state_dict().values()]) == before
        assert set(vars(given)) == parameters
        assert all(parameter.grad is None for parameter in module.parameters())
        assert not initialised or (len(given.history) == 0 and not given.optimizer_.state)


# From daskps to skorch


@pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
def test_net_of_daskps_goes_on_in_skorch(client, callbacks):
    X, y = data()
    given = net(callbacks=callbacks, max_epochs=2)
    ours = fit_daskps(client, given, X, y, n_workers=2)
    plain = trained_by_skorch(copy.deepcopy(given), X, y)
    ours.net_.partial_fit(X, y)
    plain.partial_fit(X, y)
    assert_same(ours.net_, plain)


def test_net_of_daskps_is_trained_anew_by_skorch(client):
    X, y = data()
    ours = fit_daskps(client, net(), X, y, n_workers=2)
    again = trained_by_skorch(ours.net_, X, y)
    assert_same(again, fit_plain(net(), X, y))


def test_net_of_daskps_works_alone(client):
    X, y = data()
    ours = fit_daskps(client, net(), X, y, n_workers=2)
    assert type(ours.net_) is NeuralNetClassifier
    plain = fit_plain(net(), X, y)
    np.testing.assert_array_equal(ours.net_.predict(X), plain.predict(X))
    np.testing.assert_array_equal(ours.net_.classes_, plain.classes_)
    assert ours.net_.score(X, y) == plain.score(X, y)
    assert repr(ours.net_) == repr(plain)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_files_of_a_net_of_daskps(client, tmp_path, optimizer):
    """Parameters, optimizer and history are saved, and loaded into a net of plain skorch."""
    X, y = data()
    ours = fit_daskps(client, net(**optimizer), X, y, n_workers=2)
    names = {f"f_{name}": str(tmp_path / name) for name in ("params", "optimizer", "criterion", "history")}
    ours.net_.save_params(**names)
    plain = net(**optimizer).initialize()
    plain.load_params(**names)
    assert identical(plain, ours)
    assert_same_optimizers(plain, ours.net_, within=0)
    assert_same_rows(plain.history, ours.history_, within=0)
    plain.partial_fit(X, y)
    ours.net_.partial_fit(X, y)
    assert_same(plain, ours.net_, within=0)


def test_files_of_a_net_of_skorch(client, tmp_path):
    X, y = data()
    plain = fit_plain(net(), X, y)
    names = {f"f_{name}": str(tmp_path / name) for name in ("params", "optimizer", "criterion", "history")}
    plain.save_params(**names)
    given = net().initialize()
    given.load_params(**names)
    ours = estimator(client, given).partial_fit(X, y)
    plain.partial_fit(X, y)
    assert_same(ours.net_, plain)


def test_history_in_a_file(client, tmp_path):
    X, y = data()
    ours = fit_daskps(client, net(), X, y, n_workers=2)
    ours.net_.history.to_file(str(tmp_path / "history.json"))
    assert list(History.from_file(str(tmp_path / "history.json"))) == list(ours.history_)
    assert ours.history_ is ours.net_.history


@pytest.mark.parametrize("kind", [Checkpoint, TrainEndCheckpoint])
def test_checkpoint_of_daskps_is_loaded_by_skorch(client, tmp_path, kind):
    X, y = data()
    checkpoint = kind(dirname=str(tmp_path))
    ours = fit_daskps(client, net(callbacks=[("cp", checkpoint)]), X, y, n_workers=2)
    plain = net().initialize()
    saved = checkpoint if kind is Checkpoint else dict(ours.net_.callbacks_)["cp"].checkpoint_
    plain.load_params(checkpoint=saved)
    assert identical(plain, ours)


@pytest.mark.parametrize("callbacks", CALLBACKS.values(), ids=CALLBACKS)
def test_pickled_estimator_goes_on(client, callbacks):
    X, y = data()
    ours = fit_daskps(client, net(callbacks=callbacks, max_epochs=2), X, y, n_workers=2)
    loaded = pickle.loads(pickle.dumps(ours)).set_params(client=client)
    ours.partial_fit(X, y)
    loaded.partial_fit(X, y)
    assert_same(loaded.net_, ours.net_, within=0)


class Remembers(Callback):
    """Keeps its findings under a name without an underscore at its end, as many do."""

    def on_train_begin(self, net, **kwargs):
        self.losses = []

    def on_epoch_end(self, net, **kwargs):
        self.losses.append(net.history[-1, "train_loss"])


def test_callback_with_attributes_that_are_no_parameters(client):
    X, y = data()
    ours = fit_daskps(client, net(callbacks=[("remembers", Remembers())]), X, y, n_workers=2)
    assert len(dict(ours.net_.callbacks_)["remembers"].losses) == 3
    ours.partial_fit(X, y)
    assert len(dict(ours.net_.callbacks_)["remembers"].losses) == 3
    loaded = pickle.loads(pickle.dumps(ours))
    assert dict(loaded.net_.callbacks_)["remembers"].losses == ours.history_[3:, "train_loss"]
    assert distance(copy.deepcopy(ours), ours) == 0


def test_balanced_classes_are_refused_in_partial_fit():
    """As by scikit-learn: a part of the rows does not tell how many there are of each class."""
    X, y = data()
    clf = DistributedCNNClassifier(net(), class_weight="balanced")
    with pytest.raises(
        ValueError, match=r"'balanced' is not supported for partial_fit.*compute_class_weight"
    ):
        clf.partial_fit(X, y)
