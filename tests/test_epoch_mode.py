"""Epoch mode and every H steps: what the ranks would do alone, averaged by rows."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import torch
from nets import CNN3, Flat, Logged, Normed, read
from reference import (
    ADAM,
    DOUBLE,
    MOMENTUM,
    PLAIN_SGD,
    digits,
    distance,
    fit_daskps,
    fit_plain,
    identical,
    make_net,
    numbered,
    separable,
    state,
    xy,
)
from sklearn.base import clone
from skorch.callbacks import LRScheduler
from torch.utils.data import DataLoader

from daskps._partitions import Batching, pieces, plan_local


def shards_of(n_rows, batch_size, n_workers):
    """The rows of every step of every rank, as daskps cuts arrays."""
    plan = plan_local(n_rows, Batching(batch_size), n_workers, seed=0)
    return [pieces(rows, sizes) for rows, sizes in zip(plan.rows, plan.sizes, strict=True)]


def planned(dataset, batch_size, steps):
    """A skorch iterator over batches that somebody else has chosen."""
    return DataLoader(dataset, batch_sampler=[rows.tolist() for rows in steps if len(rows)])


class AloneThenAveraged:
    """Plain skorch nets, one on every shard, that are averaged after every epoch."""

    def __init__(self, net, X, y, shards):
        self.X, self.y, self.net = X, y, net
        self.shares = np.array([sum(map(len, steps)) for steps in shards])
        self.nets = [self.start(steps) for steps in shards]

    def start(self, steps):
        own = {"iterator_train": planned, "iterator_train__steps": steps, "train_split": None}
        torch.manual_seed(0)
        return clone(self.net).set_params(**own).initialize()

    def run(self, n_epochs):
        for _ in range(n_epochs):
            for net in self.nets:
                net.partial_fit(self.X, self.y, epochs=1)
            self.average()
        return self.nets[0]

    def average(self):
        mean_into([list(net.module_.parameters()) for net in self.nets], self.shares)
        mean_into([list(net.module_.buffers()) for net in self.nets], self.shares)
        mean_into([optimizer_state(net) for net in self.nets], self.shares)


def optimizer_state(net):
    return [value for held in net.optimizer_.state.values() for value in held.values() if value is not None]


def mean_into(lists, shares):
    """Replace tensors that correspond to each other by their mean; integers by the first's."""
    with torch.no_grad():
        for tensors in zip(*lists, strict=True):
            first = tensors[0]
            if first.is_floating_point():
                mean = sum(s * t for s, t in zip(shares, tensors, strict=True)) / shares.sum()
            else:
                mean = first.clone()
            for tensor in tensors:
                tensor.copy_(mean)


@pytest.mark.parametrize("n_epochs", [1, 3])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_is_the_average_of_two_runs(client, optimizer, n_epochs):
    X, y = digits(640)
    net = make_net(CNN3, **DOUBLE, **optimizer, max_epochs=n_epochs, train_split=None)
    shards = shards_of(640, 32, 2)
    assert [sum(map(len, steps)) for steps in shards] == [320, 320]
    expected = AloneThenAveraged(net, X, y, shards).run(n_epochs)
    ours = fit_daskps(client, net, X, y, sync_every="epoch", n_workers=2)
    assert ours.report_.world_size == 2
    assert distance(ours, expected) <= 1e-10
    ours_held, expected_held = optimizer_state(ours.net_), optimizer_state(expected)
    for held, value in zip(ours_held, expected_held, strict=True):
        torch.testing.assert_close(held, value, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n_rows", "n_workers"), [(603, 2), (1003, 3), (130, 4)])
def test_unequal_shards(client, n_rows, n_workers):
    X, y = digits(n_rows)
    net = make_net(CNN3, **DOUBLE, train_split=None)
    shards = shards_of(n_rows, 31, n_workers)
    assert len({sum(map(len, steps)) for steps in shards}) > 1
    expected = AloneThenAveraged(net.set_params(batch_size=31), X, y, shards).run(3)
    ours = fit_daskps(client, net, X, y, sync_every="epoch", n_workers=n_workers)
    assert ours.report_.world_size == n_workers
    assert distance(ours, expected) <= 1e-10


def test_blocks_of_a_dask_array(client):
    """Ranks take contiguous blocks: unequal ones, cut into as many steps.

    The second has 251 rows: steps of 25 would leave one row, so that both are cut evenly.
    """
    X, y = digits(501)
    net = make_net(CNN3, **DOUBLE, train_split=None, batch_size=25)
    shards = [np.array_split(np.arange(250), 11), np.array_split(np.arange(250, 501), 11)]
    expected = AloneThenAveraged(net, X, y, shards).run(3)
    chunked = da.from_array(X, chunks=(77, 1, 8, 8))
    ours = fit_daskps(client, net, chunked, y, sync_every="epoch", n_workers=2)
    assert distance(ours, expected) <= 1e-10


def test_single_precision(client):
    X, y = digits(640, np.float32)
    net = make_net(CNN3, train_split=None, max_epochs=1)
    expected = AloneThenAveraged(net, X, y, shards_of(640, 32, 2)).run(1)
    ours = fit_daskps(client, net, X, y, sync_every="epoch", n_workers=2)
    assert distance(ours, expected) <= 1e-6


def test_batchnorm_buffers_are_averaged(client):
    X, y = digits(640)
    net = make_net(Normed, **DOUBLE, train_split=None)
    expected = AloneThenAveraged(net, X, y, shards_of(640, 32, 2)).run(3)
    ours = fit_daskps(client, net, X, y, sync_every="epoch", n_workers=2)
    assert distance(ours, expected) <= 1e-10
    assert state(ours)["layers.2.num_batches_tracked"] == 30


def test_one_local_step_is_a_step_on_the_union(client):
    """H=1 with plain SGD: steps of 2 x 32 rows."""
    X, y = digits(603)
    net = make_net(CNN3, **DOUBLE, **PLAIN_SGD, train_split=None)
    shards = shards_of(603, 32, 2)
    union = [np.concatenate(parts) for parts in zip(*shards, strict=True)]
    together = net.set_params(iterator_train=planned, iterator_train__steps=union)
    expected = fit_plain(together, X, y)
    net = make_net(CNN3, **DOUBLE, **PLAIN_SGD, train_split=None)
    ours = fit_daskps(client, net, X, y, sync_every=1, n_workers=2)
    assert distance(ours, expected) <= 1e-10
    for row, plain in zip(ours.history_, expected.history, strict=True):
        assert row["train_loss"] == pytest.approx(plain["train_loss"], abs=1e-10)
        sizes = [batch["train_batch_size"] for batch in row["batches"]]
        assert sizes == [len(rows) for rows in union]


def test_three_local_steps(client):
    """H=3 with momentum, which stays local inside an epoch; H counts from the start of each."""
    X, y = digits(640)
    net = make_net(CNN3, **DOUBLE, train_split=None, max_epochs=2)
    ours = fit_daskps(client, net, X, y, sync_every=3, n_workers=2)
    assert distance(ours, three_by_hand(net, X, y)) <= 1e-10
    assert {entry.rounds for entry in ours.report_.ranks} == {6}  # after 3, 6, 9, 10; optimizer, twice


def three_by_hand(net, X, y):
    shards = shards_of(640, 32, 2)
    nets = []
    for _ in shards:
        torch.manual_seed(0)
        nets.append(clone(net).initialize())
    parameters = [list(net.module_.parameters()) for net in nets]
    for _epoch in range(2):
        for step in range(10):
            for own, steps in zip(nets, shards, strict=True):
                rows = steps[step]
                own.train_step((torch.as_tensor(X[rows]), torch.as_tensor(y[rows])))
            if step in (2, 5, 8, 9):
                mean_into(parameters, np.array([320, 320]))
        mean_into([optimizer_state(own) for own in nets], np.array([320, 320]))
    return nets[0]


def test_more_steps_than_an_epoch_has_is_epoch_mode(client):
    X, y = digits(303)
    net = make_net(CNN3, **DOUBLE)
    epoch, integer = (
        fit_daskps(client, net, X, y, sync_every=every, n_workers=2) for every in ("epoch", 1000)
    )
    assert identical(epoch, integer)


@pytest.mark.parametrize("sync_every", ["epoch", 2])
def test_one_worker_is_plain_skorch(client, sync_every):
    X, y = digits(303)
    net = make_net(CNN3, **DOUBLE)
    ours = fit_daskps(client, net, X, y, sync_every=sync_every, n_workers=1)
    assert distance(ours, fit_plain(net, X, y)) == 0


def test_summed_loss_is_refused(client):
    X, y = xy(64, 3)
    net = make_net(CNN3, module__n=3, criterion__reduction="sum")
    for sync_every in ("epoch", 2):
        with pytest.raises(ValueError, match=r"criterion__reduction='sum' needs sync_every='batch'"):
            fit_daskps(client, net, X, y, sync_every=sync_every)


@pytest.mark.parametrize(
    "options", [{}, {"criterion__weight": torch.tensor([1.0, 1, 10])}], ids=["mean", "class weights"]
)
def test_one_step_on_every_shard_is_a_step_on_all_rows(client, options):
    """BR-01: 70 rows, sorted by class, in blocks of 64 and 6; a mean by count would be off by 0.3."""
    X = np.random.RandomState(0).rand(70, 1, 4, 4).astype(np.float32)
    y = np.sort(np.arange(70) % 3)
    settings = {**PLAIN_SGD, "lr": 1.0, "batch_size": 70, "max_epochs": 1, "train_split": None}
    net = make_net(Flat, module__n_in=16, module__n_out=3, **settings, **options)
    plain = fit_plain(net, X, y)
    chunked = da.from_array(X, chunks=((64, 6), (1,), (4,), (4,)))
    for rows in (X, chunked):
        ours = fit_daskps(client, net, rows, y, sync_every="epoch", n_workers=2)
        assert distance(ours, plain) <= 1e-5
        loss = ours.history_[0]["train_loss"]
        assert loss == pytest.approx(plain.history[0]["train_loss"], abs=1e-5)


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_equal_shards_are_trained_like_one(client, copies):
    """BR-02: the combination of equal updates is that update."""
    X, y = xy(40, 3, seed=1)
    net = make_net(CNN3, module__n=3, batch_size=40, max_epochs=5, train_split=None, **PLAIN_SGD)
    plain = fit_plain(net, X, y)
    chunked = da.concatenate([da.from_array(X, chunks=(40, 1, 8, 8))] * copies)
    labels = np.tile(y, copies)
    ours = fit_daskps(client, net, chunked, labels, sync_every="epoch", n_workers=copies)
    assert ours.report_.world_size == copies
    assert distance(ours, plain) <= 1e-5
    net = net.set_params(batch_size=40 * copies)
    ours = fit_daskps(client, net, chunked, labels, n_workers=copies)
    assert distance(ours, plain) <= 1e-5


@pytest.mark.parametrize("sync_every", ["batch", "epoch", 2])
def test_every_row_once_an_epoch(client, tmp_path, sync_every):
    """BR-08 for arrays: shards of unequal size, and nobody waits for a rank that has run out."""
    X, y = numbered(142)
    log = str(tmp_path / "log")
    net = make_net(Logged, module__path=log, batch_size=16, max_epochs=2, train_split=None)
    ours = fit_daskps(client, net, X, y, sync_every=sync_every, n_workers=3)
    seen = [int(row) for line in read(log) for row in line["rows"]]
    assert sorted(seen) == sorted([*range(142)] * 2)
    assert len({line["pid"] for line in read(log)}) == 3
    assert len(ours.history_[0]["batches"]) == (9 if sync_every == "batch" else 3)
    for row in ours.history_:
        assert sum(batch["train_batch_size"] for batch in row["batches"]) == 142


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_rows_sorted_by_label(client, sync_every):
    """BR-44: with shuffling, as documented, sorted rows are learnt as well as shuffled ones."""
    X, y = separable(200, 4, by=1.0)
    by_label = np.argsort(y, kind="stable")
    net = make_net(
        CNN3, module__n=4, max_epochs=10, batch_size=20, train_split=None,
        iterator_train__shuffle=True, optimizer=torch.optim.SGD, lr=0.2,
    )  # fmt: skip
    settings = {"sync_every": sync_every, "n_workers": 4, "random_state": 0}
    ordered = fit_daskps(client, net, X[by_label], y[by_label], **settings)
    mixed = fit_daskps(client, net, X, y, **settings)
    assert ordered.score(X, y) >= mixed.score(X, y) - 0.05


def test_schedule_by_epoch(client):
    """BR-38: the rates do not depend on the number of workers."""
    X, y = digits(203)
    step_lr = LRScheduler("StepLR", step_size=1, gamma=0.5)
    net = make_net(CNN3, **PLAIN_SGD, callbacks=[("lr", step_lr)])
    for k in (1, 2, 3):
        ours = fit_daskps(client, net, X, y, sync_every="epoch", n_workers=k)
        assert ours.history_[:, "event_lr"] == [0.1, 0.05, 0.025]
