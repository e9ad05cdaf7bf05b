"""Clones, copies and pickles, before and after fit, whatever the client."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap

import cloudpickle
import joblib
import numpy as np
import pytest
import torch
from distributed import Client
from nets import CNN3, Normed
from reference import digits, identical, make_net
from sklearn.base import clone
from skorch.callbacks import EpochScoring, LRScheduler, ProgressBar

import daskps
from daskps import DistributedCNNClassifier, on_ranks

DATA = digits(100, np.float32)


def pickled(value):
    return pickle.loads(pickle.dumps(value))


def cloudpickled(value):
    return cloudpickle.loads(cloudpickle.dumps(value))


def joblib_dumped(value):
    path = os.path.join(joblib_dumped.folder, "model.joblib")
    joblib.dump(value, path, compress=3)
    return joblib.load(path)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(joblib_dumped, "folder", tmp_path, raising=False)


PICKLES = [pickled, cloudpickled, joblib_dumped]
COPIES = [*PICKLES, copy.deepcopy, copy.copy]
ALL = [*COPIES, clone]


def full_net(**options):
    """Everything that is hard to copy: dropout, momentum, schedules by epoch and batch, a progress bar."""
    callbacks = [
        ("by_epoch", LRScheduler("StepLR", step_size=2, gamma=0.5)),
        ("by_batch", LRScheduler("CyclicLR", base_lr=0.01, max_lr=0.1, step_every="batch")),
        ("score", EpochScoring("accuracy", on_train=True, lower_is_better=False)),
        ("bar", ProgressBar(detect_notebook=False)),
    ]
    return make_net(
        CNN3,
        module__dropout=0.3,
        callbacks=callbacks,
        iterator_train__shuffle=True,
        max_epochs=2,
        callbacks__bar=None,
        **options,
    )


def est(client=None, **options):
    return DistributedCNNClassifier(full_net(), client=client, n_workers=2, random_state=0, **options)


@pytest.fixture(params=["client", "address"])
def given(request, client):
    """The client as a user may give it."""
    return client if request.param == "client" else client.scheduler.address


@pytest.fixture(scope="module")
def fitted_once(session_client):
    return est(session_client).fit(*DATA)


@pytest.fixture
def fitted(fitted_once):
    """A fitted estimator that no test has touched."""
    return copy.deepcopy(fitted_once)


class TestBeforeFit:
    @pytest.mark.parametrize("duplicate", ALL)
    def test_parameters_stay(self, given, duplicate):
        ours = est(given, class_weight={0: 2.0}, sync_every="epoch")
        other = duplicate(ours)
        assert type(other) is DistributedCNNClassifier
        assert plain_params(other) == plain_params(ours)
        assert (other.net is ours.net) == (duplicate is copy.copy)

    @pytest.mark.parametrize("duplicate", [clone, copy.deepcopy, copy.copy])
    def test_a_client_is_shared(self, client, duplicate):
        assert duplicate(est(client)).client is client

    @pytest.mark.parametrize("duplicate", PICKLES)
    def test_of_a_client_travels_the_address(self, given, client, duplicate):
        assert duplicate(est(given)).client == client.scheduler.address

    @pytest.mark.parametrize("duplicate", ALL)
    def test_without_net_and_client(self, duplicate):
        other = duplicate(DistributedCNNClassifier(n_workers=3))
        assert other.get_params() == DistributedCNNClassifier(n_workers=3).get_params()

    @pytest.mark.parametrize("duplicate", ALL)
    def test_a_client_that_is_closed_breaks_nothing(self, cluster, duplicate):
        with Client(cluster, set_as_default=False) as closed:
            ours = est(closed)
        assert plain_params(duplicate(ours)) == plain_params(ours)

    def test_a_clone_of_a_clone(self, given):
        ours = est(given)
        assert plain_params(clone(clone(ours))) == plain_params(ours)

    def test_a_clone_is_not_tied_to_the_first(self, client):
        ours = est(client)
        clone(ours).set_params(net__lr=0.5, net__module__n=3, sync_every="epoch")
        assert plain_params(ours) == plain_params(est(client))

    def test_a_random_state_is_copied(self):
        state = np.random.RandomState(0)
        ours = DistributedCNNClassifier(random_state=state)
        assert clone(ours).random_state is not state
        assert clone(ours).random_state.randint(100) == np.random.RandomState(0).randint(100)

    @pytest.mark.parametrize("duplicate", ALL)
    def test_no_random_number_is_drawn(self, duplicate, client):
        assert_draws_nothing(lambda: duplicate(est(client)))


def assert_draws_nothing(act):
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(()), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    act()
    assert (torch.rand(()), np.random.rand()) == expected


def plain_params(ours):
    """All parameters but objects, of which a clone has its own."""
    params = ours.get_params()
    kinds = (int, float, str, dict, tuple, type, type(None))
    return {name: value if isinstance(value, kinds) else type(value) for name, value in params.items()} | {
        "client": None
    }


class TestAfterFit:
    def test_a_clone_is_not_fitted(self, fitted):
        other = clone(fitted)
        assert not [name for name in vars(other) if name.endswith("_") and not name.startswith("__")]
        assert identical(other.fit(*DATA), fitted)

    @pytest.mark.parametrize("duplicate", COPIES)
    def test_everything_is_there(self, fitted, duplicate):
        other = duplicate(fitted)
        assert identical(other, fitted)
        np.testing.assert_array_equal(other.predict_proba(DATA[0]), fitted.predict_proba(DATA[0]))
        np.testing.assert_array_equal(other.predict(DATA[0]), fitted.predict(DATA[0]))
        assert other.classes_.tolist() == fitted.classes_.tolist()
        assert other.n_features_in_ == fitted.n_features_in_
        assert other.history_ == fitted.history_
        assert other.history_ is other.net_.history
        assert other.report_.to_dict() == fitted.report_.to_dict()
        assert other.score(*DATA) == fitted.score(*DATA)
        assert_draws_nothing(lambda: duplicate(fitted))
        assert plain_params(other) == plain_params(fitted)

    @pytest.mark.parametrize("sync_every", ["batch", "epoch"])
    @pytest.mark.parametrize("duplicate", [pickled, copy.deepcopy])
    def test_training_goes_on_exactly_as_without(self, client, duplicate, sync_every):
        fitted = est(client, sync_every=sync_every).fit(*DATA)
        other = duplicate(fitted)
        fitted.partial_fit(*DATA)
        other.partial_fit(*DATA)
        assert identical(other, fitted)
        assert len(other.history_) == 4
        for key in ("train_loss", "valid_loss", "accuracy", "event_lr"):
            assert other.history_[:, key] == fitted.history_[:, key]
        rates = [other.history_[:, "batches", :, "event_lr"], fitted.history_[:, "batches", :, "event_lr"]]
        assert rates[0] == rates[1]
        assert len(set(np.ravel(rates[0][2:]))) > 3  # the schedule goes on too

    @pytest.mark.parametrize("duplicate", [pickled, copy.deepcopy])
    def test_the_first_is_not_tied_to_a_copy(self, fitted, fitted_once, duplicate):
        other = duplicate(fitted)
        other.partial_fit(*DATA)
        assert identical(fitted, fitted_once)
        assert len(fitted.history_) == 2
        assert len(fitted.net_.history) == 2

    @pytest.mark.parametrize("duplicate", [pickled, copy.deepcopy])
    def test_a_second_time(self, fitted, duplicate):
        assert identical(duplicate(duplicate(fitted)), fitted)

    @pytest.mark.parametrize("duplicate", PICKLES)
    def test_buffers_are_there(self, client, duplicate):
        X, y = DATA
        fitted = DistributedCNNClassifier(make_net(Normed), client=client, n_workers=2, random_state=0).fit(
            X, y
        )
        other = duplicate(fitted)
        assert identical(other, fitted)
        np.testing.assert_array_equal(other.predict_proba(X), fitted.predict_proba(X))

    @pytest.mark.parametrize("duplicate", COPIES)
    def test_of_the_built_in_net(self, client, duplicate):
        X, y = DATA
        fitted = DistributedCNNClassifier(client=client, n_workers=2, random_state=0).fit(X, y)
        other = duplicate(fitted)
        assert other.net is None
        np.testing.assert_array_equal(other.predict_proba(X), fitted.predict_proba(X))

    def test_callbacks_on_ranks(self, client):
        rate = LRScheduler("StepLR", step_size=1, gamma=0.5)
        net = make_net(CNN3, callbacks=[("rate", on_ranks(rate))], train_split=None)
        fitted = DistributedCNNClassifier(net, client=client, n_workers=2, random_state=0).fit(*DATA)
        other = pickled(fitted)
        assert identical(other.partial_fit(*DATA), fitted.partial_fit(*DATA))
        plain = make_net(CNN3, callbacks=[("rate", rate)], train_split=None)
        plain.fit(*DATA).partial_fit(*DATA)
        assert other.net_.optimizer_.param_groups[0]["lr"] == plain.optimizer_.param_groups[0]["lr"]

    def test_functions_of_a_script(self, client):
        """A lambda cannot be pickled by name."""
        net = make_net(
            CNN3,
            callbacks=[
                ("score", EpochScoring(lambda net, X, y: 0.5, name="half", lower_is_better=False)),
                ("rate", LRScheduler("LambdaLR", lr_lambda=lambda epoch: 0.5**epoch)),
            ],
        )
        fitted = DistributedCNNClassifier(net, client=client, n_workers=2, random_state=0).fit(*DATA)
        other = pickled(fitted)
        assert identical(other.partial_fit(*DATA), fitted.partial_fit(*DATA))
        assert other.history_[:, "half"] == [0.5] * len(other.history_)


class TestElsewhere:
    """In a process without any cluster."""

    def run(self, tmp_path, *scripts):
        """Run scripts, each in a process and a folder of its own; return what the last prints."""
        for number, script in enumerate(scripts):
            home = tmp_path / str(number)
            home.mkdir()
            (home / "script.py").write_text(textwrap.dedent(script))
            root = os.path.dirname(os.path.dirname(daskps.__file__))
            done = subprocess.run(
                [sys.executable, "script.py", str(tmp_path)],
                cwd=home,
                env={**os.environ, "PYTHONPATH": root},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            (home / "script.py").unlink()
        return done.stdout.split()

    # The script fits in its own process: a rank in a thread is as good here, and starts sooner.
    TRAIN = """
        import pickle, sys
        import joblib, numpy as np, torch
        from distributed import Client
        from skorch import NeuralNetClassifier
        from skorch.callbacks import Callback
        from daskps import DistributedCNNClassifier

        class Own(torch.nn.Module):
            def __init__(self, width=5):
                super().__init__()
                self.layers = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, 2))

            def forward(self, X):
                return scaled(self.layers(X))

        class Silent(Callback):
            pass

        def scaled(X):
            return X * 2

        if __name__ == "__main__":
            X = np.random.RandomState(0).rand(50, 8).astype("float32")
            y = np.array(["no", "yes"])[np.arange(50) % 2]
            net = NeuralNetClassifier(
                Own, criterion=torch.nn.CrossEntropyLoss, callbacks=[Silent()], max_epochs=1, verbose=0
            )
            quiet = {"dashboard_address": None, "scheduler_kwargs": {"dashboard_address": ":0"}}
            with Client(n_workers=1, threads_per_worker=1, processes=False, **quiet) as client:
                clf = DistributedCNNClassifier(net, client=client, random_state=0).fit(X, y)
            joblib.dump(clf, sys.argv[1] + "/model.joblib")
            with open(sys.argv[1] + "/model.pickle", "wb") as file:
                pickle.dump(clf, file)
            np.savez(sys.argv[1] + "/data.npz", X=X, y=y, expected=clf.predict_proba(X))
    """

    PREDICT = """
        import pickle, sys
        import joblib, numpy as np

        data = np.load(sys.argv[1] + "/data.npz")
        with open(sys.argv[1] + "/model.pickle", "rb") as file:
            models = [pickle.load(file), joblib.load(sys.argv[1] + "/model.joblib")]
        for clf in models:
            np.testing.assert_array_equal(clf.predict_proba(data["X"]), data["expected"])
            assert set(clf.predict(data["X"])) <= {"no", "yes"}
            assert 0 <= clf.score(data["X"], data["y"]) <= 1
            again = pickle.loads(pickle.dumps(clf))
            np.testing.assert_array_equal(again.predict_proba(data["X"]), data["expected"])
        from distributed import Client
        assert not list(Client._instances)
        print("good")
    """

    def test_a_model_of_a_script_predicts_without_the_script(self, tmp_path):
        assert self.run(tmp_path, self.TRAIN, self.PREDICT) == ["good"]
