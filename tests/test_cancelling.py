"""Fits that end before their time: by a restart, a closed cluster, or a client that dies."""

from __future__ import annotations

import multiprocessing

import pytest
from conftest import local_cluster
from distributed import Client
from faults import fit_and, halting_net, is_alive, kill, marked
from nets import CNN3, EvalBoom, read
from probes import leftovers, wait_until
from reference import fit_daskps, identical, make_net, xy
from skorch.callbacks import Callback, Checkpoint, LoadInitState

from daskps import DaskpsError, DistributedCNNClassifier
from daskps._spec import TOPIC

# On a busy machine a nanny may need minutes for another worker.
pytestmark = pytest.mark.timeout(400)

MODES = ["batch", "epoch"]


def held(client):
    return [run for _, kind, run in leftovers(client) if kind in ("held", "run", "leaving", "seat")]


@pytest.mark.parametrize("sync_every", MODES)
@pytest.mark.parametrize("k", [1, 2])
def test_a_rank_raises_in_validation(client, sync_every, k):
    X, y = xy(90, 3)
    X[:, 0, 0, 0] = 99
    net = make_net(EvalBoom, module__n=3, batch_size=30)
    # On the client one row is tried, which must pass.
    X[0, 0, 0, 0] = 0
    with pytest.raises(ValueError, match="boom") as caught:
        fit_daskps(client, net, X, y, n_workers=k, sync_every=sync_every)
    notes = "\n".join(caught.value.__notes__)
    assert f"of {k}, epoch 1, after the last step." in notes
    assert "From worker tcp://" in notes
    assert "forward" in [entry.name for entry in caught.traceback]


@pytest.fixture
def own_cluster(fork_server):
    with (
        local_cluster(n_workers=2, processes=True) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def test_the_cluster_restarts(own_cluster, tmp_path):
    """In a mode in which ranks do not meet for long."""
    X, y = marked(100, 95)
    net = halting_net(tmp_path)
    error = fit_and(lambda _: own_cluster.restart(), own_cluster, net, X, y, sync_every="epoch")
    assert isinstance(error, DaskpsError)
    assert "the cluster restarts" in str(error)
    assert fit_daskps(own_cluster, make_net(CNN3, module__n=3), X, y, n_workers=2).report_.world_size == 2
    wait_until(lambda: not leftovers(own_cluster), seconds=60)


def test_the_cluster_closes(own_cluster, tmp_path):
    X, y = marked(100, 95)
    close = own_cluster.cluster.close
    error = fit_and(lambda _: close(), own_cluster, halting_net(tmp_path), X, y, sync_every="epoch")
    assert isinstance(error, DaskpsError)
    wait_until(lambda: not is_alive(read(tmp_path / "halted")[0]["pid"]), seconds=60)


def fit_elsewhere(address, path, sync_every):
    X, y = marked(100, 95)
    with Client(address, set_as_default=False) as client:
        fit_daskps(client, halting_net(path), X, y, n_workers=2, sync_every=sync_every)


def subscribers(client):
    """The clients to which the scheduler sends events of runs."""
    return set(client.cluster.scheduler._broker._topics[TOPIC].subscribers)


@pytest.mark.parametrize("sync_every", MODES)
def test_the_client_is_killed(mortals, tmp_path, sync_every):
    """Its ranks leave at the end of their step, though Dask stops no thread."""
    process = multiprocessing.get_context("forkserver").Process(
        target=fit_elsewhere, args=(mortals.scheduler.address, tmp_path, sync_every)
    )
    before = subscribers(mortals)
    process.start()
    try:
        wait_until((tmp_path / "halted").exists, seconds=90)
        assert held(mortals)
        assert len(subscribers(mortals)) == len(before) + 1
    finally:
        kill(process.pid)
        (tmp_path / "go").touch()
    process.join(20)
    wait_until(lambda: not held(mortals), seconds=60)
    assert subscribers(mortals) == before
    X, y = xy(100, 3)
    assert fit_daskps(mortals, make_net(CNN3, module__n=3), X, y).report_.world_size == 3


class Dies(Callback):
    """The client dies in the middle of an epoch, counted from 1."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_batch_end(self, net, **kwargs):
        if len(net.history) == self.epoch:
            raise MemoryError("the client dies")


@pytest.mark.parametrize("sync_every", MODES)
def test_a_checkpoint_carries_a_fit_over(client, tmp_path, sync_every):
    """To another process, cluster or number of workers: parameters, optimizer, history and seeds."""
    X, y = xy(120, 3)

    def fit(max_epochs, *callbacks):
        checkpoint = Checkpoint(dirname=str(tmp_path), monitor=None)
        net = make_net(
            CNN3, module__n=3, module__dropout=0.5, iterator_train__shuffle=True, max_epochs=max_epochs,
            callbacks=[("checkpoint", checkpoint), ("load", LoadInitState(checkpoint)), *callbacks],
        )  # fmt: skip
        settings = {"client": client, "n_workers": 2, "random_state": 0, "sync_every": sync_every}
        return DistributedCNNClassifier(net, **settings).fit(X, y)

    with pytest.raises(MemoryError):
        fit(4, ("dies", Dies(3)))
    went_on = fit(2)
    assert len(went_on.history_) == 4
    for file in tmp_path.iterdir():
        file.unlink()
    assert identical(went_on, fit(4))
