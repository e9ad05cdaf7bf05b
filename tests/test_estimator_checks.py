"""What scikit-learn asks of an estimator: its own checks, tags, features, names of parameters."""

from __future__ import annotations

import re

import dask.array as da
import numpy as np
import pandas as pd
import pytest
import torch
from nets import CNN3, Flat
from reference import identical, make_net, xy
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from sklearn.utils.validation import has_fit_parameter
from skorch.callbacks import EpochScoring

from daskps import DistributedCNNClassifier


class TestAgainstTheCurrentClient:
    """All of scikit-learn's checks, which know nothing of Dask."""

    @pytest.fixture(autouse=True)
    def current(self, client):
        with client.as_current():
            yield

    @parametrize_with_checks([DistributedCNNClassifier()])
    def test_check(self, estimator, check):
        check(estimator)

    # A fit on one worker exchanges nothing, and goes another way through the code.
    @pytest.mark.parametrize(
        "name",
        [
            "check_estimators_partial_fit_n_features",
            "check_fit2d_1sample",
            "check_fit_idempotent",
            "check_sample_weight_equivalence_on_dense_data",
        ],
    )
    def test_check_on_one_worker(self, name):
        found = [
            (estimator, check)
            for estimator, check in estimator_checks_generator(DistributedCNNClassifier(n_workers=1))
            if check.func.__name__ == name
        ]
        assert found
        for estimator, check in found:
            check(estimator)


def est(client=None, **options):
    return DistributedCNNClassifier(make_net(CNN3, train_split=None), client=client, **options)


def flat_est(client, n_in=6, **options):
    net = make_net(Flat, module__n_in=n_in, module__n_out=2, train_split=None, max_epochs=1)
    return DistributedCNNClassifier(net, client=client, random_state=0, n_workers=2, **options)


@pytest.fixture
def no_cluster(monkeypatch):
    """Whoever asks for a cluster fails the test."""

    def asked(client):
        raise AssertionError("work would have been sent")

    monkeypatch.setattr("daskps.classifier.client_for", asked)


@pytest.fixture(scope="module")
def frame():
    X = pd.DataFrame(np.random.RandomState(0).rand(40, 6), columns=list("abcdef"))
    return X, np.arange(40) % 2


@pytest.fixture(scope="module")
def fitted(session_client):
    return est(session_client, random_state=0).fit(*xy(60, 10))


class TestTags:
    def test_it_is_a_classifier(self):
        assert is_classifier(est())

    def test_of_targets(self):
        tags = get_tags(est())
        assert tags.target_tags.required
        assert tags.target_tags.single_output
        assert not tags.target_tags.multi_output
        assert tags.classifier_tags.multi_class
        assert not tags.classifier_tags.multi_label

    def test_of_input(self):
        tags = get_tags(est())
        assert tags.input_tags.two_d_array
        assert not tags.input_tags.sparse
        assert not tags.input_tags.allow_nan

    @pytest.mark.parametrize("method", ["fit", "partial_fit"])
    def test_takes_sample_weights(self, method):
        assert "sample_weight" in getattr(est(), f"set_{method}_request").__signature__.parameters
        assert has_fit_parameter(est(), "sample_weight")


class TestRepresentation:
    def test_before_the_fit(self):
        assert "DistributedCNNClassifier" in repr(est())
        assert "DistributedCNNClassifier" in est()._repr_html_()

    def test_after_the_fit(self, client):
        fitted = est(client, random_state=0).fit(*xy(40, 10))
        assert "DistributedCNNClassifier" in repr(fitted)
        html = fitted._repr_html_()
        assert "DistributedCNNClassifier" in html
        assert "sync_every" in html

    def test_of_a_built_in_net(self):
        assert repr(DistributedCNNClassifier(n_workers=2)) == "DistributedCNNClassifier(n_workers=2)"


class TestFeatures:
    def test_names_of_a_frame(self, client, frame):
        fitted = flat_est(client).fit(*frame)
        assert fitted.feature_names_in_.tolist() == list("abcdef")
        assert fitted.n_features_in_ == 6

    def test_other_names_are_refused(self, client, frame):
        X, y = frame
        fitted = flat_est(client).fit(X, y)
        with pytest.raises(ValueError, match="feature names should match those that were passed"):
            fitted.predict(X.rename(columns={"a": "z"}))
        with pytest.raises(ValueError, match="feature names should match those that were passed"):
            fitted.predict(X[list("fedcba")])

    def test_an_array_after_a_frame_is_taken_with_a_warning(self, client, frame):
        X, y = frame
        fitted = flat_est(client).fit(X, y)
        with pytest.warns(UserWarning, match="X does not have valid feature names"):
            from_array = fitted.predict_proba(X.to_numpy())
        np.testing.assert_array_equal(from_array, fitted.predict_proba(X))

    def test_a_frame_after_an_array_is_taken_with_a_warning(self, client, frame):
        X, y = frame
        fitted = flat_est(client).fit(X.to_numpy(), y)
        assert not hasattr(fitted, "feature_names_in_")
        with pytest.warns(UserWarning, match="X has feature names, but"):
            fitted.predict(X)

    def test_columns_that_are_numbers_are_no_names(self, client, frame):
        X, y = frame
        fitted = flat_est(client).fit(X.set_axis(range(6), axis=1), y)
        assert not hasattr(fitted, "feature_names_in_")
        assert fitted.n_features_in_ == 6

    def test_another_number_of_features_is_refused(self, client, frame):
        X, y = frame
        fitted = flat_est(client).fit(X.to_numpy(), y)
        for call in (fitted.predict, fitted.predict_proba, lambda X: fitted.partial_fit(X, y)):
            with pytest.raises(ValueError, match=r"X has 5 features, but .* is expecting 6 features"):
                call(X.to_numpy()[:, :5])

    def test_fit_starts_anew(self, client, frame):
        X, y = frame
        fitted = flat_est(client).fit(X, y)
        fitted.set_params(net__module__n_in=5).fit(X.to_numpy()[:, :5], y)
        assert fitted.n_features_in_ == 5
        assert not hasattr(fitted, "feature_names_in_")

    def test_a_dask_array_has_no_names(self, client, frame):
        X, y = frame
        fitted = flat_est(client).fit(X, y)
        array = da.from_array(X.to_numpy(), chunks=(20, 6))
        fitted.fit(array, y)
        assert fitted.n_features_in_ == 6
        assert not hasattr(fitted, "feature_names_in_")
        with pytest.raises(ValueError, match=r"X has 5 features, but .* is expecting 6 features"):
            fitted.predict(array[:, :5])

    def test_of_images_are_their_channels(self, client):
        assert est(client).fit(*xy(40, 10)).n_features_in_ == 1


class TestPredictions:
    def test_shapes_and_types(self, fitted):
        X, y = xy(7, 7)
        assert fitted.predict(X).shape == (7,)
        assert fitted.predict(X).dtype == y.dtype
        assert fitted.predict_proba(X).shape == (7, 10)
        assert fitted.predict_proba(X).dtype == np.float32

    def test_of_one_row(self, fitted):
        X, _ = xy(7, 7)
        np.testing.assert_allclose(fitted.predict_proba(X[3:4]), fitted.predict_proba(X)[3:4], atol=1e-6)

    def test_score_is_the_accuracy(self, fitted):
        X, y = xy(60, 10)
        assert fitted.score(X, y) == (fitted.predict(X) == y).mean()
        weights = np.arange(60)
        expected = np.average(fitted.predict(X) == y, weights=weights)
        assert fitted.score(X, y, sample_weight=weights) == pytest.approx(expected)

    def test_before_the_fit_there_are_none(self):
        with pytest.raises(NotFittedError):
            est().predict(xy(7, 7)[0])

    @pytest.mark.usefixtures("no_cluster")
    def test_need_no_cluster(self, fitted):
        fitted.predict(xy(7, 7)[0])


class TestGoingOn:
    """partial_fit and warm_start, as far as the labels and the features are concerned."""

    def test_classes_that_come_later(self, client):
        X, y = xy(60, 3)
        first, second = y < 2, y == 2
        ours = est(client, random_state=0)
        ours.partial_fit(X[first], y[first], classes=[2, 1, 0])
        assert ours.classes_.tolist() == [0, 1, 2]
        ours.partial_fit(X[second], y[second])
        assert ours.classes_.tolist() == [0, 1, 2]
        assert ours.predict_proba(X).shape == (60, 3)

    def test_a_label_that_was_not_announced_is_refused(self, client):
        X, y = xy(60, 3)
        ours = est(client, random_state=0).partial_fit(X[y < 2], y[y < 2])
        before = ours.net_
        with pytest.raises(ValueError, match=re.escape("y has the labels [2], known are [0, 1]")):
            ours.partial_fit(X, y)
        assert ours.net_ is before
        assert ours.classes_.tolist() == [0, 1]

    @pytest.mark.usefixtures("no_cluster")
    def test_a_label_outside_of_classes_is_refused(self):
        X, y = xy(60, 3)
        with pytest.raises(ValueError, match=re.escape("y has the labels [2], known are [0, 1]")):
            est().partial_fit(X, y, classes=[0, 1])

    def test_other_classes_than_before_are_refused(self, client):
        X, y = xy(60, 3)
        ours = est(client, random_state=0).partial_fit(X, y, classes=[0, 1, 2])
        ours.partial_fit(X, y, classes=[0, 1, 2])
        with pytest.raises(ValueError, match="is not the same as at the first call"):
            ours.partial_fit(X, y, classes=[0, 1, 2, 3])

    def test_partial_fit_continues_and_fit_resets(self, client):
        X, y = xy(60, 3)
        once = est(client, random_state=0, n_workers=2).set_params(net__max_epochs=2).fit(X, y)
        ours = est(client, random_state=0, n_workers=2).set_params(net__max_epochs=1)
        ours.partial_fit(X, y).partial_fit(X, y)
        assert len(ours.history_) == 2
        assert identical(ours, once)
        ours.fit(X, y)
        assert len(ours.history_) == 1
        assert identical(ours, clone(ours).fit(X, y))

    def test_warm_start_continues(self, client):
        X, y = xy(60, 3)
        once = est(client, random_state=0, n_workers=2).set_params(net__max_epochs=2).fit(X, y)
        ours = est(client, random_state=0, n_workers=2)
        ours.set_params(net__max_epochs=1, net__warm_start=True).fit(X, y).fit(X, y)
        assert len(ours.history_) == 2
        assert identical(ours, once)

    @pytest.mark.parametrize("method", ["fit", "partial_fit"])
    def test_parameters_that_were_set_in_between_count(self, client, method):
        X, y = xy(60, 3)
        ours = est(client, random_state=0, n_workers=2)
        ours.set_params(net__max_epochs=1, net__warm_start=True).fit(X, y)
        ours.set_params(net__max_epochs=3, net__lr=0.0)
        before = clone(ours.net_.module_, safe=False)
        getattr(ours, method)(X, y)
        assert len(ours.history_) == 4
        assert ours.net_.optimizer_.param_groups[0]["lr"] == 0.0
        assert identical(ours.net_.module_, before)


@pytest.mark.usefixtures("no_cluster")
class TestNamesOfParameters:
    """A wrong name is an error that says it, before anything is sent."""

    def test_in_the_constructor(self):
        with pytest.raises(TypeError, match="sync_evry"):
            DistributedCNNClassifier(sync_evry="batch")

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("sync_evry", "sync_evry"),
            ("nett__lr", "nett"),
            ("net__lrr", "lrr"),
            ("net__optimizr__momentum", "optimizr__momentum"),
            ("net__modul__n", "modul__n"),
            ("net__module_n", "module_n"),
            ("net__iterator_train_shuffle", "iterator_train_shuffle"),
            ("net__callbacks__nobody__lr", "nobody"),
        ],
    )
    def test_in_set_params(self, name, said):
        with pytest.raises(ValueError, match=said):
            est().set_params(**{name: 1})

    @pytest.mark.parametrize("name", ["net__lrr", "net__optimizr__momentum"])
    def test_in_a_search(self, name):
        search = GridSearchCV(est(), {name: [1]}, cv=2, error_score="raise")
        with pytest.raises(ValueError, match=name.removeprefix("net__")):
            search.fit(*xy(60, 3))

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("module__nn", "nn"),
            ("criterion__wieght", "wieght"),
            ("optimizer__momentumm", "momentumm"),
            ("iterator_train__shufle", "shufle"),
            ("iterator_valid__bach_size", "bach_size"),
        ],
    )
    def test_that_only_the_part_knows(self, name, said):
        with pytest.raises((TypeError, ValueError), match=said):
            est().set_params(**{f"net__{name}": 1}).fit(*xy(60, 3))

    def test_in_the_users_own_net(self):
        net = make_net(CNN3)
        net.set_params(optimizr__momentum=0.9)
        with pytest.raises(ValueError, match="optimizr__momentum"):
            DistributedCNNClassifier(net).fit(*xy(60, 3))

    def test_of_a_net_that_does_not_exist(self):
        with pytest.raises(ValueError, match=r"net__lr .* 'net' is None"):
            DistributedCNNClassifier().set_params(net__lr=0.1)

    def test_of_a_net_that_comes_with_them(self):
        ours = DistributedCNNClassifier().set_params(net=make_net(CNN3), net__lr=0.125)
        assert ours.net.lr == 0.125

    def test_good_names_are_taken(self):
        ours = est().set_params(
            net__lr=0.125,
            net__module__n=7,
            net__optimizer__momentum=0.5,
            net__optimizer=torch.optim.SGD,
            net__criterion__reduction="sum",
            net__iterator_train__shuffle=True,
            net__callbacks=[("auc", EpochScoring("roc_auc", lower_is_better=False))],
            sync_every=3,
        )
        ours.set_params(net__callbacks__auc__name="area", net__callbacks__print_log=None)
        assert ours.net.get_params()["callbacks__auc__name"] == "area"
        assert ours.get_params()["net__optimizer__momentum"] == 0.5
