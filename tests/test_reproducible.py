"""The same seed and number of workers: the same bits. What is random where, and what is left alone."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import torch
from conftest import local_cluster
from distributed import Client
from nets import CNN3, LoggedDropout, read
from probes import states_by_rank
from reference import digits, distance, fit_daskps, fit_plain, identical, make_net, state, xy
from skorch.callbacks import Callback

MODES = ["batch", "epoch", 2]
NOISY = {"module__dropout": 0.5, "iterator_train__shuffle": True, "max_epochs": 2}


@pytest.mark.parametrize("sync_every", MODES)
def test_the_same_seed_gives_the_same_bits(client, sync_every):
    X, y = digits(403, np.float32)
    net = make_net(CNN3, **NOISY)
    settings = {"sync_every": sync_every, "n_workers": 3}
    first = fit_daskps(client, net, X, y, seed=1, random_state=7, **settings)
    second = fit_daskps(client, net, X, y, seed=2, random_state=7, **settings)
    other = fit_daskps(client, net, X, y, seed=1, random_state=8, **settings)
    assert first.report_.world_size == 3
    assert identical(first, second)
    assert first.history_[:, "train_loss"] == second.history_[:, "train_loss"]
    assert distance(first, other) > 1e-3


@pytest.mark.parametrize("sync_every", MODES)
def test_without_random_state_torch_seed_decides(client, sync_every):
    X, y = digits(203, np.float32)
    net = make_net(CNN3, **NOISY)
    settings = {"sync_every": sync_every, "n_workers": 2}
    first, second = (fit_daskps(client, net, X, y, seed=1, **settings) for _ in range(2))
    other = fit_daskps(client, net, X, y, seed=2, **settings)
    assert identical(first, second)
    assert distance(first, other) > 1e-3


def test_a_dask_array_too(client):
    X, y = digits(203, np.float32)
    chunked = da.from_array(X, chunks=(60, 1, 8, 8))
    net = make_net(CNN3, **NOISY)
    first, second = (fit_daskps(client, net, chunked, y, n_workers=2, random_state=0) for _ in range(2))
    assert identical(first, second)


@pytest.mark.parametrize("kind", [int, np.random.RandomState], ids=["int", "RandomState"])
def test_random_state_leaves_the_callers_generators_alone(client, kind):
    X, y = digits(203, np.float32)
    torch.manual_seed(11)
    np.random.seed(11)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    for sync_every in ("batch", "epoch"):
        settings = {"sync_every": sync_every, "n_workers": 2, "random_state": kind(3)}
        fit_again(client, make_net(CNN3, **NOISY), X, y, settings)
    after = torch.get_rng_state(), np.random.get_state()[1]
    assert torch.equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])


def fit_again(client, net, X, y, settings):
    from daskps import DistributedCNNClassifier

    return DistributedCNNClassifier(net, client=client, **settings).fit(X, y)


def test_another_number_of_workers_gives_the_same_to_rounding(client):
    X, y = digits(403)
    net = make_net(CNN3, module__dtype=torch.float64)
    fits = [fit_daskps(client, net, X, y, n_workers=k, random_state=3) for k in (1, 2, 4)]
    assert [fit.report_.world_size for fit in fits] == [1, 2, 4]
    for other in fits[1:]:
        assert distance(fits[0], other) <= 1e-10


@pytest.mark.parametrize(("n_workers", "threads"), [(2, 1), (1, 4)])
def test_workers_in_one_process_count_as_one(client, n_workers, threads):
    """torch has one generator a process: a second rank there would change the first one's numbers."""
    X, y = digits(403, np.float32)
    net = make_net(CNN3, **NOISY)
    expected = fit_daskps(client, net, X, y, n_workers=1, random_state=0)
    held = X.copy(), y.copy()
    with (
        local_cluster(n_workers=n_workers, threads_per_worker=threads, processes=False) as cluster,
        Client(cluster, set_as_default=False) as other,
    ):
        ours = fit_daskps(other, net, X, y, random_state=0)
    assert ours.report_.world_size == 1
    assert identical(ours, expected) if threads == 1 else distance(ours, expected) <= 1e-5
    assert np.array_equal(X, held[0])
    assert np.array_equal(y, held[1])


def test_the_callers_objects_are_unchanged(client):
    """BR-28: X, y, and a net that has been trained already."""
    X, y = digits(203, np.float32)
    net = fit_plain(make_net(CNN3), X, y)
    held = X.copy(), y.copy(), state(net), len(net.history)
    fit_daskps(client, net, X, y, n_workers=2)
    assert np.array_equal(X, held[0])
    assert np.array_equal(y, held[1])
    assert all(torch.equal(value, held[2][name]) for name, value in state(net).items())
    assert len(net.history) == held[3]


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_ranks_drop_different_values(client, session_client, tmp_path, sync_every):
    """BR-41: one stream of masks for every rank, the same again in the next run."""
    X, y = xy(64, 4)
    weights, runs = [], []

    class Look(Callback):
        def on_epoch_begin(self, net, **kwargs):
            if len(net.history) == 2:  # the first epoch with a net on the ranks
                weights.append(states_by_rank(session_client))

    for run in range(2):
        log = str(tmp_path / f"log {run}")
        net = make_net(
            LoggedDropout, module__n=4, module__path=log, batch_size=32, max_epochs=2,
            train_split=None, callbacks=[Look()],
        )  # fmt: skip
        fit_daskps(client, net, X, y, n_workers=2, sync_every=sync_every, random_state=0)
        runs.append(masks_by_process(log))
    masks = [tuple(mask) for of_rank in runs[0] for mask in of_rank]
    assert len(masks) == len(set(masks)) >= 4
    assert runs[0] == runs[1]
    for ranks in weights:
        for name, value in ranks[0].items():
            assert np.array_equal(value, ranks[1][name])


def masks_by_process(log):
    found = {}
    for line in read(log):
        found.setdefault(line["pid"], []).append(line["mask"])
    assert len(found) == 2
    return sorted(found.values())
