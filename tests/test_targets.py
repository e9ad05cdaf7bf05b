"""Labels of every kind, and classes that are missing somewhere."""

from __future__ import annotations

import warnings

import dask
import numpy as np
import pandas as pd
import pytest
import torch
from nets import CNN3, OwnCriterion, Softmax
from reference import digits, fit_daskps, identical, make_net, separable, xy
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import DataConversionWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn

from daskps import DistributedCNNClassifier

# 60 rows of three classes. The third has one row, so two of three ranks do not see it.
POSITIONS = np.r_[np.arange(59) % 2, 2]
ANIMALS = np.array(["cat", "dog", "eel"])

LABELS = {
    "objects": ANIMALS.astype(object)[POSITIONS],
    "strings": ANIMALS[POSITIONS],
    "list": ANIMALS[POSITIONS].tolist(),
    "categories": pd.Series(pd.Categorical(ANIMALS[POSITIONS], categories=["eel", "dog", "cat", "fox"])),
    "series": pd.Series(ANIMALS[POSITIONS], index=range(100, 160)),
    "gaps": np.array([3, 5, 7])[POSITIONS],
    "from 1": np.array([1, 2, 3])[POSITIONS],
    "negative": np.array([-9, -1, 4], np.int8)[POSITIONS],
    "unsigned": np.array([0, 1, 255], np.uint8)[POSITIONS],
    "floats": np.array([-1.0, 0.0, 2.0])[POSITIONS],
    "nullable": pd.Series(np.array([1, 2, 3])[POSITIONS], dtype="Int64"),
    "tensor": torch.as_tensor(np.array([3, 5, 7])[POSITIONS]),
    "two": np.array([-1, 1])[POSITIONS % 2],
    "bool": POSITIONS == 1,
}


def est(client=None, n=3, **options):
    net = make_net(CNN3, module__n=n, train_split=None)
    return DistributedCNNClassifier(net, **{"n_workers": 3, "random_state": 0, "client": client, **options})


def images(positions=POSITIONS):
    """Every class has a bright row of pixels of its own."""
    X, _ = xy(len(positions), 3)
    X[np.arange(len(positions)), 0, positions] += 2
    return X


@pytest.fixture
def no_cluster(monkeypatch):
    """Whoever asks for a cluster fails the test."""

    def asked(client):
        raise AssertionError("work would have been sent")

    monkeypatch.setattr("daskps.classifier.client_for", asked)


@pytest.mark.parametrize("kind", LABELS)
def test_labels_come_back_as_they_were(client, kind):
    y = LABELS[kind]
    labels = LogisticRegression().fit(np.eye(60), np.asarray(y) if kind == "tensor" else y).classes_
    positions = np.searchsorted(labels, np.asarray(y))
    X = images(positions)
    ours = est(client, n=len(labels)).fit(X, y)
    assert ours.report_.world_size == 3
    assert ours.classes_.tolist() == labels.tolist()
    assert ours.classes_.dtype == labels.dtype  # scikit-learn makes floats of nullable integers
    predicted = ours.predict(X)
    assert predicted.dtype == labels.dtype
    assert set(predicted.tolist()) <= set(labels.tolist())
    assert ours.score(X, y) == (predicted == np.asarray(y)).mean()
    assert ours.predict_proba(X).shape == (60, len(labels))
    assert identical(ours, est(client, n=len(labels)).fit(X, positions))


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_a_search_over_strings(client, sync_every):
    X, y = separable(60, 3)
    names = ANIMALS[y]
    trained = est(client, sync_every=sync_every).set_params(net__max_epochs=8)
    search = GridSearchCV(trained, {"net__lr": [0.2]}, cv=3, scoring="accuracy", error_score="raise")
    search.fit(X, names)
    assert search.best_score_ == search.score(X, names) == 1.0
    assert search.classes_.tolist() == ["cat", "dog", "eel"]


class TestColumns:
    @pytest.mark.parametrize("kind", ["array", "frame", "frame of strings"])
    def test_are_taken_with_scikit_learns_warning(self, client, kind):
        y = ANIMALS[POSITIONS] if kind == "frame of strings" else POSITIONS
        column = y.reshape(-1, 1) if kind == "array" else pd.DataFrame({"y": y})
        with pytest.warns(DataConversionWarning, match="A column-vector y was passed when a 1d array"):
            ours = est(client).fit(images(), column)
        assert identical(ours, est(client).fit(images(), y))
        assert ours.predict(images()).shape == (60,)

    def test_plain_labels_need_no_warning(self, client):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DataConversionWarning)
            est(client).fit(images(), POSITIONS)


ONE_HOT = np.eye(3, dtype=int)[POSITIONS]


@pytest.mark.usefixtures("no_cluster")
@pytest.mark.parametrize(
    ("y", "why"),
    [
        (np.linspace(0, 1, 60), "Unknown label type: continuous"),
        (ONE_HOT, r"y should be a 1d array, got an array of shape \(60, 3\) instead"),
        (pd.DataFrame(ONE_HOT), r"y should be a 1d array, got an array of shape \(60, 3\) instead"),
        (ONE_HOT.tolist(), r"y should be a 1d array, got an array of shape \(60, 3\) instead"),
        (POSITIONS[:59], r"inconsistent numbers of samples: \[60, 59\]"),
        (np.r_[np.nan, POSITIONS[1:]], "Input y contains NaN"),
        (np.r_[np.inf, POSITIONS[1:]], "Input y contains infinity"),
        (pd.Series(ANIMALS[POSITIONS]).where(POSITIONS < 2), "contains NaN"),
        (pd.Series(POSITIONS, dtype="Int64").where(POSITIONS < 2), "Input y contains NaN"),
        (np.zeros(60, int), "contains only one class"),
        (None, "requires y to be passed, but the target y is None"),
        (np.array([1, "cat"] * 30, object), "Unknown label type: unknown"),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("method", ["fit", "partial_fit"])
def test_targets_that_are_none_are_refused_before_anything_is_sent(y, why, method):
    with pytest.raises(ValueError, match=why):
        getattr(est(), method)(images(), y)


@pytest.mark.usefixtures("no_cluster")
def test_more_classes_than_outputs_are_refused_before_anything_is_sent():
    with pytest.raises(ValueError, match="has 2 outputs, y has 3 classes"):
        est(n=2).fit(images(), POSITIONS)


class TestMissingClasses:
    @pytest.fixture(autouse=True)
    def small_shards(self):
        with dask.config.set({"daskps.min-rows-per-rank": 4}):
            yield

    def test_in_a_fold(self, client):
        X, _ = xy(41, 3)
        y = np.r_[[0] * 20, [1] * 20, [2]]
        folds = KFold(3, shuffle=True, random_state=0)
        without = [train for train, _ in folds.split(X) if 2 not in y[train]]
        assert len(without) == 1
        ours = est(client).fit(X[without[0]], y[without[0]])
        assert ours.report_.world_size == 3
        probabilities = ours.predict_proba(X)
        assert ours.classes_.tolist() == [0, 1]
        assert probabilities.shape == (41, 2)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
        for scoring in ("accuracy", "neg_log_loss"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of scores that cannot be computed
                theirs = cross_val_score(
                    LogisticRegression(), X.reshape(41, 64), y, cv=folds, scoring=scoring
                )
                ours = cross_val_score(est(client), X, y, cv=folds, scoring=scoring)
            assert np.isnan(ours).tolist() == np.isnan(theirs).tolist()

    @pytest.mark.parametrize("side", ["training", "validation"])
    def test_in_one_side_of_the_split(self, client, side):
        X, rows = images(), np.arange(60)
        eels = rows[:20]
        y = np.where(np.isin(rows, eels), 2, rows % 2)
        held_out = eels if side == "validation" else rows[20:40]
        split = ValidSplit([(np.setdiff1d(rows, held_out), held_out)])
        ours = est(client).set_params(net__train_split=split).fit(X, ANIMALS[y])
        assert ours.report_.world_size == 3
        assert ours.classes_.tolist() == ["cat", "dog", "eel"]
        assert np.isfinite(ours.history_[:, "valid_loss"]).all()
        assert ours.history_[-1]["valid_acc"] == ours.score(X[held_out], ANIMALS[y[held_out]])

    def test_in_a_validation_set_of_the_users_own(self, client):
        X, y = images(), ANIMALS[POSITIONS]
        valid = Dataset(X[:20], y[:20])
        assert "eel" not in y[:20]
        ours = est(client).set_params(net__train_split=predefined_split(valid)).fit(X, y)
        assert ours.history_[-1]["valid_acc"] == ours.score(X[:20], y[:20])

    @pytest.mark.parametrize("sync_every", ["batch", "epoch"])
    def test_on_a_rank(self, client, sync_every):
        """Sorted labels: without shuffling no batch has all classes."""
        X, y = separable(90, 3)
        order = np.argsort(y, kind="stable")
        ours = (
            est(client, sync_every=sync_every)
            .set_params(net__max_epochs=10)
            .fit(X[order], ANIMALS[y[order]])
        )
        assert ours.classes_.tolist() == ["cat", "dog", "eel"]
        assert ours.report_.world_size == 3


CRITERIA = {
    "logits": make_net(CNN3, train_split=None),
    "softmax": make_net(Softmax, criterion=nn.NLLLoss, train_split=None),
    "own": make_net(
        CNN3, criterion=OwnCriterion, train_split=None, predict_nonlinearity=lambda t: t.softmax(dim=1)
    ),
}


class TestProbabilities:
    @pytest.mark.parametrize("criterion", CRITERIA)
    def test_are_some(self, client, criterion):
        X, y = digits(100, np.float32)
        ours = fit_daskps(client, CRITERIA[criterion], X, y, n_workers=2)
        probabilities = ours.predict_proba(X)
        assert ((0 <= probabilities) & (probabilities <= 1)).all()
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
        np.testing.assert_array_equal(probabilities.argmax(axis=1), ours.predict(X))
        np.testing.assert_array_equal(probabilities, ours.net_.predict_proba(X))

    def test_of_outputs_without_a_class_are_shared_out(self, client):
        X, y = digits(100, np.float32)
        ours = fit_daskps(client, CRITERIA["logits"], X[y < 4], y[y < 4], n_workers=2)
        probabilities = ours.predict_proba(X)
        assert probabilities.shape == (100, 4)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
        every = ours.net_.predict_proba(X)[:, :4]
        np.testing.assert_allclose(probabilities, every / every.sum(axis=1, keepdims=True))

    def test_of_an_unknown_criterion_are_doubted(self, client):
        X, y = digits(100, np.float32)
        net = make_net(CNN3, criterion=OwnCriterion, train_split=None)
        ours = fit_daskps(client, net, X, y, n_workers=2)
        with pytest.warns(UserWarning, match="do not sum to 1"):
            probabilities = ours.predict_proba(X)
        np.testing.assert_array_equal(probabilities, ours.net_.predict_proba(X))

    def test_a_loss_that_is_not_a_number_shows(self, client):
        """NLLLoss wants probabilities from the module; of logits skorch takes the logarithm."""
        X, y = digits(100, np.float32)
        net = make_net(CNN3, criterion=nn.NLLLoss, train_split=None)
        with pytest.warns(RuntimeWarning, match="became NaN"):
            ours = fit_daskps(client, net, X, y, n_workers=2)
        assert np.isnan(ours.history_[-1]["train_loss"])

    @pytest.mark.parametrize("scoring", ["neg_log_loss", "roc_auc_ovr"])
    def test_are_good_for_scores(self, client, scoring):
        X, y = separable(60, 3)
        search = GridSearchCV(
            est(client), {"net__lr": [0.0, 0.05]}, cv=2, scoring=scoring, error_score="raise"
        ).fit(X, ANIMALS[y])
        assert search.best_params_ == {"net__lr": 0.05}
        assert np.isfinite(search.cv_results_["mean_test_score"]).all()

    def test_can_be_calibrated(self, client):
        X, y = separable(90, 3)
        calibrated = CalibratedClassifierCV(est(client), cv=2).fit(X, ANIMALS[y])
        assert calibrated.score(X, ANIMALS[y]) == 1.0
        np.testing.assert_allclose(calibrated.predict_proba(X).sum(axis=1), 1, atol=1e-6)
