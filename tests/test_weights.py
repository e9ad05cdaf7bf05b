"""Sample and class weights: what they mean, where they go, and what is refused."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
from nets import CNN3, Flat, OwnCriterion, Softmax, WithPenalty
from reference import digits, distance, fit_daskps, identical, make_net, separable, state
from sklearn import config_context
from sklearn.base import clone
from sklearn.ensemble import AdaBoostClassifier
from sklearn.exceptions import UnsetMetadataPassedError
from sklearn.model_selection import KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.validation import has_fit_parameter
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier
from torch import nn

from daskps import DistributedCNNClassifier
from daskps._weights import WeightedRows, sample_weights, weighted_loss

DOUBLE = {"module__dtype": torch.float64}

# Whatever the mode, how rows get to the ranks and in which order.
WAYS = {
    "batch": {},
    "batch-shuffle": {"shuffle": True},
    "epoch": {"sync_every": "epoch"},
    "epoch-shuffle": {"sync_every": "epoch", "shuffle": True},
    "two": {"sync_every": 2},
    "dask-batch": {"chunks": 30},
    "dask-epoch-shuffle": {"chunks": 50, "sync_every": "epoch", "shuffle": True},
}


class TestSampleWeights:
    y = np.array(["a", "a", "a", "b"])

    @pytest.mark.parametrize("given", [None, np.ones(4), np.full(4, 0.3), np.full(4, 7)])
    def test_that_are_all_the_same_are_none(self, given):
        assert sample_weights(given, None, self.y) is None

    def test_are_what_was_given(self):
        given = np.array([0.0, 1.0, 2.0, 3.0])
        np.testing.assert_array_equal(sample_weights(given, None, self.y), given)

    def test_of_balanced_classes(self):
        expected = [2 / 3, 2 / 3, 2 / 3, 2]
        np.testing.assert_allclose(sample_weights(None, "balanced", self.y), expected)
        assert sample_weights(None, "balanced", np.array(["a", "b"])) is None

    def test_of_named_classes(self):
        np.testing.assert_array_equal(sample_weights(None, {"b": 5}, self.y), [1, 1, 1, 5])

    def test_multiply(self):
        given = np.array([0.0, 1.0, 2.0, 3.0])
        np.testing.assert_array_equal(sample_weights(given, {"b": 5}, self.y), [0, 1, 2, 15])

    def test_that_undo_each_other_are_none(self):
        assert sample_weights(np.array([5, 5, 5, 1.0]), {"b": 5}, self.y) is None

    @pytest.mark.parametrize("class_weight", ["Balanced", [1, 2], 3])
    def test_of_classes_in_another_form_are_refused(self, class_weight):
        with pytest.raises(ValueError, match=r"'class_weight' .* None, 'balanced' or a dict, got"):
            sample_weights(None, class_weight, self.y)

    @pytest.mark.parametrize("class_weight", [{"a": w} for w in ("b", -1, np.nan, np.inf)])
    def test_of_classes_that_are_no_weights_are_refused(self, class_weight):
        with pytest.raises(ValueError, match=r"'class_weight' .* finite numbers that are not negative"):
            sample_weights(None, class_weight, self.y)

    def test_that_leave_no_row_are_refused(self):
        with pytest.raises(ValueError, match="every row has the weight 0"):
            sample_weights(np.array([1, 1, 1, 0.0]), {"a": 0}, self.y)


class TestWeightedLoss:
    losses = torch.tensor([1.0, 2.0, 4.0])

    def test_is_the_weighted_sum_over_the_total(self):
        weights = torch.tensor([3.0, 0.0, 1.0], dtype=torch.float64)
        loss = weighted_loss(self.losses, weights, 4.0)
        assert loss.item() == 7 / 4
        assert loss.dtype == torch.float32

    def test_of_nothing_is_0(self):
        assert weighted_loss(self.losses, torch.zeros(3), 0.0).item() == 0

    def test_of_several_losses_a_row_takes_their_mean(self):
        losses = torch.tensor([[1.0, 3.0], [10.0, 20.0]])
        loss = weighted_loss(losses, torch.tensor([1.0, 2.0]), 3.0)
        assert loss.item() == pytest.approx((2 + 2 * 15) / 3)


def test_a_row_comes_with_its_weight():
    rows = WeightedRows([("x0", 5), ("x1", 6)], np.array([0.5, 2.0]))
    assert len(rows) == 2
    assert rows[1] == ("x1", (6, 2.0))


@pytest.mark.parametrize("weight", [1, 0.3])
@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_constant_weights_are_no_weights_bit_for_bit(client, weight, sync_every):
    X, y = digits(200, np.float32)
    options = {"n_workers": 2, "sync_every": sync_every}
    without = fit_daskps(client, make_net(CNN3), X, y, **options)
    with_ = DistributedCNNClassifier(make_net(CNN3), client=client, **options)
    torch.manual_seed(0)
    with_.fit(X, y, sample_weight=np.full(200, weight))
    assert identical(with_, without)
    assert with_.history_[:, "train_loss"] == without.history_[:, "train_loss"]


CLASS_WEIGHTS = torch.arange(1.0, 11.0, dtype=torch.float64)

LOSSES = {
    "mean": {},
    "class weights": {"criterion__weight": CLASS_WEIGHTS},
    "ignored class": {"criterion__ignore_index": 3, "criterion__weight": CLASS_WEIGHTS},
    "sum": {"criterion__reduction": "sum", "lr": 0.0005},
    "nll": {"module": Softmax, "criterion": nn.NLLLoss, "criterion__weight": CLASS_WEIGHTS},
    "smoothed": {"criterion__label_smoothing": 0.1},
    "penalty": {"net_class": WithPenalty},
}


def full_batch(module=CNN3, **options):
    return make_net(module, batch_size=-1, train_split=None, **DOUBLE, **options)


def fit_weighted(client, net, X, y, weights, **options):
    """With these initial weights, whatever the number of rows."""
    torch.manual_seed(0)
    return DistributedCNNClassifier(net, client=client, **options).fit(X, y, sample_weight=weights)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_integer_weight_is_a_repeated_row(client, loss):
    X, y = digits(120)
    weights = np.random.RandomState(0).randint(0, 4, 120)
    net = full_batch(**LOSSES[loss])
    repeated = fit_daskps(client, net, X.repeat(weights, axis=0), y.repeat(weights), n_workers=1)
    for k in (1, 2):
        ours = fit_weighted(client, net, X, y, weights, n_workers=k)
        assert ours.report_.world_size == k
        assert distance(ours, repeated) <= 1e-10
        np.testing.assert_allclose(
            ours.history_[:, "train_loss"], repeated.history_[:, "train_loss"], rtol=1e-10
        )


def test_an_integer_weight_is_a_repeated_row_for_a_binary_net(client):
    X, y = digits(120)
    y = np.where(y > 4, "high", "low")
    weights = np.random.RandomState(0).randint(0, 4, 120)
    net = full_batch(OneOutput, net_class=NeuralNetBinaryClassifier, criterion=nn.BCEWithLogitsLoss)
    repeated = fit_daskps(client, net, X.repeat(weights, axis=0), y.repeat(weights), n_workers=2)
    ours = fit_weighted(client, net, X, y, weights, n_workers=2)
    assert distance(ours, repeated) <= 1e-10


class OneOutput(CNN3):
    def __init__(self, dtype):
        super().__init__(1, dtype)

    def forward(self, X):
        return super().forward(X).squeeze(-1)


@pytest.mark.parametrize("n_workers", [1, 2])
def test_a_class_without_weight_is_as_if_it_were_not_there(client, n_workers):
    X, y = digits(120)
    weights = np.where(y == 9, 0, 1)
    ours = fit_weighted(client, full_batch(), X, y, weights, n_workers=n_workers)
    without = fit_daskps(client, full_batch(), X[y < 9], y[y < 9], n_workers=n_workers)
    assert distance(ours, without) <= 1e-10


def poisoned(X, y, rows, by):
    """The same, with other pixels and other labels in these rows."""
    X, y = X.copy(), y.copy()
    X[rows] = by * np.roll(X[rows], 3, axis=3)
    y[rows] = (y[rows] + 1) % 10
    return X, y


def fit_way(client, X, y, weights, chunks=None, shuffle=False, **options):
    if chunks is not None:
        X, y, weights = (da.from_array(a, chunks=(chunks, *a.shape[1:])) for a in (X, y, weights))
    net = make_net(CNN3, iterator_train__shuffle=shuffle, train_split=None, max_epochs=2)
    ours = DistributedCNNClassifier(net, client=client, n_workers=3, random_state=0, **options)
    return ours.fit(X, y, sample_weight=weights)


@pytest.mark.parametrize("way", WAYS)
def test_weights_stay_with_their_rows(client, way):
    """If they did not, rows that must not count would."""
    X, y = digits(150, np.float32)
    rng = np.random.RandomState(0)
    weights = rng.rand(150)
    weights[rng.rand(150) < 0.3] = 0
    one = fit_way(client, *poisoned(X, y, weights == 0, by=1), weights, **WAYS[way])
    other = fit_way(client, *poisoned(X, y, weights == 0, by=-5), weights, **WAYS[way])
    assert one.report_.world_size == 3
    assert identical(one, other)
    counted = np.roll(weights, 1)
    assert not identical(fit_way(client, X, y, counted, **WAYS[way]), one)


def test_weights_of_training_rows_only(client):
    """The net's own split takes rows away; the loss of those is not weighted."""
    X, y = digits(200)
    weights = np.random.RandomState(0).rand(200)
    net = make_net(CNN3, **DOUBLE)
    one = fit_weighted(client, net, X, y, weights, n_workers=1)
    two = fit_weighted(client, net, X, y, weights, n_workers=2)
    assert distance(one, two) <= 1e-10
    valid = np.fromiter(split_rows(net, X, y), int)
    losses = nn.functional.cross_entropy(
        torch.as_tensor(two.net_.predict_proba(X[valid])).log(), torch.as_tensor(y[valid])
    )
    assert two.history_[-1]["valid_loss"] == pytest.approx(losses.item(), rel=1e-6)


def split_rows(net, X, y):
    """The numbers of the rows that a net sets apart for validation."""
    _, valid = clone(net).initialize().get_split_datasets(X, y)
    return valid.indices


def test_the_recorded_loss_is_the_weighted_one(client):
    X, y = digits(64)
    weights = np.random.RandomState(0).rand(64)
    ours = fit_weighted(client, full_batch(max_epochs=1, lr=0.0), X, y, weights, n_workers=2)
    logits = ours.net_.module_(torch.as_tensor(X))
    losses = nn.functional.cross_entropy(logits, torch.as_tensor(y), reduction="none")
    expected = np.average(losses.detach(), weights=weights)
    assert ours.history_[0]["train_loss"] == pytest.approx(expected, rel=1e-12)


def test_one_local_step_is_one_weighted_step_on_all_rows(client):
    """Ranks whose rows weigh more count more in the average."""
    X, y = digits(64)
    weights = np.where(np.arange(64) % 2, 0.01, 1.0) * np.random.RandomState(0).rand(64)
    net = full_batch(max_epochs=1, optimizer=torch.optim.SGD, lr=0.1)
    ours = fit_weighted(client, net, X, y, weights, n_workers=2, sync_every="epoch")
    one = fit_weighted(client, net, X, y, weights, n_workers=1)
    assert ours.report_.world_size == 2
    assert distance(ours, one) <= 1e-12


OPTIMIZERS = {
    "momentum": {
        "optimizer": torch.optim.SGD,
        "optimizer__momentum": 0.9,
        "optimizer__weight_decay": 0.1,
    },
    "adam": {"optimizer": torch.optim.AdamW, "lr": 0.001},
}


def optimizer_state(fitted):
    return [
        (name, value)
        for held in fitted.net_.optimizer_.state_dict()["state"].values()
        for name, value in sorted(held.items())
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("n_workers", "sync_every"), [(1, "batch"), (2, "batch"), (2, "epoch"), (2, 1)])
def test_a_batch_without_weight_takes_no_step(client, optimizer, n_workers, sync_every):
    X, y = digits(64)
    weights = np.random.RandomState(0).rand(64)
    weights[32:] = 0
    # Batches of all ranks or of one: rows 0 to 31 come first, then 32 to 63.
    net = make_net(CNN3, batch_size=16, max_epochs=2, train_split=None, **DOUBLE, **OPTIMIZERS[optimizer])
    options = {"n_workers": n_workers, "sync_every": sync_every}
    ours = fit_weighted(client, net, X, y, weights, **options)
    short = fit_weighted(client, net, X[:32], y[:32], weights[:32], **options)
    assert ours.report_.world_size == short.report_.world_size == n_workers
    assert identical(ours, short)
    for (name, value), (_, expected) in zip(optimizer_state(ours), optimizer_state(short), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize("class_weight", ["balanced", {0: 5, 7: 0.25}])
@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_class_weights_are_the_sample_weights_that_they_stand_for(client, class_weight, sync_every):
    X, y = digits(150, np.float32)
    own = np.random.RandomState(0).rand(150)
    factors = compute_sample_weight(class_weight, y)
    options = {"n_workers": 2, "sync_every": sync_every}
    net = make_net(CNN3, train_split=None)
    for given, expected in ((None, factors), (own, own * factors)):
        ours = fit_weighted(client, net, X, y, given, class_weight=class_weight, **options)
        assert identical(ours, fit_weighted(client, net, X, y, expected, **options))


def test_class_weights_go_by_the_users_labels(client):
    X, y = separable(60, 3)
    names = np.array(["dog", "cat", "eel"])[y]  # in another order than their positions
    net = make_net(CNN3, train_split=None)
    options = {"n_workers": 2, "random_state": 0}
    ours = fit_daskps(client, net, X, names, class_weight={"dog": 9}, **options)
    encoded = np.unique(names, return_inverse=True)[1]
    assert identical(ours, fit_daskps(client, net, X, encoded, class_weight={1: 9}, **options))


def test_class_weights_none_is_the_default(client):
    X, y = digits(100, np.float32)
    ours = fit_daskps(client, make_net(CNN3), X, y, class_weight=None, n_workers=2)
    assert identical(ours, fit_daskps(client, make_net(CNN3), X, y, n_workers=2))


@pytest.mark.parametrize("kind", [list, pd.Series, torch.as_tensor, np.float32])
def test_weights_of_any_kind(client, kind):
    X, y = digits(60)
    weights = np.arange(60) / 4  # exact in float32 too
    expected = fit_weighted(client, full_batch(), X, y, weights, n_workers=2)
    assert identical(fit_weighted(client, full_batch(), X, y, kind(weights), n_workers=2), expected)


class TestRefused:
    """Before anything is sent."""

    @pytest.fixture(autouse=True)
    def no_cluster(self, monkeypatch):
        def asked(client):
            raise AssertionError("work would have been sent")

        monkeypatch.setattr("daskps.classifier.client_for", asked)

    @pytest.mark.parametrize(
        ("weights", "why"),
        [
            (np.r_[-1.0, np.ones(59)], "Negative values in data passed to `sample_weight`"),
            (np.r_[np.nan, np.ones(59)], "Input sample_weight contains NaN"),
            (np.r_[np.inf, np.ones(59)], "Input sample_weight contains infinity"),
            (np.ones(59), r"sample_weight.shape == \(59,\), expected \(60,\)"),
            (np.ones((60, 1)), "Sample weights must be 1D array or scalar"),
            (np.zeros(60), "at least one non-zero number|every row has the weight 0"),
            (["a"] * 60, "could not convert string to float"),
        ],
    )
    @pytest.mark.parametrize("method", ["fit", "partial_fit"])
    def test_weights(self, weights, why, method):
        ours = DistributedCNNClassifier(make_net(CNN3))
        with pytest.raises(ValueError, match=why):
            getattr(ours, method)(*digits(60), sample_weight=weights)

    @pytest.mark.parametrize("class_weight", ["even", {0: -1.0}, 3])
    def test_class_weights(self, class_weight):
        ours = DistributedCNNClassifier(make_net(CNN3), class_weight=class_weight)
        with pytest.raises((ValueError, TypeError), match="class_weight"):
            ours.fit(*digits(60))

    @pytest.mark.parametrize("criterion", [OwnCriterion, OwnCriterion()])
    def test_a_criterion_without_reduction(self, criterion):
        self.check("the criterion OwnCriterion: it has no 'reduction'", criterion=criterion)

    def test_an_own_loss_that_is_one_number(self):
        self.check("ScalarLoss.get_loss: it returns one number", net_class=ScalarLoss)

    def check(self, why, **options):
        X, y = digits(60)
        net, weights = make_net(CNN3, train_split=None, **options), np.arange(60)
        with pytest.raises(ValueError, match=f"Weights are not possible with {why}"):
            DistributedCNNClassifier(net).fit(X, y, sample_weight=weights)
        with pytest.raises(ValueError, match=f"Weights are not possible with {why}"):
            DistributedCNNClassifier(net, class_weight={0: 2}).fit(X, y)

    def test_one_class_that_weighs_anything(self):
        X, y = digits(60)
        with pytest.raises(ValueError, match="contains only one class"):
            DistributedCNNClassifier(make_net(CNN3)).fit(X, y, sample_weight=y == 3)


class ScalarLoss(NeuralNetClassifier):
    def get_loss(self, y_pred, y_true, *args, **kwargs):
        return super().get_loss(y_pred, y_true, *args, **kwargs).mean()


def test_an_own_loss_of_one_number_is_possible_without_weights(client):
    """Constant ones are none."""
    X, y = digits(60)
    ours = fit_weighted(client, full_batch(net_class=ScalarLoss), X, y, np.ones(60), n_workers=2)
    assert ours.report_.world_size == 2


def halve(X):
    return X / 2


class TestInScikitLearn:
    """Weights that others pass on."""

    def est(self, client, **options):
        net = make_net(Flat, module__n_in=64, module__n_out=10, train_split=None)
        return DistributedCNNClassifier(net, client=client, n_workers=2, random_state=0, **options)

    @pytest.fixture
    def data(self):
        X, y = digits(150, np.float32)
        return X.reshape(150, 64), y, np.random.RandomState(0).rand(150)

    def test_pipeline(self, client, data):
        X, y, weights = data
        pipe = make_pipeline(FunctionTransformer(halve), self.est(client))
        pipe.fit(X, y, distributedcnnclassifier__sample_weight=weights)
        assert identical(pipe[-1], self.est(client).fit(X / 2, y, sample_weight=weights))

    def test_ada_boost(self, client, data):
        X, y, _ = data
        assert has_fit_parameter(self.est(client), "sample_weight")
        boosted = AdaBoostClassifier(self.est(client), n_estimators=3, random_state=0).fit(X, y)
        assert len(boosted.estimators_) == 3
        # The first sees equal weights, the next what that one got wrong.
        seed = boosted.estimators_[0].random_state
        assert identical(boosted.estimators_[0], self.est(client).set_params(random_state=seed).fit(X, y))
        assert not identical(boosted.estimators_[1], boosted.estimators_[0])
        assert boosted.score(X, y) > 0.5

    def test_ada_boost_of_images(self, client):
        X, y = digits(60, np.float32)
        est = DistributedCNNClassifier(make_net(CNN3, train_split=None), client=client, n_workers=2)
        assert AdaBoostClassifier(est, n_estimators=2, random_state=0).fit(X, y).predict(X).shape == (60,)

    def test_routing_in_a_pipeline(self, client, data):
        X, y, weights = data
        with config_context(enable_metadata_routing=True):
            pipe = make_pipeline(
                StandardScaler().set_fit_request(sample_weight=True),
                self.est(client).set_fit_request(sample_weight=True),
            )
            pipe.fit(X, y, sample_weight=weights)
        scaled = StandardScaler().fit_transform(X, sample_weight=weights)
        assert identical(pipe[-1], self.est(client).fit(scaled, y, sample_weight=weights))

    def test_routing_in_cross_validation(self, client, data):
        X, y, weights = data
        folds = KFold(2)
        with config_context(enable_metadata_routing=True):
            est = self.est(client).set_fit_request(sample_weight=True).set_score_request(sample_weight=True)
            found = cross_validate(
                est,
                X,
                y,
                cv=folds,
                params={"sample_weight": weights},
                return_estimator=True,
                error_score="raise",
            )
        for number, (train, test) in enumerate(folds.split(X)):
            expected = self.est(client).fit(X[train], y[train], sample_weight=weights[train])
            assert identical(found["estimator"][number], expected)
            score = expected.score(X[test], y[test], sample_weight=weights[test])
            assert found["test_score"][number] == pytest.approx(score)

    def test_routing_of_weights_that_nobody_asked_for_is_refused(self, client, data):
        X, y, weights = data
        with config_context(enable_metadata_routing=True):
            pipe = make_pipeline(self.est(client))
            with pytest.raises(UnsetMetadataPassedError, match="sample_weight"):
                pipe.fit(X, y, sample_weight=weights)

    def test_a_request_stays_with_a_clone(self, client):
        with config_context(enable_metadata_routing=True):
            est = self.est(client).set_fit_request(sample_weight=True)
            request = clone(est).get_metadata_routing().fit.requests
        assert request == {"sample_weight": True}


def test_nothing_is_left_of_weights_in_the_net(client):
    """The user gets a net that goes on in plain skorch, without weights."""
    X, y = digits(60)
    ours = fit_weighted(client, full_batch(), X, y, np.arange(60), n_workers=2)
    assert ours.net_.criterion_.reduction == "mean"
    before = state(ours)
    ours.net_.partial_fit(X, y)
    assert any(not torch.equal(before[name], value) for name, value in state(ours).items())
