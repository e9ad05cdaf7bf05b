"""Cross-validation and searches: one fit after the other, side by side, in tasks, in processes."""

from __future__ import annotations

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import joblib
import numpy as np
import pytest
import torch
from conftest import local_cluster
from distributed import Client
from distributed.deploy.spec import SpecCluster
from nets import CNN3
from probes import wait_until
from reference import digits, identical, make_net
from scipy.stats import uniform
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import get_scorer
from sklearn.model_selection import (
    GridSearchCV,
    KFold,
    RandomizedSearchCV,
    cross_val_predict,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from skorch.callbacks import EarlyStopping, LRScheduler
from torch import nn

from daskps import DistributedCNNClassifier, _cluster, _folds, _random

X, Y = digits(90)
FOLDS = KFold(2)
SCORE = "neg_log_loss"
GRID = {"net__lr": [0.01, 0.05]}
FOUR = {"net__lr": [0.01, 0.02, 0.03, 0.04]}

# Enough for a rank on each worker: else other workers may be free each time. In two folds they travel once.
MANY = digits(300)
ONCE = sum(part.nbytes for part in MANY)

# Nobody may wait for ever.
pytestmark = pytest.mark.timeout(120)


def est(client=None, n_workers=2, **options):
    """Dropout and shuffling: every random number of a fit is in its scores."""
    net = make_net(CNN3, module__dropout=0.5, iterator_train__shuffle=True, train_split=None, **options)
    return DistributedCNNClassifier(net, client=client, n_workers=n_workers, random_state=0)


def exact_est(client=None, n_workers=2, **options):
    """No dropout, no shuffling, in float64: K does not matter."""
    net = make_net(CNN3, module__dtype=torch.float64, train_split=None, **options)
    return DistributedCNNClassifier(net, client=client, n_workers=n_workers, random_state=0)


def one_fold():
    """Anew for each search: a fold stays on the workers as long as its row numbers live."""
    return [next(FOLDS.split(X))]


def grid_search(estimator, grid=GRID, data=(X, Y), **options):
    options = {"cv": FOLDS, "scoring": SCORE, "error_score": "raise", "refit": False, **options}
    return GridSearchCV(estimator, grid, **options).fit(*data)


def scores(search):
    """(n_candidates, n_folds) test scores."""
    names = [f"split{fold}_test_score" for fold in range(2)]
    return np.stack([search.cv_results_[name] for name in names if name in search.cv_results_], axis=1)


def scores_by_hand(estimator, candidates, folds):
    """Without any search."""

    def score(params, train, test):
        fitted = clone(estimator).set_params(**params).fit(X[train], Y[train])
        return get_scorer(SCORE)(fitted, X[test], Y[test])

    return np.array([[score(params, *fold) for fold in folds] for params in candidates])


@pytest.fixture(scope="module")
def in_sequence(session_client):
    """The scores that all other ways have to reach."""
    return scores(grid_search(est(session_client)))


class TestOneAfterTheOther:
    @pytest.mark.parametrize(
        "grid",
        [
            {"net__lr": [0.01, 0.05]},
            {"net__max_epochs": [1, 2], "net__batch_size": [16, -1]},
            {"net__module__dropout": [0.0, 0.5]},
            {"net__criterion": [nn.CrossEntropyLoss], "net__criterion__label_smoothing": [0.0, 0.3]},
            {"net__optimizer": [torch.optim.SGD, torch.optim.RMSprop]},
            {"net__optimizer__momentum": [0.0, 0.9]},
            {"net__iterator_train__shuffle": [True, False]},
            {"net__callbacks__rate__gamma": [0.1, 1.0]},
            {"net__callbacks__rate": [None, LRScheduler("StepLR", step_size=1, gamma=0.5)]},
            {"net__callbacks": [None, [EarlyStopping("train_loss", patience=1, threshold=1.0)]]},
            {"sync_every": ["batch", "epoch", 1], "net__batch_size": [8]},
            {"n_workers": [1, 2]},
            {"class_weight": [None, {3: 5.0}]},
            {"random_state": [0, 1]},
        ],
        ids=lambda grid: next(iter(grid)),
    )
    def test_parameters_reach_the_fit(self, client, grid):
        """The scores are those of fits by hand, and the values make a difference."""
        rate = LRScheduler("StepLR", step_size=1, gamma=0.5)
        estimator = est(client, callbacks=[("rate", rate)])
        search = grid_search(estimator, grid, cv=one_fold())
        found = scores(search)
        expected = scores_by_hand(estimator, search.cv_results_["params"], one_fold())
        np.testing.assert_array_equal(found, expected)
        assert len(np.unique(found[:, 0])) == len(found)

    def test_the_users_estimator_is_as_before(self, client):
        estimator = est(client)
        search = grid_search(estimator, refit=True)
        assert estimator.net.lr == est().net.lr
        assert not hasattr(estimator, "net_")
        assert not estimator.net.initialized_
        best = clone(estimator).set_params(**search.best_params_).fit(X, Y)
        assert identical(search.best_estimator_, best)
        np.testing.assert_array_equal(search.predict(X), best.predict(X))

    def test_randomized(self, client):
        estimator = est(client)
        search = RandomizedSearchCV(
            estimator,
            {"net__lr": uniform(0.01, 0.1), "net__module__dropout": [0.0, 0.3], "sync_every": ["batch", 2]},
            n_iter=3,
            cv=one_fold(),
            scoring=SCORE,
            random_state=0,
            error_score="raise",
            refit=False,
        ).fit(X, Y)
        expected = scores_by_hand(estimator, search.cv_results_["params"], one_fold())
        np.testing.assert_array_equal(scores(search), expected)

    def test_cross_validation(self, client):
        estimator = est(client)
        accuracy = cross_val_score(estimator, X, Y, cv=FOLDS)
        found = cross_validate(estimator, X, Y, cv=FOLDS, return_estimator=True, error_score="raise")
        predicted = cross_val_predict(estimator, X, Y, cv=FOLDS)
        for fold, (train, test) in enumerate(FOLDS.split(X)):
            fitted = clone(estimator).fit(X[train], Y[train])
            assert identical(found["estimator"][fold], fitted)
            assert accuracy[fold] == found["test_score"][fold] == fitted.score(X[test], Y[test])
            np.testing.assert_array_equal(predicted[test], fitted.predict(X[test]))

    def test_any_number_of_workers_gives_the_same_scores(self, client):
        found = scores(grid_search(exact_est(client), {"n_workers": [1, 2]}))
        np.testing.assert_allclose(found[1], found[0], rtol=1e-10)

    def test_a_fit_that_fails_is_a_score_that_is_missing(self, client):
        """As with every other estimator."""
        with pytest.warns(match="2 fits failed out of a total of 4"):
            found = scores(grid_search(est(client), {"net__module__n": [10, 3]}, error_score=np.nan))
        assert np.isnan(found).tolist() == [[False, False], [True, True]]


class TestSideBySide:
    @pytest.mark.parametrize("n_workers", [2, 4])
    def test_on_threads(self, client, n_workers):
        """On four workers, so that fits share the cluster or wait for each other."""
        expected = scores(grid_search(est(client, n_workers)))
        with joblib.parallel_config("threading", n_jobs=2):
            found = scores(grid_search(est(client, n_workers)))
        np.testing.assert_array_equal(found, expected)

    def test_on_threads_that_share_one_client_by_its_address(self, client, in_sequence):
        with joblib.parallel_config("threading", n_jobs=3):
            found = grid_search(est(client.scheduler.address))
        np.testing.assert_array_equal(scores(found), in_sequence)

    @pytest.mark.parametrize("by_address", [False, True])
    def test_on_dasks_joblib_backend(self, client, in_sequence, by_address):
        """Every fit runs in a task, whose worker may be one of those that train."""
        given = client.scheduler.address if by_address else None
        with joblib.parallel_config("dask", client=client):
            found = scores(grid_search(est(given)))
        np.testing.assert_array_equal(found, in_sequence)

    def test_in_tasks(self, client, in_sequence):
        futures = [client.submit(scores_in_task, est(), pure=False) for _ in range(2)]
        for future in futures:
            np.testing.assert_array_equal(future.result(timeout=60), in_sequence)

    def test_a_rank_draws_its_own_numbers(self, client):
        """Whatever another fit seeds in the same process, as fits in tasks do."""
        estimator = est(client, 1).set_params(net__module=Accompanied)
        alone = clone(estimator).fit(X, Y)
        accompanied = clone(estimator).set_params(net__module__by_a_thread=True).fit(X, Y)
        assert identical(accompanied, alone)

    def test_fits_on_threads_draw_their_own_numbers(self, client):
        estimator = est(client, 1)
        alone = clone(estimator).fit(X, Y)
        fits = joblib.Parallel(4, backend="threading")(
            joblib.delayed(fitted_in_task)(clone(estimator)) for _ in range(12)
        )
        assert [identical(fit, alone) for fit in fits] == [True] * 12

    def test_predictions_on_a_thread_do_not_change_the_weights_of_another_fit(self, client, monkeypatch):
        """A loader draws a number of the generator that all threads share."""
        estimator = est(client, 1, lr=0.0).set_params(net__module=Interrupted)
        alone = clone(estimator).fit(X, Y)
        with ThreadPoolExecutor(1) as pool:
            monkeypatch.setattr(
                Interrupted,
                "interrupt",
                staticmethod(lambda: pool.submit(alone.predict, X).result(timeout=30)),
            )
            again = clone(estimator).fit(X, Y)
        assert identical(again, alone)


class Interrupted(CNN3):
    """Something else happens while the weights are made, in this process only."""

    interrupt = staticmethod(lambda: None)

    def __init__(self, n=10, dropout=0.0):
        super().__init__(n, dropout=dropout)
        self.interrupt()
        self.layers[-1].reset_parameters()


class Accompanied(CNN3):
    """While the rank computes, a thread makes weights in its process."""

    def __init__(self, n=10, dropout=0.0, by_a_thread=False):
        super().__init__(n, dropout=dropout)
        self.by_a_thread = by_a_thread

    def forward(self, X):
        if not (self.training and self.by_a_thread):
            return super().forward(X)
        begun, may_end = threading.Event(), threading.Event()
        thread = threading.Thread(target=seed_for_a_while, args=(begun, may_end), daemon=True)
        thread.start()
        began = begun.wait(timeout=0.1)  # in vain where threads take turns
        logits = super().forward(X)
        may_end.set()
        if began:
            thread.join(timeout=30)
        return logits


def seed_for_a_while(begun, may_end):
    with _random.LOCK, _random.seeded(7):
        begun.set()
        may_end.wait(timeout=30)


def fitted_in_task(estimator):
    estimator.fit(X, Y)
    return estimator.set_params(client=None)


def scores_in_task(estimator):
    return scores(grid_search(estimator))


class TestOnOneWorkerOfOneThread:
    """The thread that waits for the fit is the only one that could train."""

    @pytest.fixture(scope="class")
    @classmethod
    def narrow(cls):
        with (
            local_cluster(n_workers=1, processes=True) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            client.wait_for_workers(1)
            yield client

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, session_client):
        return scores(grid_search(est(session_client, 1)))

    def test_in_a_task(self, narrow, alone):
        found = narrow.submit(scores_in_task, est(None, 1), pure=False).result(timeout=60)
        np.testing.assert_array_equal(found, alone)

    def test_in_several_tasks_at_once(self, narrow, alone):
        futures = [narrow.submit(scores_in_task, est(None, n), pure=False) for n in (None, 1, None)]
        for found in narrow.gather(futures, errors="raise"):
            np.testing.assert_array_equal(found, alone)

    def test_on_dasks_joblib_backend(self, narrow, alone):
        # joblib does not bother a cluster of one thread, and fits here: with which client?
        with narrow.as_current(), joblib.parallel_config("dask", client=narrow):
            found = scores(grid_search(est(None, 1)))
        np.testing.assert_array_equal(found, alone)

    def test_from_outside(self, narrow, alone):
        np.testing.assert_array_equal(scores(grid_search(est(narrow, 1))), alone)
        assert narrow.submit(int, pure=False).result(timeout=20) == 0


def score_and_clusters(estimator, X, y):
    """A score, and how many clusters the process has that made it."""
    mine = [cluster for cluster in SpecCluster._instances if cluster.status.name == "running"]
    probabilities = estimator.predict_proba(X)[np.arange(len(y)), y]
    return {
        "loss": -np.log(probabilities.astype(float)).mean(),
        "process": os.getpid(),
        "clusters": len(mine),
    }


@pytest.fixture
def sent(client, cluster, monkeypatch):
    """The bytes of every shard that comes to a worker, whoever has sent it."""
    scheduler, sizes = cluster.scheduler, []
    update = scheduler.update_data

    def counting(**news):
        sizes.extend(size for key, size in news["nbytes"].items() if key.startswith("daskps-shard-"))
        return update(**news)

    monkeypatch.setattr(scheduler, "update_data", counting)
    monkeypatch.setitem(scheduler.handlers, "update_data", counting)
    return sizes


class TestInProcesses:
    """n_jobs=2 on loky, the default of scikit-learn."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def end_processes(cls):
        yield
        joblib.externals.loky.get_reusable_executor().shutdown(wait=True)

    def test_on_the_cluster_of_the_client(self, client, in_sequence):
        found = scores(grid_search(est(client), n_jobs=2))
        np.testing.assert_array_equal(found, in_sequence)

    def test_folds_travel_once_a_process(self, client, sent):
        """And are forgotten after a while, as the client's fixture finds."""
        grid_search(exact_est(client, 4), FOUR, MANY, n_jobs=2)
        assert 8 <= len(sent) <= 16
        assert ONCE <= sum(sent) <= 2.1 * ONCE

    def test_on_private_clusters(self, client):
        """One in each process, however many fits it makes."""
        expected = grid_search(est(client, 1), scoring=score_and_clusters).cv_results_
        found = grid_search(est(None, 1), scoring=score_and_clusters, n_jobs=2).cv_results_
        for fold in ("split0_test_", "split1_test_"):
            np.testing.assert_array_equal(found[fold + "loss"], expected[fold + "loss"])
            np.testing.assert_array_equal(found[fold + "clusters"], 1)
            assert os.getpid() not in found[fold + "process"]


class TestFolds:
    """Every candidate fits on the same folds."""

    @pytest.mark.parametrize("by_address", [False, True])
    def test_travel_once_a_search(self, client, sent, by_address):
        grid_search(exact_est(client.scheduler.address if by_address else client, 4), FOUR, data=MANY)
        assert len(sent) == 2 * 4
        assert ONCE <= sum(sent) <= 1.05 * ONCE
        wait_until(lambda: not _cluster._connections)

    def test_travel_once_a_search_on_threads(self, client, sent):
        """Two threads may send the same fold before either knows of the other."""
        with joblib.parallel_config("threading", n_jobs=2):
            grid_search(exact_est(client, 4), FOUR, data=MANY)
        assert len(sent) <= 16
        assert ONCE <= sum(sent) <= 2.05 * ONCE

    def test_travel_once_a_process_in_tasks(self, client, sent):
        """Once from each of two workers that fit. Where arrays are tiny joblib sends copies: not here."""
        two = list(client.scheduler_info()["workers"])[:2]
        with joblib.parallel_config("dask", client=client, workers=two):
            grid_search(exact_est(None, 4), FOUR, data=MANY)
        assert 8 <= len(sent) <= 16
        assert ONCE <= sum(sent) <= 2.1 * ONCE

    def test_are_forgotten_when_the_search_is_over(self, client):
        """The fixture looks at the cluster; nothing is left on the client either."""
        grid_search(exact_est(client), {"net__lr": [0.01, 0.02]})
        assert not _folds._kept

    def test_are_forgotten_after_a_search_that_failed(self, client):
        with pytest.raises(ValueError, match="has 3 outputs, y has 10 classes"):
            grid_search(exact_est(client), {"net__module__n": [10, 3]})
        assert not _folds._kept

    def test_that_the_user_keeps_are_forgotten_too(self, client):
        splits = list(FOLDS.split(X))
        grid_search(exact_est(client), cv=splits)
        gc.collect()  # the search's own objects refer to each other
        n_kept = len(_folds._kept)
        del splits
        assert n_kept == 0

    def test_that_a_step_before_changes_are_sent_anew(self, client):
        pipe = make_pipeline(FunctionTransformer(scaled, kw_args={"by": 1}), exact_est(client))
        grid = {"functiontransformer__kw_args": [{"by": 1}, {"by": 3}]}
        search = grid_search(pipe, grid, cv=one_fold())
        expected = scores_by_hand(pipe, search.cv_results_["params"], one_fold())
        np.testing.assert_array_equal(scores(search), expected)
        assert expected[0] != expected[1]


def scaled(X, by):
    return X * by


def test_the_folds_of_others_are_no_business_of_ours():
    cross_val_score(LogisticRegression(), X.reshape(90, 64), Y > 4, cv=FOLDS)
    assert _folds.current_fold() == []
    assert not _folds._kept
