"""Batch mode is plain skorch: any number of workers, the same parameters to rounding."""

from __future__ import annotations

import dask
import numpy as np
import pytest
import torch
from nets import CNN3, Normed, Softmax, WithPenalty
from probes import states_by_rank
from reference import (
    ADAM,
    DOUBLE,
    MOMENTUM,
    PLAIN_SGD,
    assert_same_history,
    digits,
    distance,
    fit_daskps,
    fit_plain,
    make_net,
    rows_reordered,
    separable,
    state,
    xy,
)
from skorch.callbacks import Callback, LRScheduler
from torch import nn

from daskps import CNN
from daskps._partitions import Batching, pieces, plan_batches


def images_28():
    """Digits, each pixel three by three, with a border and noise.

    Without noise equal pixels tie in the pooling, and rounding would decide which of them counts.
    """
    X, y = digits()
    X = np.pad(X.repeat(3, axis=2).repeat(3, axis=3), [(0, 0), (0, 0), (2, 2), (2, 2)])
    return X + np.random.RandomState(0).uniform(0, 0.1, X.shape), y


def assert_equals_plain(client, net, X, y, n_workers, within=1e-10, seed=0):
    """Parameters, and the history with all its keys."""
    plain = fit_plain(net, X, y, seed)
    for k in np.atleast_1d(n_workers).tolist():
        ours = fit_daskps(client, net, X, y, seed, n_workers=k)
        assert ours.report_.world_size == k
        assert distance(ours, plain) <= within
        assert_same_history(ours, plain, within)


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_float64(client, optimizer):
    X, y = digits()
    assert_equals_plain(client, make_net(CNN3, **DOUBLE, **optimizer), X, y, [1, 2, 3, 4])


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_float32_on_digits(client, optimizer):
    X, y = digits(dtype=np.float32)
    assert_equals_plain(client, make_net(CNN3, **optimizer), X, y, [1, 2, 3, 4], within=1e-5)


# The CNN of the design: 421,642 parameters, here without dropout.
BIG = {"module__input_shape": (1, 28, 28), "module__n_classes": 10, "module__dropout": 0.0}


def test_big_cnn_in_float64(client):
    X, y = images_28()
    net = make_net(CNN, **BIG, **DOUBLE, **MOMENTUM)
    assert sum(p.numel() for p in net.initialize().module_.parameters()) == 421_642
    assert_equals_plain(client, net, X[:403], y[:403], 2)


def test_big_cnn_in_float64_on_three_workers(client):
    X, y = images_28()
    net = make_net(CNN, **BIG, **DOUBLE, **ADAM, max_epochs=1)
    assert_equals_plain(client, net, X[:203], y[:203], 3)


def test_big_cnn_in_float32_is_as_near_as_plain_skorch_is_to_itself(client):
    """Here rounding decides now and then which pixel a pooling takes, and grows from there.

    Plain skorch meets that too if the rows inside its batches come in another order. Whether one order
    meets it is chance, so several are tried.
    """
    X, y = images_28()
    X, y = X[:403].astype(np.float32), y[:403]
    net = make_net(CNN, **BIG, **MOMENTUM, max_epochs=1, train_split=None)
    plain = fit_plain(net, X, y)
    others = [fit_plain(net, *rows_reordered(X, y, 32, seed)) for seed in (None, 1, 2, 3)]
    floor = max(distance(plain, other) for other in others)
    assert 0 < floor < 0.01
    for k in (2, 3, 4):
        assert distance(fit_daskps(client, net, X, y, n_workers=k), plain) <= 3 * floor


# Losses that are no plain mean over rows


@pytest.mark.parametrize("n_workers", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"criterion__weight": torch.linspace(0.1, 3, 10, dtype=torch.float64)},
        {"criterion__ignore_index": 3},
        {"criterion__weight": torch.linspace(0, 3, 10, dtype=torch.float64), "criterion__ignore_index": 9},
        {"criterion__label_smoothing": 0.2},
        {"criterion__reduction": "sum", "lr": 0.001},
        {"module": Softmax, "criterion": nn.NLLLoss},
        {"net_class": WithPenalty},
    ],
    ids=["weight", "ignore_index", "weight+ignore_index", "smoothing", "sum", "nll", "own get_loss"],
)
def test_losses(client, options, n_workers):
    X, y = digits(603)
    net = make_net(**{"module": CNN3, **DOUBLE, "max_epochs": 2, **options})
    assert_equals_plain(client, net, X, y, n_workers)


# Which rows make up a batch


@pytest.mark.parametrize(
    ("n_rows", "options"),
    [
        (203, {"train_split": None}),
        (203, {"batch_size": -1}),
        (203, {"iterator_train__drop_last": True}),
        (203, {"iterator_train__batch_size": 50, "iterator_valid__batch_size": 7}),
        (203, {"batch_size": 3, "max_epochs": 1}),
        (65, {"batch_size": 1, "max_epochs": 1}),
        (300, {"batch_size": 1000}),
    ],
    ids=["no split", "one batch", "drop_last", "own sizes", "3 rows", "1 row", "too large a batch"],
)
def test_batches(client, n_rows, options):
    X, y = digits(n_rows)
    with dask.config.set({"daskps.min-rows-per-rank": 1}):
        assert_equals_plain(client, make_net(CNN3, **DOUBLE, **options), X, y, 4)


def test_fewer_rows_than_workers(client):
    X, y = xy(3, 3)
    net = make_net(CNN3, module__n=3, train_split=None, **DOUBLE)
    plain = fit_plain(net, X.astype(np.float64), y)
    with dask.config.set({"daskps.min-rows-per-rank": 1}):
        ours = fit_daskps(client, net, X, y, n_workers=4)
    assert ours.report_.world_size == 3
    assert distance(ours, plain) <= 1e-10


def test_few_rows_use_few_workers_without_a_warning(client, recwarn):
    X, y = xy(40, 4)
    ours = fit_daskps(client, make_net(CNN3, module__n=4, train_split=None), X, y, n_workers=4)
    assert ours.report_.world_size == 2
    assert not [w for w in recwarn if "daskps" in str(w.filename)]


# Batch normalisation: rows of the own rank normalise, the running buffers are averaged


def test_batchnorm_trains_and_all_ranks_hold_the_same(client, session_client):
    X, y = digits()
    seen = []

    def look(net):
        seen.append((state(net), states_by_rank(session_client)))

    class Look(Callback):
        def on_epoch_end(self, net, **kwargs):
            look(net)

    for k in (1, 2, 3, 4):
        seen.clear()
        net = make_net(Normed, **DOUBLE, callbacks=[("look", Look())])
        ours = fit_daskps(client, net, X, y, n_workers=k)
        assert ours.report_.world_size == k
        assert ours.history_[-1]["train_loss"] < ours.history_[0]["train_loss"]
        assert len(seen) == 3
        for master, ranks in seen:
            assert len(ranks) == k
            for held in ranks:
                for name, value in master.items():
                    np.testing.assert_array_equal(held[name], value.numpy(), err_msg=name)
        if k == 1:
            assert distance(ours, fit_plain(make_net(Normed, **DOUBLE), X, y)) == 0


def test_batchnorm_buffers_follow_the_rule(client):
    """Every rank normalises with its own rows; an epoch ends with the mean of the buffers, by rows."""
    X, y = digits(203)
    net = make_net(Normed, train_split=None, **DOUBLE)
    ours = fit_daskps(client, net, X, y, n_workers=2)

    torch.manual_seed(0)
    first = net.initialize().module_.train()
    replicas = [first, Normed(dtype=torch.float64)]
    plan = plan_batches(203, Batching(32), 2, seed=0)
    batches = [pieces(rows, sizes) for rows, sizes in zip(plan.rows, plan.sizes, strict=True)]
    optimizer = torch.optim.SGD(first.parameters(), lr=0.05, momentum=0.9)
    shares = np.array([len(rows) for rows in plan.rows]) / 203
    assert shares[0] != shares[1]
    for _ in range(3):
        replicas[1].load_state_dict(first.state_dict())
        for parts in zip(*batches, strict=True):
            step_together(replicas, optimizer, X, y, parts)
        average_buffers(replicas, shares)
    assert distance(ours, first) <= 1e-10


def step_together(replicas, optimizer, X, y, parts):
    n_rows = sum(map(len, parts))
    for replica, rows in zip(replicas, parts, strict=True):
        replica.zero_grad()
        output = replica(torch.as_tensor(X[rows]))
        loss = nn.functional.cross_entropy(output, torch.as_tensor(y[rows]), reduction="sum")
        (loss / n_rows).backward()
    for mine, other in zip(*(replica.parameters() for replica in replicas), strict=True):
        mine.grad += other.grad
    optimizer.step()
    with torch.no_grad():
        for mine, other in zip(*(replica.parameters() for replica in replicas), strict=True):
            other.copy_(mine)


def average_buffers(replicas, shares):
    for mine, other in zip(*(replica.buffers() for replica in replicas), strict=True):
        if mine.is_floating_point():
            mine.copy_(shares[0] * mine + shares[1] * other)


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_batchnorm_meets_no_single_row_that_plain_skorch_does_not(client, sync_every):
    """BR-26: 50 rows in batches of 16 leave two, which no two workers may share."""
    X, y = xy(50, 3)
    net = make_net(Normed, module__n_out=3, batch_size=16, train_split=None)
    ours = fit_daskps(client, net, X, y, n_workers=3, sync_every=sync_every)
    assert ours.report_.world_size == 3
    assert all(np.isfinite(ours.history_[:, "train_loss"]))


# Schedules


@pytest.mark.parametrize("n_workers", [1, 2, 3])
def test_schedule_by_epoch(client, n_workers):
    """BR-38: the rates do not depend on the number of workers."""
    X, y = digits(203)
    step_lr = LRScheduler("StepLR", step_size=1, gamma=0.5)
    net = make_net(CNN3, **DOUBLE, **PLAIN_SGD, callbacks=[("lr", step_lr)])
    ours = fit_daskps(client, net, X, y, n_workers=n_workers)
    assert ours.history_[:, "event_lr"] == [0.1, 0.05, 0.025]
    assert distance(ours, fit_plain(net, X, y)) <= 1e-10


# Weighted by rows: BR-01 and BR-02, for arrays


def sorted_rows():
    X = np.random.RandomState(0).rand(70, 1, 8, 8).astype(np.float32)
    return X, np.sort(np.arange(70) % 3)


@pytest.mark.parametrize(
    "options",
    [{}, {"criterion__weight": torch.tensor([1.0, 1, 10])}, {"criterion__reduction": "sum", "lr": 0.01}],
    ids=["mean", "class weights", "sum"],
)
def test_one_step_is_one_step_on_all_rows(client, options):
    """BR-01: two workers of different numbers of rows and of different classes."""
    X, y = sorted_rows()
    settings = {**PLAIN_SGD, "lr": 1.0, "batch_size": -1, "max_epochs": 1, "train_split": None}
    net = make_net(CNN3, module__n=3, **{**settings, **options})
    plain = fit_plain(net, X, y)
    ours = fit_daskps(client, net, X, y, n_workers=3)
    assert distance(ours, plain) <= 1e-5
    assert ours.history_[0]["train_loss"] == pytest.approx(plain.history[0]["train_loss"], abs=1e-5)


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_more_workers_are_no_larger_step(client, sync_every):
    """BR-02: an easy problem is learnt as well by four workers as by one."""
    X, y = separable(200, 4)
    net = make_net(CNN3, module__n=4, max_epochs=10, train_split=None, batch_size=32, **PLAIN_SGD)
    one, four = (
        fit_daskps(client, net, X, y, n_workers=k, sync_every=sync_every).score(X, y) for k in (1, 4)
    )
    assert one == 1.0
    assert four >= one - 0.02
