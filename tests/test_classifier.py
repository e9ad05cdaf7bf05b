"""The estimator: what goes in and comes out, and that nothing is lost on the way to the workers."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest
import torch
from conftest import local_cluster, needs_usual_policy
from distributed import Client
from nets import CNN3, Bulky, Flat, Heads, Logged, OwnCriterion, Softmax, Strange, read
from reference import (
    PLAIN_SGD,
    digits,
    distance,
    fit_daskps,
    fit_plain,
    identical,
    make_net,
    separable,
    state,
    xy,
)
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold, cross_val_score
from skorch.callbacks import EpochScoring
from torch import nn

from daskps import DistributedCNNClassifier, FitReport

MODES = ["batch", "epoch"]


# Labels and probabilities


LABELS = [
    np.array(["cat", "dog", "eel"], dtype=object),
    np.array(["cat", "dog", "eel"]),
    np.array([3, 5, 7]),
    np.array([1, 2, 3], dtype=np.int32),
    np.array([-1, 1]),
    np.array([False, True]),
]


@pytest.mark.parametrize("labels", LABELS, ids=lambda labels: f"{labels.dtype} {labels.tolist()}")
def test_labels_come_back(client, labels):
    X, y = separable(60, len(labels))
    net = make_net(CNN3, module__n=len(labels), max_epochs=2, batch_size=16)
    ours = fit_daskps(client, net, X, labels[y], n_workers=2)
    np.testing.assert_array_equal(ours.classes_, labels)
    predicted = ours.predict(X)
    assert predicted.dtype == labels.dtype
    np.testing.assert_array_equal(predicted, labels[ours.predict_proba(X).argmax(axis=1)])
    assert ours.score(X, labels[y]) == np.mean(predicted == labels[y])
    encoded = fit_daskps(client, net, X, y, n_workers=2)
    assert identical(ours, encoded)


def own_softmax(values):
    return values.softmax(dim=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"module": CNN3},
        {"module": Softmax, "criterion": nn.NLLLoss},
        {"module": CNN3, "criterion": OwnCriterion, "predict_nonlinearity": own_softmax},
    ],
    ids=["logits", "softmax", "own criterion"],
)
@pytest.mark.parametrize("sync_every", MODES)
def test_probabilities(client, options, sync_every):
    """BR-25: in [0, 1], rows sum to 1, and as of the wrapped net with the same weights."""
    X, y = xy(120, 3)
    net = make_net(**options, module__n=3)
    ours = fit_daskps(client, net, X, y, n_workers=2, sync_every=sync_every)
    found = ours.predict_proba(X)
    assert found.shape == (120, 3)
    assert 0 <= found.min() <= found.max() <= 1
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_array_equal(found, ours.net_.predict_proba(X))
    np.testing.assert_array_equal(found.argmax(axis=1), ours.predict(X))


def test_rows_that_are_no_probabilities(client):
    """BR-25: of a criterion that nobody knows, the net's nonlinearity is used and a warning given."""
    X, y = xy(120, 3)
    net = make_net(CNN3, module__n=3, criterion=OwnCriterion)
    ours = fit_daskps(client, net, X, y, n_workers=2)
    with pytest.warns(UserWarning, match="predict_nonlinearity"):
        found = ours.predict_proba(X)
    np.testing.assert_array_equal(found, ours.net_.predict_proba(X))


def test_more_outputs_than_classes(client):
    """BR-05: a column for every class that was there, and no other."""
    X, y = xy(60, 2)
    ours = fit_daskps(client, make_net(CNN3, module__n=5), X, y, n_workers=2)
    found = ours.predict_proba(X)
    assert found.shape == (60, 2)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)


def test_a_fold_without_one_of_the_classes(client):
    """BR-05: what LogisticRegression scores is scored here."""
    X = xy(41, 3)[0]
    y = np.array([0] * 20 + [1] * 20 + [2])
    net = make_net(CNN3, module__n=3, max_epochs=1, train_split=None)
    folds = KFold(3, shuffle=True, random_state=0)
    for scoring in ("accuracy", "neg_log_loss"):
        with client.as_current(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = cross_val_score(
                DistributedCNNClassifier(net, n_workers=2), X, y, cv=folds, scoring=scoring
            )
            plain = cross_val_score(LogisticRegression(), X.reshape(41, -1), y, cv=folds, scoring=scoring)
        assert np.isfinite(ours[np.isfinite(plain)]).all()


def test_loss_that_is_no_number(client):
    """BR-25: NLLLoss on logits. A NaN is seen in the history, as in plain skorch, and does not hang."""
    X, y = xy(60, 3)
    net = make_net(CNN3, module__n=3, criterion=nn.NLLLoss, max_epochs=1)
    for sync_every in MODES:
        with pytest.warns(RuntimeWarning, match="became NaN"):
            ours = fit_daskps(client, net, X, y, n_workers=2, sync_every=sync_every)
        assert np.isnan(ours.history_[0]["train_loss"])


# Inputs


@pytest.mark.parametrize("kind", ["float64", "float16", "object", "list", "uint8", "tensor", "fortran"])
def test_forms_of_the_same_rows(client, kind):
    """BR-17, BR-29 and BR-55: nobody has to cast."""
    X, y = digits(120, np.float32)
    X, y = (X * 16).astype(np.uint8), y % 3
    forms = {
        "list": lambda: X.astype(float).tolist(),
        "tensor": lambda: torch.as_tensor(X).float(),
        "fortran": lambda: np.asfortranarray(X.astype(np.float32)[::-1])[::-1],
    }
    given = forms[kind]() if kind in forms else X.astype(kind)
    net = make_net(CNN3, module__n=3, max_epochs=2)
    ours = fit_daskps(client, net, given, torch.as_tensor(y) if kind == "tensor" else y, n_workers=2)
    expected = fit_daskps(client, net, X.astype(np.float32), y, n_workers=2)
    assert identical(ours, expected)
    np.testing.assert_array_equal(ours.predict_proba(given), expected.predict_proba(X.astype(np.float32)))


def test_rows_are_checked_again_to_predict(client):
    X, y = xy(60, 3)
    X = X.reshape(60, 64)
    ours = fit_daskps(client, make_net(Flat, module__n_in=64, module__n_out=3), X, y)
    assert ours.n_features_in_ == 64
    with pytest.raises(ValueError, match=r"63 features.*expecting 64"):
        ours.predict(X[:, 1:])
    with pytest.raises(ValueError, match="NaN"):
        ours.predict(np.full_like(X, np.nan))


def test_built_in_net(client):
    """net=None: sized from the data."""
    X, y = separable(120, 3)
    images = DistributedCNNClassifier(client=client, n_workers=2, random_state=0).fit(X, y)
    assert images.score(X, y) > 0.95
    rows = DistributedCNNClassifier(client=client, n_workers=2, random_state=0)
    rows.fit(X.reshape(120, 64).astype(np.float64), y)
    assert rows.report_.world_size == 2
    assert rows.score(X.reshape(120, 64), y) > 0.95
    assert {value.dtype for value in rows.net_.module_.parameters()} == {torch.float64}


# What comes out


def test_attributes_after_fit(client):
    X, y = digits(203, np.float32)
    net = make_net(CNN3)
    estimator = DistributedCNNClassifier(net, client=client, n_workers=2)
    assert estimator.fit(X, y) is estimator
    assert estimator.net is net
    assert not net.initialized_
    assert estimator.history_ is estimator.net_.history
    assert isinstance(estimator.report_, FitReport)
    assert len(estimator.report_.ranks) == 2 * 3
    assert estimator.report_.startup_seconds.keys() >= {"checks", "lease", "scatter", "replicas"}
    assert str(estimator.report_).count("\n") >= 6


def test_the_net_works_on_its_own(client):
    """It goes on training in one process, from the parameters and the momentum that it had."""
    X, y = digits(203, np.float64)
    net = make_net(CNN3, module__dtype=torch.float64, max_epochs=2)
    ours = fit_daskps(client, net, X, y, n_workers=2).net_
    ours.partial_fit(X, y, epochs=1)
    plain = fit_plain(net, X, y)
    plain.partial_fit(X, y, epochs=1)
    assert distance(ours, plain) <= 1e-10
    assert ours.history[:, "epoch"] == [1, 2, 3]


@pytest.mark.parametrize("sync_every", MODES)
def test_history_is_json(client, tmp_path, sync_every):
    """BR-56: what the product records are plain Python values."""
    X, y = digits(203, np.float32)
    ours = fit_daskps(client, make_net(CNN3), X, y, n_workers=2, sync_every=sync_every)
    file = tmp_path / "history.json"
    ours.history_.to_file(str(file))
    assert type(ours.history_).from_file(str(file)) == ours.history_
    assert json.loads(file.read_text())[-1]["train_loss"] == ours.history_[-1]["train_loss"]
    assert json.loads(json.dumps(ours.report_.to_dict())) == ours.report_.to_dict()


def float32_score(net, X, y):
    return np.float32(0.5)


def test_a_score_that_json_does_not_know(client, tmp_path):
    """BR-56: a user's own value is the user's, as in plain skorch; the epoch does not break."""
    X, y = digits(203, np.float32)
    net = make_net(CNN3, callbacks=[EpochScoring(float32_score, name="odd", use_caching=False)])
    ours = fit_daskps(client, net, X, y, n_workers=2)
    assert ours.history_[-1, "odd"] == 0.5


# Nothing is lost or made up on the way


@pytest.mark.parametrize("sync_every", MODES)
def test_every_fit_trains(client, tmp_path, sync_every):
    """BR-22: equal calls are not answered from a cache, though nothing that is sent changes."""
    X, y = xy(64, 4)
    log = str(tmp_path / "log")
    net = make_net(
        Logged, module__n=4, module__path=log, batch_size=16, train_split=None,
        optimizer=torch.optim.SGD, lr=0.0,
    )  # fmt: skip
    batches_per_epoch = 2 * 4 if sync_every == "batch" else 2 * 2
    for fit in (1, 2):
        ours = fit_daskps(client, net, X, y, n_workers=2, sync_every=sync_every, random_state=0)
        assert len(ours.history_) == 3
        assert len(read(log)) == fit * 3 * batches_per_epoch


def marked(n):
    """Rows of three classes; those of class 0 are marked in the first pixel."""
    X, y = xy(n, 3)
    X[:, 0, 0, 0] = y == 0
    return X.astype(np.float64), y


@pytest.mark.parametrize("n_workers", [2, 3])
def test_layers_without_a_gradient(client, n_workers):
    """BR-40: unused on all ranks stays untouched, also by weight decay; used on one rank counts."""
    X, y = marked(48)
    order = np.argsort(y, kind="stable")
    X, y = X[order], y[order]
    net = make_net(
        Heads, module__dtype=torch.float64, optimizer__weight_decay=0.1, train_split=None, batch_size=16
    )
    plain = fit_plain(net, X, y)
    ours = fit_daskps(client, net, X, y, n_workers=n_workers)
    assert distance(ours, plain) <= 1e-10
    torch.manual_seed(0)
    before = state(clone(net).initialize())
    assert torch.equal(state(ours)["none.weight"], before["none.weight"])
    assert not torch.equal(state(ours)["some.weight"], before["some.weight"])


@pytest.mark.parametrize("sync_every", MODES)
def test_unused_layer_in_local_steps(client, sync_every):
    """BR-40: a layer that one rank alone uses, in both modes: no hang, and the unused one untouched."""
    X, y = marked(64)
    X[1:, 0, 0, 0] = 0
    net = make_net(Heads, module__dtype=torch.float64, train_split=None, optimizer__weight_decay=0.1)
    ours = fit_daskps(client, net, X, y, n_workers=4, sync_every=sync_every)
    torch.manual_seed(0)
    before = state(clone(net).initialize())
    assert torch.equal(state(ours)["none.weight"], before["none.weight"])
    assert not torch.equal(state(ours)["some.weight"], before["some.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_of_every_kind(client, dtype):
    """BR-23: not contiguous, frozen, without dimension, an integer buffer, bfloat16."""
    X, y = xy(70, 3)
    net = make_net(Strange, module__dtype=dtype, batch_size=70, max_epochs=1, train_split=None, **PLAIN_SGD)
    plain = fit_plain(net, X, y)
    ours = fit_daskps(client, net, X, y, n_workers=2)
    torch.manual_seed(0)
    before = clone(net).initialize().module_
    found, expected = ours.net_.module_, plain.module_
    for (name, value), other, start in zip(
        found.named_parameters(), expected.parameters(), before.parameters(), strict=True
    ):
        assert (value.shape, value.dtype, value.requires_grad) == (
            (other.shape, other.dtype, other.requires_grad)
        ), name
        torch.testing.assert_close(value, other, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)
        assert torch.equal(value, start) == (not value.requires_grad), name
    assert found.calls == expected.calls == 1


# Many fits


@pytest.mark.parametrize("sync_every", MODES)
def test_one_after_the_other(client, sync_every):
    """BR-10: the same data is scattered again while the last one's is still being released."""
    X, y = xy(60, 3)
    net = make_net(CNN3, module__n=3, max_epochs=1, batch_size=16, train_split=None)
    template = DistributedCNNClassifier(net, n_workers=2, random_state=0, sync_every=sync_every)
    fits = {0.1: [], 0.01: []}
    with client.as_current():
        for _ in range(5):
            for lr in fits:
                estimator = clone(template).set_params(net__lr=lr).fit(X, y)
                fits[lr].append(estimator.net_.module_)
                del estimator
    for modules in fits.values():
        assert all(identical(modules[0], module) for module in modules)
    assert distance(fits[0.1][0], fits[0.01][0]) > 1e-3


def test_the_shape_of_the_cluster_does_not_matter(client):
    """BR-28: one process of four threads, or four of one."""
    X, y = digits(203)
    net = make_net(CNN3, module__dtype=torch.float64)
    four = fit_daskps(client, net, X, y, n_workers=4)
    with (
        local_cluster(n_workers=1, threads_per_worker=4, processes=False) as cluster,
        Client(cluster, set_as_default=False) as other,
    ):
        one = fit_daskps(other, net, X, y)
    assert (four.report_.world_size, one.report_.world_size) == (4, 1)
    assert distance(four, one) <= 1e-10


# Threads and bytes


def test_threads(client, tmp_path):
    """BR-47: torch uses as many threads as the worker has, and the caller's number stays."""
    X, y = xy(64, 3)
    before = torch.get_num_threads()
    used = []
    for n_workers, threads in ((2, 1), (1, 2)):
        log = str(tmp_path / f"log {threads}")
        net = make_net(Logged, module__n=3, module__path=log, max_epochs=1, train_split=None)
        with (
            local_cluster(n_workers=n_workers, threads_per_worker=threads, processes=False) as cluster,
            Client(cluster, set_as_default=False) as other,
        ):
            fit_daskps(other, net, X, y)
        used += {line["threads"] for line in read(log)}
    log = str(tmp_path / "log of processes")
    fit_daskps(client, net.set_params(module__path=log), X, y, n_workers=2)
    used += {line["threads"] for line in read(log)}
    assert used == [1, 2, 1]
    assert torch.get_num_threads() == before


@needs_usual_policy
def test_ranks_put_nobody_aside(client, tmp_path):
    X, y = xy(64, 3)
    log = str(tmp_path / "log")
    net = make_net(Logged, module__n=3, module__path=log, max_epochs=1, train_split=None)
    fit_daskps(client, net, X, y, n_workers=2)
    assert {line["policy"] for line in read(log)} == {os.SCHED_BATCH}
    policies = client.gather([client.submit(os.sched_getscheduler, 0, pure=False) for _ in range(8)])
    assert set(policies) == {os.SCHED_OTHER}


def test_bytes(client, monkeypatch):
    """BR-49: no warning of a large graph; a shard travels once a fit, a model once a round."""
    X, y = np.random.RandomState(0).rand(10_000, 1, 32, 32).astype(np.float32), np.arange(10_000) % 3
    net = make_net(Bulky, batch_size=5000, train_split=None, optimizer=torch.optim.SGD, lr=0.01)
    sent = []
    scatter = Client.scatter

    def counting(self, data, *args, **kwargs):
        sent.append(sum(n_bytes(part) for item in data for part in item))
        return scatter(self, data, *args, **kwargs)

    monkeypatch.setattr(Client, "scatter", counting)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = fit_daskps(client, net, X, y, n_workers=2)
    monkeypatch.undo()
    model = 4 * sum(p.numel() for p in ours.net_.module_.parameters())
    assert model > 20e6
    assert sum(sent) <= X.nbytes + y.nbytes + 1.1 * model
    for entry in ours.report_.ranks:
        assert entry.rounds == 2
        assert entry.bytes == pytest.approx(2 * 2 * model, rel=0.01)


def n_bytes(part):
    return len(part) if isinstance(part, bytes) else getattr(part, "nbytes", 0)
