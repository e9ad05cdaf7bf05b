"""A worker that is lost in the middle of an epoch: nothing of the epoch is, and nobody waits for it."""

from __future__ import annotations

import os

import dask
import dask.array as da
import numpy as np
import pytest
import torch
from faults import (
    N_CLASSES,
    Calls,
    address_of,
    fit_and,
    halting_net,
    is_alive,
    kill,
    marked,
    wait_for_ready,
)
from nets import CNN3
from probes import failures_logged, wait_until, workers_of
from reference import ADAM, MOMENTUM, assert_same_history, distance, fit_plain, identical, make_net

from daskps import DistributedCNNClassifier, WorkerLostError

# On a busy machine a nanny may need minutes for another worker.
pytestmark = pytest.mark.timeout(400)


class Killed:
    """Kills the process that halts, and remembers which worker it was."""

    def __init__(self, client):
        self.client = client
        self.addresses = []

    def __call__(self, pid):
        self.addresses.append(address_of(self.client, pid))
        kill(pid)
        assert not is_alive(pid)


def ranks_by_epoch(fitted):
    epochs = [entry.epoch for entry in fitted.report_.ranks]
    return [epochs.count(epoch) for epoch in range(max(epochs) + 1)]


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
def test_batch_mode_ends_as_plain_skorch(mortals, tmp_path, optimizer):
    """BR-14: parameters, history and optimizer, to rounding."""
    X, y = marked(203, 95, np.float64)
    net = halting_net(tmp_path, module__dtype=torch.float64, **optimizer)
    killed = Killed(mortals)
    earlier = failures_logged(mortals)
    ours = fit_and(killed, mortals, net, X, y, n_workers=3)
    assert set(failures_logged(mortals)) <= set(earlier)  # the other ranks only left
    net.set_params(callbacks=None)
    plain = fit_plain(net, X, y)
    assert distance(ours, plain) <= 1e-10
    assert_same_history(ours, plain, 1e-10)
    (event,) = [event for event in ours.report_.events if "lost" in event.what]
    assert (event.epoch, event.worker) == (1, killed.addresses[0])
    assert ranks_by_epoch(ours)[:2] == [3, 2]
    assert killed.addresses[0] in str(ours.report_)


@pytest.mark.parametrize("sync_every", ["epoch", 2])
def test_other_modes_end_as_on_the_workers_that_were_left(mortals, tmp_path, sync_every):
    X, y = marked(203, 95)
    net = halting_net(tmp_path, max_epochs=2, iterator_train__shuffle=True, module__dropout=0.0)
    settings = {"client": mortals, "random_state": 0, "sync_every": sync_every}
    ours = fit_and(Killed(mortals), mortals, net, X, y, n_workers=3, sync_every=sync_every, random_state=0)
    undisturbed = net.set_params(max_epochs=1)
    expected = DistributedCNNClassifier(undisturbed, n_workers=3, **settings).fit(X, y)
    expected.set_params(n_workers=2).partial_fit(X, y)
    assert ranks_by_epoch(ours) == [3, 2]
    assert identical(ours, expected)


def test_a_replacement_joins_at_the_next_epoch(mortals, tmp_path):
    X, y = marked(203, 95, np.float64)
    back = Calls(lambda: wait_for_ready(mortals, 3), epoch=2)
    net = halting_net(tmp_path, module__dtype=torch.float64, callbacks=[("back", back)])
    killed = Killed(mortals)
    ours = fit_and(killed, mortals, net, X, y, n_workers=3)
    assert ranks_by_epoch(ours) == [3, 2, 3]
    assert [event.epoch for event in ours.report_.events] == [1, 2]
    assert "joined" in ours.report_.events[1].what
    assert ours.report_.events[1].worker not in killed.addresses
    assert distance(ours, fit_plain(net.set_params(callbacks=None), X, y)) <= 1e-10


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_raise(mortals, tmp_path, sync_every):
    X, y = marked(203, 95)
    net = halting_net(tmp_path)
    killed = Killed(mortals)
    error = fit_and(killed, mortals, net, X, y, n_workers=3, sync_every=sync_every, on_worker_lost="raise")
    assert type(error) is WorkerLostError
    assert error.worker == killed.addresses[0]
    assert error.epoch == 1
    for part in (error.worker, f"run {error.run_id}", f"round {error.round}", "epoch 2", "rank"):
        assert part in str(error)


def test_a_worker_that_is_lost_between_two_epochs(mortals):
    """Nothing has to be repeated; and with 'raise' it is an error all the same."""
    X, y = marked(203, 95)

    def lose():
        address, pid = sorted(mortals.run(os.getpid).items())[0]
        kill(pid)
        wait_until(lambda: address not in workers_of(mortals))

    net = make_net(CNN3, module__n=N_CLASSES, callbacks=[("loses", Calls(lose, epoch=1))])
    ours = DistributedCNNClassifier(net, client=mortals, n_workers=3).fit(X, y)
    assert "between two epochs" in ours.report_.events[0].what
    assert ranks_by_epoch(ours)[0] == 3
    wait_for_ready(mortals, 3)
    ours.set_params(on_worker_lost="raise")
    with pytest.raises(WorkerLostError, match="left the cluster before epoch 2"):
        ours.fit(X, y)


def test_the_only_worker_is_waited_for(mortals, tmp_path):
    X, y = marked(100, 95, np.float64)
    net = halting_net(tmp_path, module__dtype=torch.float64)
    killed = Killed(mortals)
    ours = fit_and(killed, mortals, net, X, y, n_workers=1)
    assert ours.report_.events[0].worker == killed.addresses[0]
    assert distance(ours, fit_plain(net.set_params(callbacks=None), X, y)) <= 1e-10


def test_a_poisoned_epoch_is_given_up(mortals, tmp_path):
    """The number of workers that may die of one epoch is Dask's."""
    X, y = marked(100, 95)
    net = halting_net(tmp_path)

    def allow(n, dask_scheduler):
        before, dask_scheduler.allowed_failures = dask_scheduler.allowed_failures, n
        return before

    before = mortals.run_on_scheduler(allow, 0)
    try:
        error = fit_and(Killed(mortals), mortals, net, X, y, n_workers=2)
    finally:
        mortals.run_on_scheduler(allow, before)
    assert type(error) is WorkerLostError
    assert "allowed-failures" in error.__notes__[0]


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_blocks_of_a_dask_array_are_computed_again(mortals, tmp_path, sync_every):
    X, y = marked(120, 95)
    with mortals.as_current():
        chunked = da.from_array(X, chunks=(30, 1, 8, 8)).persist()
    net = halting_net(tmp_path, max_epochs=2, train_split=None)
    settings = {"random_state": 0, "sync_every": sync_every}
    ours = fit_and(Killed(mortals), mortals, net, chunked, y, n_workers=3, **settings)
    assert ranks_by_epoch(ours) == [3, 2]
    expected = DistributedCNNClassifier(net, n_workers=3, client=mortals, **settings)
    expected.set_params(net__max_epochs=1).fit(chunked, y)
    expected.set_params(n_workers=2).partial_fit(chunked, y)
    assert identical(ours, expected)


def test_rows_are_counted_once(mortals, tmp_path):
    """The history has the batches of the epoch that counted, whatever was replayed of the other one."""
    X, y = marked(203, 195)
    net = halting_net(tmp_path, batch_size=10, train_split=None)
    with dask.config.set({"daskps.report-interval": "1ms"}):
        ours = fit_and(Killed(mortals), mortals, net, X, y, n_workers=3)
    assert [len(row["batches"]) for row in ours.history_] == [21] * 3
    sizes = [[batch["train_batch_size"] for batch in row["batches"]] for row in ours.history_]
    assert [sum(row) for row in sizes] == [203] * 3
    assert N_CLASSES == len(ours.classes_)


def test_nothing_is_copied_by_the_scheduler(client, cluster, monkeypatch):
    """Dask's copying does not end if a worker goes meanwhile, and everybody else's waits for its lock."""

    async def replicate(*args, **kwargs):
        raise AssertionError("copied by the scheduler")

    monkeypatch.setattr(cluster.scheduler, "replicate", replicate)
    X, y = marked(203, 95)
    fitted = DistributedCNNClassifier(make_net(CNN3, module__n=N_CLASSES), client=client).fit(X, y)
    assert fitted.report_.world_size == 4
