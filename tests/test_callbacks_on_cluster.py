"""Callbacks that skorch ships and callbacks of users, on two workers, against plain skorch."""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import threading
from contextlib import suppress

import dask
import joblib
import numpy as np
import pytest
import torch
from nets import read
from reference import distance, fit_daskps, fit_plain, identical
from sklearn.base import clone
from sklearn.metrics import accuracy_score, f1_score, make_scorer
from sklearn.model_selection import GridSearchCV
from skorch.callbacks import (
    BatchScoring,
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    Freezer,
    GradientNormClipping,
    Initializer,
    InputShapeSetter,
    LoadInitState,
    LRScheduler,
    MlflowLogger,
    ParamMapper,
    PassthroughScoring,
    ProgressBar,
    SacredLogger,
    TensorBoard,
    TrainEndCheckpoint,
    Unfreezer,
    WandbLogger,
)
from skorch.history import History
from skorch_parity import (
    N_STEPS,
    Begun,
    ClampWeights,
    CountsAllBatches,
    GradientNoise,
    GradientNorm,
    LoggedCheckpoint,
    LowerRate,
    Recorder,
    Shared,
    StopAt,
    StopAtGradient,
    TakesLargest,
    TellsMore,
    Tiny,
    Waiting,
    Witness,
    assert_same,
    assert_same_rows,
    compare,
    data,
    net,
    validation_loss,
)

from daskps import DaskpsError, DistributedCNNClassifier, on_ranks

# Schedules


def halves_lr(optimizer, **kwargs):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5, **kwargs)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "StepLR", "step_size": 2, "gamma": 0.5},
        {"policy": "CosineAnnealingLR", "T_max": 4},
        {"policy": "LambdaLR", "lr_lambda": lambda epoch: 0.9**epoch},
        {"policy": torch.optim.lr_scheduler.OneCycleLR, "max_lr": 0.1, "total_steps": 4 * N_STEPS + 1},
        {"policy": "CyclicLR", "base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4},
        {"policy": "ReduceLROnPlateau", "patience": 0, "threshold": 0.3, "factor": 0.5},
        {"policy": "WarmRestartLR", "base_period": 3},
        {"policy": "ExponentialLR", "gamma": 0.8},
        {"policy": "MultiStepLR", "milestones": [1, 3], "gamma": 0.3},
        {"policy": halves_lr},
    ],
    ids=lambda options: getattr(options["policy"], "__name__", options["policy"]),
)
@pytest.mark.parametrize("step_every", ["epoch", "batch"])
def test_learning_rate_schedules(client, options, step_every):
    schedule = LRScheduler(step_every=step_every, **options)
    ours, _ = compare(client, net(callbacks=[("lr", schedule)], max_epochs=4))
    rates = ours.history_[:, "event_lr"] if step_every == "epoch" else by_batch(ours, "event_lr")
    assert len(rates) == (4 if step_every == "epoch" else 4 * N_STEPS)
    assert len(set(rates)) > 1


def by_batch(fitted, key):
    return [row[key] for epoch in fitted.history_ for row in epoch["batches"] if key in row]


def test_plateau_of_the_validation_loss(client):
    """Lowers the rate because of a loss that the ranks know only in parts."""
    schedule = LRScheduler("ReduceLROnPlateau", monitor="valid_loss", patience=0, threshold=0.3, factor=0.5)
    ours, _ = compare(client, net(callbacks=[("lr", schedule)], max_epochs=5))
    assert 1 < len(set(ours.history_[:, "event_lr"])) < 5


def test_schedule_ends_exactly_at_its_last_step(client):
    """BR-38: one advance for each combined update, and no step beyond the last."""
    schedule = LRScheduler(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3 * N_STEPS, step_every="batch"
    )
    ours, plain = compare(client, net(callbacks=[("lr", schedule)], max_epochs=3))
    assert dict(ours.net_.callbacks_)["lr"].batch_idx_ == 3 * N_STEPS
    assert dict(ours.net_.callbacks_)["lr"].lr_scheduler_.last_epoch == 3 * N_STEPS
    assert dict(plain.callbacks_)["lr"].lr_scheduler_.last_epoch == 3 * N_STEPS


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_rates_do_not_depend_on_the_number_of_workers(client, n_workers):
    """BR-38."""
    schedule = LRScheduler("StepLR", step_size=1, gamma=0.5)
    ours, _ = compare(client, net(callbacks=[("lr", schedule)], lr=0.1), n_workers=n_workers)
    assert ours.history_[:, "event_lr"] == [0.1, 0.05, 0.025]


def test_two_schedules(client):
    """One on the client and one on the ranks, on the same optimizer."""
    by_epoch = LRScheduler("StepLR", step_size=1, gamma=0.5)
    by_step = LRScheduler("ExponentialLR", gamma=0.99, step_every="batch", event_name="event_step")
    compare(client, net(callbacks=[("epoch", by_epoch), ("step", by_step)]))


# Stopping, and keeping what was best


@pytest.mark.parametrize("load_best", [True, False])
def test_early_stopping(client, load_best):
    stopping = EarlyStopping(patience=2, threshold=0.2, load_best=load_best)
    ours, plain = compare(client, net(callbacks=[("stop", stopping)], max_epochs=20, lr=0.3))
    assert 3 <= len(ours.history_) < 20
    ours, plain = (dict(side.callbacks_)["stop"] for side in (ours.net_, plain))
    assert ours.best_epoch_ == plain.best_epoch_
    assert ours.best_epoch_ < 20


def test_early_stopping_of_a_net_with_callbacks_on_the_ranks(client):
    """They too learn that the training ends."""
    callbacks = [("norm", GradientNorm()), ("stop", EarlyStopping(patience=1, threshold=0.5))]
    ours, plain = compare(client, net(callbacks=callbacks, max_epochs=20))
    assert len(ours.history_) < 20
    ours, plain = (dict(side.callbacks_)["norm"] for side in (ours.net_, plain))
    assert ours.n_calls_ == plain.n_calls_
    assert plain.ended_
    assert ours.ended_


@pytest.mark.parametrize("max_norm", [0.1, 1.0])
def test_gradient_clipping(client, max_norm):
    """Of the combined gradient: each rank's own has another norm."""
    clipping = GradientNormClipping(max_norm)
    _, plain = compare(client, net(callbacks=[("clip", clipping)]))
    assert distance(plain, fit_plain(net(), *data())) > 1e-3


# Files


def files(directory):
    return sorted(path.name for path in directory.iterdir())


def assert_same_files(ours, plain):
    assert files(ours) == files(plain)
    for name in files(ours):
        if name.endswith(".json"):
            one, other = (History.from_file(str(side / name)) for side in (ours, plain))
            assert_same_rows(one, other)
        elif name.endswith(".pt"):
            one, other = (torch.load(side / name, weights_only=False) for side in (ours, plain))
            assert_same_content(one, other)


def assert_same_content(one, other):
    if isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_same_content(one[key], other[key])
    elif isinstance(other, torch.Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    else:
        assert one == other


def fit_as_it_is(given, X, y):
    torch.manual_seed(0)
    return given.fit(X, y)


@pytest.fixture
def both(client, tmp_path):
    """Fit in both ways, each into its own directory; returns both and what was saved."""

    def run(make, *args, **options):
        X, y = data()
        made = []
        for name in ("ours", "plain"):
            (tmp_path / name).mkdir(exist_ok=True)
            given = net(callbacks=make(str(tmp_path / name)), **{"max_epochs": 4, **options})
            # Not a clone: its callbacks no longer know each other.
            fit = fit_as_it_is if name == "plain" else functools.partial(fit_daskps, client, n_workers=2)
            made.append(fit(given, X, y))
        ours, plain = made
        assert_same(ours.net_, plain)
        assert_same_files(tmp_path / "ours", tmp_path / "plain")
        return ours, plain, tmp_path

    return run


def test_checkpoint_writes_the_same_files_as_often_and_on_the_client_alone(both):
    ours, _, directory = both(lambda path: [("cp", LoggedCheckpoint(dirname=path))])
    assert {"criterion.pt", "history.json", "optimizer.pt", "params.pt"} < set(files(directory / "ours"))
    saves, expected = read(directory / "ours" / "saves"), read(directory / "plain" / "saves")
    assert len(saves) == len(expected) == sum(ours.history_[:, "event_cp"])
    assert {save["pid"] for save in saves} == {os.getpid()}


def test_checkpoint_by_a_function_into_files_of_every_epoch(both):
    def make(path):
        monitor = lambda net: len(net.history) % 2 == 0  # noqa: E731
        return [("cp", Checkpoint(monitor, f_params="params_{last_epoch[epoch]}.pt", dirname=path))]

    _, _, directory = both(make)
    assert {"params_2.pt", "params_4.pt"} <= set(files(directory / "ours"))


def test_checkpoint_loads_the_best(both):
    def make(path):
        return [("cp", Checkpoint(dirname=path, load_best=True))]

    ours, _, _ = both(make, lr=0.7)
    assert len(ours.history_) < 4  # it comes with the history until then
    assert validation_loss(ours.net_, *data()) == pytest.approx(ours.history_[-1, "valid_loss"], abs=1e-10)


def test_checkpoint_pickles_a_net_that_works(both):
    def make(path):
        return [("cp", Checkpoint(monitor=None, f_pickle="net.pkl", dirname=path))]

    ours, _, directory = both(make)
    loaded = []
    for name in ("ours", "plain"):
        with open(directory / name / "net.pkl", "rb") as file:
            loaded.append(pickle.load(file))
    assert distance(*loaded) <= 1e-10
    assert distance(loaded[0], ours) == 0


def test_checkpoint_at_the_end(both):
    ours, _, directory = both(lambda path: [("cp", TrainEndCheckpoint(dirname=path))])
    saved = torch.load(directory / "ours" / "train_end_params.pt")
    assert distance_of(saved, ours.net_.module_.state_dict()) == 0


def distance_of(one, other):
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


@pytest.mark.parametrize("kind", [Checkpoint, TrainEndCheckpoint])
def test_initial_state_from_a_checkpoint(both, kind):
    """Weights, momentum and history go on, and the second training is as long as the first."""

    def make(path):
        checkpoint = kind(dirname=path)
        return [("load", LoadInitState(checkpoint)), ("cp", checkpoint)]

    first, _, _ = both(make)
    second, plain, _ = both(make)
    assert len(first.history_) == 4
    assert len(second.history_) == len(plain.history) > 4


def test_initial_state_with_a_schedule_on_the_ranks(both):
    def make(path):
        checkpoint = TrainEndCheckpoint(dirname=path)
        schedule = LRScheduler("ExponentialLR", gamma=0.97, step_every="batch")
        return [("load", LoadInitState(checkpoint)), ("cp", checkpoint), ("lr", schedule)]

    both(make)
    both(make)


# Scores


def loss_of_all(net, X, y):
    """A scorer that is a function."""
    return float(((net.predict_proba(X).argmax(1) - y) ** 2).mean())


@pytest.mark.parametrize("use_caching", [True, False])
@pytest.mark.parametrize("on_train", [True, False])
@pytest.mark.parametrize(
    "scoring",
    ["f1_macro", "neg_log_loss", accuracy_score, make_scorer(f1_score, average="micro"), loss_of_all, None],
    ids=["name", "of probabilities", "metric", "make_scorer", "function", "none"],
)
def test_epoch_scoring(client, scoring, on_train, use_caching):
    score = EpochScoring(
        scoring, on_train=on_train, use_caching=use_caching, lower_is_better=False, name="mine"
    )
    ours, _ = compare(client, net(callbacks=[("score", score)], predict_nonlinearity=probabilities))
    assert len(ours.history_[:, "mine"]) == 3
    assert ours.history_[0, "mine_best"]


def probabilities(logits):
    return logits.softmax(1)


@pytest.mark.parametrize(("on_train", "use_caching"), [(True, True), (False, True), (False, False)])
def test_batch_scoring(client, on_train, use_caching):
    score = BatchScoring(
        "accuracy", on_train=on_train, use_caching=use_caching, lower_is_better=False, name="mine"
    )
    ours, _ = compare(client, net(callbacks=[("score", score)]))
    assert len(by_batch(ours, "mine")) == 3 * (N_STEPS if on_train else 2)


def test_score_of_every_batch_made_by_a_user(client):
    """As skorch's documentation shows it: a value of the batches, passed on to the epoch."""
    callbacks = [("largest", TakesLargest()), ("pass", PassthroughScoring("largest", on_train=False))]
    ours, _ = compare(client, net(net_class=TellsMore, callbacks=callbacks))
    assert len(ours.history_[:, "largest"]) == 3


@pytest.mark.parametrize("caches", [True, False])
def test_net_decides_on_caching(client, caches):
    """The net's ``use_caching`` counts more than the callback's."""
    callbacks = [
        ("train", EpochScoring("accuracy", on_train=True, name="train_acc", use_caching=not caches)),
        ("valid", BatchScoring("accuracy", name="batch_acc", use_caching=not caches)),
    ]
    compare(client, net(callbacks=callbacks, use_caching=caches))


def test_training_scores_by_the_nets_caching(client):
    score = BatchScoring("accuracy", on_train=True, name="batch_acc", use_caching=False)
    compare(client, net(callbacks=[("score", score)], use_caching=True))


# What a user sees


def without_durations(text):
    """The printed table without its last column, the time."""
    return [line.rsplit(maxsplit=1)[0] for line in text.splitlines() if line.strip()]


def test_printed_log(client, capfd):
    X, y = data()
    stopping = EarlyStopping(patience=1, threshold=0.5)
    given = net(callbacks=[("stop", stopping)], max_epochs=5, verbose=1)
    fit_plain(given, X, y)
    expected = capfd.readouterr().out
    fit_daskps(client, given, X, y, n_workers=2)
    printed = capfd.readouterr().out
    assert without_durations(printed) == without_durations(expected)
    assert "Stopping since valid_loss" in printed


def test_nothing_is_printed_when_not_verbose(client, capfd):
    fit_daskps(client, net(verbose=0), *data(), n_workers=2)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("batches_per_epoch", ["auto", "count", N_STEPS + 2])
def test_progress_bar(client, batches_per_epoch):
    ours, plain = compare(client, net(callbacks=[("bar", ProgressBar(batches_per_epoch))]))
    ours, plain = (dict(side.callbacks_)["bar"].pbar_ for side in (ours.net_, plain))
    assert ours.n == plain.n == N_STEPS + 2
    assert ours.total == plain.total
    assert ours.postfix == plain.postfix
    assert "valid_loss" in ours.postfix


# Parameters


@pytest.mark.parametrize(
    "callbacks",
    [
        [Freezer("layers.0.*")],
        [Freezer("layers.0.*"), Unfreezer("layers.0.*", at=3)],
        [Freezer("layers.4.*", at=2)],
        [Freezer(["layers.0.*", "layers.4.bias"], at=lambda net: len(net.history) > 1)],
        [Initializer("layers.4.weight", fn=lambda weight: torch.nn.init.constant_(weight, 0.01))],
        [ParamMapper("layers.*", fn=lambda p: p.data.mul_(0.5), at=lambda net: len(net.history) == 2)],
        [ParamMapper("*bias", schedule=lambda net: torch.nn.init.zeros_ if len(net.history) == 3 else abs)],
    ],
    ids=["freeze", "unfreeze", "freeze late", "freeze by a function", "initialise", "halve", "schedule"],
)
def test_parameters(client, callbacks):
    named = [(str(number), callback) for number, callback in enumerate(callbacks)]
    _, plain = compare(client, net(callbacks=named, max_epochs=4))
    assert distance(plain, fit_plain(net(max_epochs=4), *data())) > 1e-3


def test_frozen_parameters_do_not_change(client):
    torch.manual_seed(0)
    first = net().initialize().module_.layers[0].weight.detach().clone()
    ours, _ = compare(client, net(callbacks=[("freeze", Freezer("layers.0.*"))]))
    assert torch.equal(ours.net_.module_.layers[0].weight, first)


def test_input_shape_is_set_from_the_data(client):
    X, y = data()
    setter = InputShapeSetter()
    ours, _ = compare(client, net(Tiny, callbacks=[("shape", setter)]), X.reshape(len(X), 64), y)
    assert ours.net_.module_.first.in_features == 64


def test_input_shape_and_a_random_state(client):
    """The weights that a callback makes anew come from the seed as well."""
    X, y = data()
    given = net(Tiny, callbacks=[("shape", InputShapeSetter())])
    X = X.reshape(-1, 64)
    one, other = (fit_daskps(client, given, X, y, seed, n_workers=2, random_state=0) for seed in (1, 2))
    assert distance(one, other) == 0


def test_initializer_and_a_random_state(client):
    given = net(callbacks=[("init", Initializer("*.weight", fn=torch.nn.init.xavier_normal_))])
    one, other = (fit_daskps(client, given, *data(), seed, n_workers=2, random_state=0) for seed in (1, 2))
    assert distance(one, other) == 0


# Loggers


def numbers_and_words(value):
    """The numbers in a structure, and everything else, in order."""
    if isinstance(value, dict):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        parts = [numbers_and_words(part) for part in value]
        return [n for numbers, _ in parts for n in numbers], [w for _, words in parts for w in words]
    return ([value], []) if isinstance(value, float) else ([], [str(value)])


@pytest.mark.parametrize(
    "make",
    [
        lambda recorder: TensorBoard(recorder, keys_ignored=["dur"]),
        lambda recorder: SacredLogger(recorder, log_on_batch_end=True, keys_ignored=["dur"]),
        lambda recorder: WandbLogger(recorder, save_model=False, keys_ignored=["dur"]),
        lambda recorder: MlflowLogger(
            recorder, recorder, create_artifact=False, log_on_batch_end=True, keys_ignored=["dur"]
        ),
    ],
    ids=["tensorboard", "sacred", "wandb", "mlflow"],
)
def test_loggers_log_the_same(client, make):
    """With the service's client replaced by one that keeps the calls."""
    records = []
    X, y = data()
    for fit in (fit_plain, lambda *args: fit_daskps(client, *args, n_workers=2)):
        recorder = Recorder()
        fit(net(callbacks=[("log", make(recorder))]), X, y)
        records.append(numbers_and_words(recorder.calls))
    (values, words), (our_values, our_words) = records
    assert our_words == words
    np.testing.assert_allclose(our_values, values, rtol=0, atol=1e-10)
    assert len(values) >= 9


def test_tensorboard_writes_events(client, tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    X, y = data()

    class Writer(tensorboard.SummaryWriter):
        def __deepcopy__(self, memo):
            return self

    given = net(callbacks=[("log", TensorBoard(Writer(str(tmp_path))))])
    fit_daskps(client, given, X, y, n_workers=2)
    assert files(tmp_path)


# Callbacks of users: on the client


def test_hooks_on_the_client_see_what_they_see_in_skorch(client):
    """All of them, in the same order, with the rows, the losses and the rows of the history."""
    ours, plain = compare(client, net(callbacks=[("witness", Witness())]))
    ours, plain = (dict(side.callbacks_)["witness"].calls_ for side in (ours.net_, plain))
    assert len(ours) == len(plain)
    for call, expected in zip(ours, plain, strict=True):
        assert len(call) == len(expected)
        for value, expected_value in zip(call, expected, strict=True):
            assert_same_seen(value, expected_value)


def assert_same_seen(value, expected):
    if isinstance(expected, dict):
        assert value.keys() == expected.keys()
        for key in expected:
            assert_same_seen(value[key], expected[key])
    elif isinstance(expected, (float, np.ndarray)):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)
    else:
        assert value == expected


def test_net_in_the_epoch_hooks_is_that_of_plain_skorch(client):
    seen = {}

    def note(net, side):
        seen.setdefault(side, []).append(net.module_.layers[4].weight.detach().clone())

    X, y = data()
    for side, fit in (("plain", fit_plain), ("ours", lambda *args: fit_daskps(client, *args, n_workers=2))):

        class Note(Callback):
            def on_epoch_end(self, net, side=side, **kwargs):
                note(net, side)

        fit(net(callbacks=[("note", Note())]), X, y)
    for one, other in zip(seen["ours"], seen["plain"], strict=True):
        assert (one - other).abs().max() <= 1e-10


def test_change_between_epochs_reaches_the_ranks(client):
    class Halves(Callback):
        def on_epoch_end(self, net, **kwargs):
            for parameter in net.module_.parameters():
                parameter.data.mul_(0.5)

    compare(client, net(callbacks=[("halves", Halves())]))


def test_change_of_the_rate_between_epochs_reaches_the_ranks(client):
    class Slower(Callback):
        def on_epoch_begin(self, net, **kwargs):
            net.optimizer_.param_groups[0]["lr"] = 0.1 / len(net.history)

    compare(client, net(callbacks=[("slower", Slower())]))


def test_net_reinitialised_between_epochs(client):
    """Its replicas are of the wrong shape then, and are built anew."""

    class Widens(Callback):
        def on_epoch_begin(self, net, **kwargs):
            if len(net.history) == 2:
                torch.manual_seed(3)
                net.set_params(module__input_dim=64, module__n=11)

    X, y = data()
    given = net(Tiny, module__input_dim=64, callbacks=[("widens", Widens())])
    compare(client, given, X.reshape(-1, 64), y)


# Callbacks of users: on the ranks


def test_gradients_are_seen_on_the_ranks(client):
    """What is recorded there lands in the history, and the attributes come back."""
    ours, plain = compare(client, net(callbacks=[("norm", GradientNorm())]))
    assert ours.history_[:, "n_calls"] == [N_STEPS, 2 * N_STEPS, 3 * N_STEPS]
    assert len(by_batch(ours, "norm")) == 3 * N_STEPS
    ours, plain = (dict(side.callbacks_)["norm"] for side in (ours.net_, plain))
    assert vars(ours) == vars(plain)


def test_random_numbers_of_a_callback_on_the_ranks_are_the_same_on_all(client):
    """Or their parameters would drift apart."""
    one, other = (
        fit_daskps(client, net(callbacks=[("noise", noise)]), *data(), n_workers=2, random_state=0)
        for noise in (GradientNoise(), on_ranks(GradientNoise()))
    )
    assert identical(one, other)
    assert distance(one, fit_daskps(client, net(), *data(), n_workers=2, random_state=0)) > 1e-3


def test_parameters_set_when_the_training_begins(client):
    """Before the data is split and cut."""

    class Sets(Callback):
        def on_train_begin(self, net, X=None, **kwargs):
            net.set_params(batch_size=16, max_epochs=2, module__input_dim=X.shape[1])

    X, y = data()
    compare(client, net(Tiny, callbacks=[("sets", Sets())]), X.reshape(len(X), 64), y)


@pytest.mark.parametrize("max_epochs", [0, 1])
def test_callbacks_on_the_ranks_when_hardly_anything_is_trained(client, max_epochs):
    compare(client, net(callbacks=[("norm", GradientNorm())], max_epochs=max_epochs))


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": "disable"},
        {"callbacks": [("stop", EarlyStopping), ("norm", GradientNorm)]},
        {"callbacks__print_log": None, "callbacks__valid_acc": None},
        {"callbacks": [("mine", EpochScoring("accuracy"))], "callbacks__mine__name": "other"},
    ],
    ids=["disabled", "classes", "without some", "by name"],
)
def test_callbacks_given_in_every_way(client, options):
    compare(client, net(**options))


def test_validation_batches_of_a_callback_on_the_ranks(client):
    """What it records of a validation batch is not put down to a training batch."""
    ours, plain = compare(client, net(callbacks=[("counts", CountsAllBatches())]))
    assert by_batch(ours, "seen") == by_batch(plain, "seen")


def test_wrapped_callback_equals_plain_skorch(client):
    clamped, plain = compare(client, net(callbacks=[("clamp", on_ranks(ClampWeights()))]))
    assert distance(plain, fit_plain(net(callbacks=[("clamp", ClampWeights())]), *data())) == 0
    assert max(p.abs().max().item() for p in clamped.net_.module_.parameters()) <= 0.05


def test_wrapped_callback_that_sets_the_rate_equals_plain_skorch(client):
    ours, _ = compare(client, net(callbacks=[("rate", on_ranks(LowerRate()))]))
    expected = 0.05 * 0.9 ** (3 * N_STEPS)
    assert ours.net_.optimizer_.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize("callback", [ClampWeights(), LowerRate()], ids=["parameters", "learning rate"])
def test_change_in_a_replayed_hook_is_an_error_that_names_the_remedy(client, callback):
    with pytest.raises(DaskpsError, match="on_ranks"):
        fit_daskps(client, net(callbacks=[("changes", callback)]), *data(), n_workers=2)


def test_two_wrapped_callbacks_without_names(client):
    compare(client, net(callbacks=[on_ranks(ClampWeights()), on_ranks(LowerRate())]))


# Stopping and failing


def test_keyboard_interrupt_at_the_end_of_an_epoch(client):
    compare(client, net(callbacks=[("stop", StopAt("on_epoch_end"))], max_epochs=4))


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_batch_begin", "on_batch_end"])
def test_keyboard_interrupt_keeps_the_last_whole_epoch(client, hook):
    X, y = data()
    ours = fit_daskps(client, net(callbacks=[("stop", StopAt(hook))], max_epochs=4), X, y, n_workers=2)
    plain = fit_plain(net(max_epochs=1), X, y)
    assert_same(ours.net_, plain)
    assert ours.score(X, y) == accuracy_score(y, plain.predict(X))


def test_keyboard_interrupt_in_a_validation_batch(client):
    """As in skorch: the epoch's training is over, and is kept."""
    ours, _ = compare(client, net(callbacks=[("stop", StopAt("on_batch_end", batch=N_STEPS + 1))]))
    assert len(ours.history_) == 2
    assert "valid_loss" not in ours.history_[-1]


@pytest.mark.parametrize("n_workers", [1, 2])
def test_keyboard_interrupt_on_the_ranks(client, n_workers):
    """It stops the training, not the worker."""
    X, y = data()
    before = client.scheduler_info()["workers"].keys()
    stop = StopAtGradient(N_STEPS + 3)
    given = net(callbacks=[("stop", stop)], max_epochs=4)
    ours = fit_daskps(client, given, X, y, n_workers=n_workers)
    assert_same(ours.net_, fit_plain(net(max_epochs=1), X, y))
    assert client.scheduler_info()["workers"].keys() == before


def test_keyboard_interrupt_stops_the_ranks(client, tmp_path):
    """In the middle of a long epoch, of which they have most steps to go."""
    X, y = data(1003)
    n_steps = len(y) // 4
    path, gate = str(tmp_path / "log"), tmp_path / "gate"
    stop = StopAt("on_batch_end", epoch=1, batch=1)
    given = net(
        Waiting, module__path=path, module__gate=str(gate), callbacks=[("stop", stop)],
        iterator_train__drop_last=True, batch_size=4, train_split=None,
    )  # fmt: skip
    with dask.config.set({"daskps.report-interval": "1ms"}):
        ours = fit_daskps(client, given, X, y)
    gate.touch()
    assert len(ours.history_) == 0
    compare(client, net(), n_workers=4)  # all have left, and the cluster is as usable as before
    assert len(read(path)) < n_steps  # of K times as many


@pytest.mark.parametrize("hook", ["on_epoch_begin", "on_epoch_end", "on_batch_begin", "on_batch_end"])
def test_exception_of_a_callback_reaches_the_caller(client, hook):
    given = net(callbacks=[("fails", StopAt(hook, error=ZeroDivisionError))])
    with pytest.raises(ZeroDivisionError, match="stop"):
        fit_daskps(client, given, *data(), n_workers=2)
    compare(client, net())


def test_exception_of_a_callback_on_a_rank_reaches_the_caller_and_says_where(client):
    given = net(callbacks=[("fails", StopAtGradient(N_STEPS + 3, ZeroDivisionError))])
    with pytest.raises(ZeroDivisionError, match="stop") as caught:
        fit_daskps(client, given, *data(), n_workers=2)
    notes = " ".join(caught.value.__notes__)
    assert re.search(rf"rank [01] of 2, epoch 2, step 3 of {N_STEPS}", notes)
    assert "tcp://" in notes
    compare(client, net())


# Refused, with the reason


@pytest.mark.parametrize(
    ("options", "fit", "message"),
    [
        (
            {"callbacks": [("score", BatchScoring("accuracy", on_train=True, use_caching=False))]},
            {},
            "'score'.*use_caching=False.*middle of an epoch",
        ),
        (
            {"callbacks": [("score", BatchScoring("accuracy", on_train=True))], "use_caching": False},
            {},
            "'score'.*use_caching=False.*middle of an epoch",
        ),
        (
            {"callbacks": [("lr", LRScheduler("ReduceLROnPlateau", step_every="batch"))]},
            {"sync_every": "epoch"},
            "'lr'.*sync_every='batch'.*step_every='epoch'",
        ),
        (
            {
                "callbacks": [
                    ("lr", LRScheduler(torch.optim.lr_scheduler.ReduceLROnPlateau, step_every="batch"))
                ]
            },
            {"sync_every": 3},
            "'lr'.*sync_every='batch'.*step_every='epoch'",
        ),
    ],
    ids=["batch scoring", "batch scoring by the net", "plateau", "plateau every 3 steps"],
)
def test_callbacks_that_cannot_work(client, options, fit, message):
    with pytest.raises(ValueError, match=message):
        fit_daskps(client, net(**options), *data(), n_workers=2, **fit)


def test_schedule_made_by_a_partial_function(client):
    """It has no name to tell a plateau by."""
    policy = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5)
    given = net(callbacks=[("lr", LRScheduler(policy, step_every="batch"))])
    compare(client, given)
    ours = fit_daskps(client, given, *data(), n_workers=2, sync_every="epoch")
    assert len(set(by_batch(ours, "event_lr"))) > 1


@pytest.mark.parametrize(
    ("name", "callback"),
    [
        ("stop", EarlyStopping()),
        ("cp", Checkpoint(monitor="valid_loss_best")),
        ("cp", Checkpoint(monitor="valid_acc_best")),
        ("lr", LRScheduler("ReduceLROnPlateau", monitor="valid_loss")),
    ],
    ids=["early stopping", "checkpoint", "checkpoint by accuracy", "plateau"],
)
def test_callback_that_needs_validation_rows_where_there_are_none(client, tmp_path, name, callback):
    """BR-35."""
    if isinstance(callback, Checkpoint):
        callback.dirname = str(tmp_path)
    begun = Begun()
    given = net(callbacks=[(name, callback), ("begun", begun)], train_split=None)
    with pytest.raises(ValueError, match=f"'{name}'.*'valid_.*train_split"):
        fit_daskps(client, given, *data(), n_workers=2)
    assert not begun.epochs, "only after an epoch"


def test_search_over_a_net_that_needs_validation_rows(client):
    """BR-35: the folds of the search are no validation rows of the net."""
    given = net(callbacks=[("stop", EarlyStopping())], train_split=None, max_epochs=1)
    estimator = DistributedCNNClassifier(given, client=client, n_workers=2)
    search = GridSearchCV(estimator, {"net__lr": [0.1]}, cv=3)
    with pytest.raises(ValueError, match=r"'stop'.*'valid_loss'.*train_split"):
        search.fit(*data())


def test_training_scores_need_no_validation_rows(client):
    score = EpochScoring("accuracy", on_train=True, name="train_acc", lower_is_better=False)
    stop = EarlyStopping("train_acc", patience=1, lower_is_better=False, threshold=0.5)
    compare(client, net(callbacks=[("score", score), ("stop", stop)], train_split=None, max_epochs=9))


# BR-31: callbacks that are hard to copy


def test_progress_bar_is_pickled_and_cloned(client):
    given = net(callbacks=[("bar", ProgressBar())], max_epochs=1)
    X, y = data()
    ours = fit_daskps(client, given, X, y, n_workers=2)
    assert distance(pickle.loads(pickle.dumps(ours)), ours) == 0
    assert not hasattr(clone(ours), "net_")
    search = GridSearchCV(ours, {"net__lr": [0.1, 0.01]}, cv=2, n_jobs=1, error_score="raise").fit(X, y)
    assert pickle.loads(pickle.dumps(search)).best_params_ == search.best_params_


class OpensFile(Callback):
    """Holds something that cannot be copied, while it trains and afterwards."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, net, **kwargs):
        self.file_ = open(self.path, "a")  # noqa: SIM115

    def on_epoch_end(self, net, **kwargs):
        self.file_.write("epoch\n")

    def on_train_end(self, net, **kwargs):
        self.file_.close()


class HoldsLock(Callback):
    def __init__(self):
        self.lock_ = threading.Lock()


class TakesLock(Callback):
    def __init__(self, lock):
        self.lock = lock


def test_callback_that_opens_a_file_works_on_the_client(client, tmp_path):
    X, y = data()
    path = str(tmp_path / "log")
    ours, _ = compare(client, net(callbacks=[("file", OpensFile(path))], max_epochs=1))
    assert len((tmp_path / "log").read_text().splitlines()) == 2
    GridSearchCV(clone(ours), {"net__lr": [0.1, 0.01]}, cv=2, n_jobs=1, error_score="raise").fit(X, y)
    with pytest.raises(TypeError, match="'file'"):
        pickle.dumps(ours)


def test_callback_that_makes_a_lock_works_on_the_client(client):
    compare(client, net(callbacks=[("lock", HoldsLock())], max_epochs=1))


def test_callback_that_is_given_a_lock_is_refused_by_name_before_any_epoch(client):
    begun = Begun()
    given = net(callbacks=[("begun", begun)])
    given.callbacks.append(("holder", TakesLock(threading.Lock())))
    with pytest.raises(TypeError, match="'holder'"):
        fit_daskps(client, given, *data(), n_workers=2)
    assert not begun.epochs


class FileOnRanks(OpensFile):
    def on_grad_computed(self, net, named_parameters, **kwargs):
        pass


def test_callback_on_the_ranks_that_cannot_come_back_is_refused_by_name(client, tmp_path):
    given = net(callbacks=[("file", FileOnRanks(str(tmp_path / "log")))])
    with pytest.raises(TypeError, match="'file'"):
        fit_daskps(client, given, *data(), n_workers=2)
    compare(client, net())


# BR-32: two fits that write to the same files


class Meets(Callback):
    """Keeps two fits side by side, for as long as there are two."""

    def __init__(self, barrier):
        self.barrier = barrier

    def __sklearn_clone__(self):
        return self

    def on_epoch_end(self, net, **kwargs):
        with suppress(threading.BrokenBarrierError):
            self.barrier.wait(timeout=1)


class LossAtEnd(Callback):
    """The validation loss of the net that is left at the end, and the best that there was."""

    def __init__(self, losses):
        self.losses = losses

    def on_epoch_end(self, net, **kwargs):
        self.best_ = min(net.history[:, "valid_loss"])

    def on_train_end(self, net, X=None, y=None, **kwargs):
        self.losses.append((validation_loss(net, X, y), self.best_))


def test_checkpoints_of_a_search_in_threads(client, tmp_path):
    X, y = data()
    fit_daskps(client, net(max_epochs=1), X, y, n_workers=4)  # so that none has to load torch first
    checkpoint = Checkpoint(dirname=str(tmp_path), load_best=True)
    losses = Shared()
    callbacks = [("cp", checkpoint), ("meet", Meets(threading.Barrier(2))), ("end", LossAtEnd(losses))]
    given = net(callbacks=callbacks, max_epochs=4)
    estimator = DistributedCNNClassifier(given, client=client, n_workers=2)
    search = GridSearchCV(estimator, {"net__lr": [0.5, 1e-4]}, cv=2, n_jobs=2, error_score="raise")
    with joblib.parallel_backend("threading"):
        search.fit(X, y)
    assert len(losses) == 5
    for loss, best in losses:
        assert loss == pytest.approx(best, abs=1e-10)


# BR-56: a history that can be written down


def test_history_is_plain_numbers_and_words(client, tmp_path):
    callbacks = [
        ("lr", LRScheduler("StepLR", step_size=1, gamma=0.5)),
        ("steps", LRScheduler("ExponentialLR", gamma=0.9, step_every="batch", event_name="event_step")),
        ("train_acc", EpochScoring("accuracy", on_train=True, name="train_acc")),
        ("norm", GradientNorm()),
    ]
    for sync_every in ("batch", "epoch", 2):
        ours = fit_daskps(client, net(callbacks=callbacks), *data(), n_workers=2, sync_every=sync_every)
        for row in ours.history_:
            for values in (row, *row["batches"]):
                for key, value in values.items():
                    assert key == "batches" or isinstance(value, (bool, int, float, str)), key
        path = str(tmp_path / f"{sync_every}.json")
        ours.history_.to_file(path)
        assert list(History.from_file(path)) == json.loads(json.dumps(list(ours.history_)))


def test_value_that_cannot_be_written_is_the_users_own(client, tmp_path):
    """As in skorch: training goes on, writing fails."""
    score = EpochScoring(lambda net, X, y: np.float32(0.5), name="odd")
    ours = fit_daskps(client, net(callbacks=[("odd", score)], max_epochs=1), *data(), n_workers=2)
    with pytest.raises(TypeError, match="float32"):
        ours.history_.to_file(str(tmp_path / "history.json"))


# Local steps: how many rows a history has, and how often a schedule advances


@pytest.mark.parametrize("sync_every", ["epoch", 2])
@pytest.mark.parametrize("n_workers", [2, 3])
def test_history_of_local_steps(client, sync_every, n_workers):
    """T rows for the T steps of each rank; a row's size is the sum over the ranks."""
    X, y = data()
    n_train, n_valid = 162, 41
    schedule = LRScheduler("ExponentialLR", gamma=0.9, step_every="batch")
    score = EpochScoring("accuracy", on_train=True, name="train_acc", lower_is_better=False)
    given = net(callbacks=[("lr", schedule), ("score", score)], batch_size=16)
    ours = fit_daskps(client, given, X, y, n_workers=n_workers, sync_every=sync_every)
    longest = -(-n_train // n_workers)
    n_steps = -(-longest // 16)
    for epoch in ours.history_:
        assert epoch["train_batch_count"] == n_steps
        assert epoch["valid_batch_count"] == -(-n_valid // 16)
        sizes = [row["train_batch_size"] for row in epoch["batches"] if "train_batch_size" in row]
        assert len(sizes) == n_steps
        assert sum(sizes) == n_train
        assert max(sizes) <= 16 * n_workers
        losses = [row["train_loss"] for row in epoch["batches"] if "train_loss" in row]
        assert epoch["train_loss"] == pytest.approx(np.average(losses, weights=sizes))
        assert 0 < epoch["train_acc"] <= 1
    rates = by_batch(ours, "event_lr")
    np.testing.assert_allclose(rates, 0.05 * 0.9 ** np.arange(3 * n_steps))
    assert dict(ours.net_.callbacks_)["lr"].batch_idx_ == 3 * n_steps


def test_schedule_by_epoch_of_local_steps(client):
    schedule = LRScheduler("StepLR", step_size=1, gamma=0.5)
    given = net(callbacks=[("lr", schedule)], lr=0.1)
    ours = fit_daskps(client, given, *data(), n_workers=2, sync_every="epoch")
    assert ours.history_[:, "event_lr"] == [0.1, 0.05, 0.025]
