"""A loss or a gradient that is no number is reported at once, with rank, epoch and step."""

from __future__ import annotations

import warnings

import dask
import numpy as np
import pytest
from nets import CNN3, BadGradient, BadLoss
from reference import fit_daskps, make_net, xy

from daskps import DistributedCNNClassifier, DivergenceError

MODES = ["batch", "epoch"]
CASES = [(1, "batch"), (2, "batch"), (2, "epoch"), (2, 1)]


def net_and_data(bad_row, module=BadLoss):
    """Fits of four batches of 30 rows: a row whose loss, or whose gradient, is no number."""
    X, y = xy(120, 3)
    X[bad_row, 0, 0, 0] = 99
    return make_net(module, module__n=3, batch_size=30, train_split=None, max_epochs=2, lr=0.01), X, y


def fit(client, k, sync_every, on_divergence, net, X, y):
    with dask.config.set({"daskps.on-divergence": on_divergence}):
        return fit_daskps(client, net, X, y, n_workers=k, sync_every=sync_every)


@pytest.mark.parametrize(("k", "sync_every"), CASES)
def test_raise_for_a_loss(client, k, sync_every):
    net, X, y = net_and_data(45)
    with pytest.raises(DivergenceError) as caught:
        fit(client, k, sync_every, "raise", net, X, y)
    # Row 45 is of the second batch: its first half is rank 0's. Dealt one by one it is rank 1's.
    rank, step, steps = {"batch": (0 if k == 1 else 1, 2, 4)}.get(sync_every, (1, 1, 2))
    assert f"rank {rank} " in str(caught.value)
    assert f"epoch 1, step {step} of {steps}." in str(caught.value)


def test_raise_for_a_gradient_alone(client):
    """The loss is a number, the gradient is not, and the rank is known whose it was."""
    net, X, y = net_and_data(45, BadGradient)
    with pytest.raises(DivergenceError, match=r"loss or a gradient on rank 1 .* epoch 1, step 2 of 4"):
        fit(client, 2, "batch", "raise", net, X, y)


@pytest.mark.parametrize("sync_every", MODES)
def test_a_gradient_of_the_last_step_shows_in_the_parameters(client, sync_every):
    net, X, y = net_and_data(119, BadGradient)
    net.set_params(max_epochs=1)
    with pytest.raises(DivergenceError, match=r"epoch 1, step [24] of [24]"):
        fit(client, 1, sync_every, "raise", net, X, y)


@pytest.mark.parametrize(("k", "sync_every"), CASES)
def test_warn_once_and_go_on(client, k, sync_every):
    net, X, y = net_and_data(45)
    with pytest.warns(RuntimeWarning, match="became NaN or infinite in epoch 1") as caught:
        ours = fit(client, k, sync_every, "warn", net, X, y)
    assert len([warning for warning in caught if "became NaN" in str(warning.message)]) == 1
    assert len(ours.history_) == 2


def test_ignore(client):
    net, X, y = net_and_data(45)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert len(fit(client, 2, "batch", "ignore", net, X, y).history_) == 2


@pytest.mark.parametrize("sync_every", MODES)
def test_batches_in_which_nothing_counts_are_no_divergence(client, sync_every):
    X, y = xy(120, 3)
    weights = np.ones(120)
    weights[30:60] = 0
    net = make_net(CNN3, module__n=3, batch_size=30, train_split=None)
    with dask.config.set({"daskps.on-divergence": "raise"}):
        ours = DistributedCNNClassifier(net, client=client, n_workers=2, sync_every=sync_every)
        assert len(ours.fit(X, y, sample_weight=weights).history_) == 3
