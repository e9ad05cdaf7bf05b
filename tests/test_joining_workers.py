"""Workers that come while a fit waits for them or trains, and adaptive clusters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
import torch
from conftest import local_cluster
from distributed import Client
from faults import Calls, wait_for_ready
from nets import CNN3
from probes import wait_until, workers_of
from reference import distance, fit_daskps, fit_plain, make_net, xy

from daskps import ClusterTooSmallError
from daskps._launch import open_run
from daskps._plugins import register
from daskps._spec import PLACEHOLDER

# On a busy machine a nanny may need minutes for another worker.
pytestmark = pytest.mark.timeout(400)


def small_net(**options):
    return make_net(CNN3, **{"module__n": 3, "module__dtype": torch.float64, **options})


def data(n=203):
    X, y = xy(n, 3)
    return X.astype(np.float64), y


def placeholders(client):
    """Asked of the scheduler alone: workers of an adaptive cluster may be about to leave."""

    def waiting(dask_scheduler, prefix=PLACEHOLDER):
        return [str(key) for key in dask_scheduler.tasks if str(key).startswith(prefix)]

    return client.run_on_scheduler(waiting)


def test_new_workers_are_used_from_the_next_epoch_on(mortals):
    def grow():
        mortals.cluster.scale(4)
        wait_for_ready(mortals, 4)

    X, y = data()
    net = small_net(callbacks=[("grows", Calls(grow, epoch=1))])
    try:
        ours = fit_daskps(mortals, net, X, y)
    finally:
        mortals.cluster.scale(3)
        wait_until(lambda: len(workers_of(mortals)) == 3)
    assert [[e.rank for e in ours.report_.ranks if e.epoch == n] for n in (0, 1, 2)] == [
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 1, 2, 3],
    ]
    (event,) = ours.report_.events
    assert event.epoch == 1
    assert "joined" in event.what
    assert distance(ours, fit_plain(net.set_params(callbacks=None), X, y)) <= 1e-10


def test_a_fit_grows_no_further_than_asked(client, session_client):
    X, y = data()
    ours = fit_daskps(client, small_net(), X, y, n_workers=2)
    assert ours.report_.world_size == 2
    assert ours.report_.events == []


def test_a_cluster_without_workers():
    """BR-53: the error says that none came; if one comes while the fit waits, it trains."""
    X, y = data(100)
    with local_cluster(n_workers=0, processes=False) as cluster, Client(cluster) as client:
        with (
            dask.config.set({"daskps.timeouts.workers": "300ms"}),
            pytest.raises(
                ClusterTooSmallError, match=r"asked for 1 process.*0 usable came within .*0\.3 s"
            ),
        ):
            fit_daskps(client, small_net(), X, y)
        with ThreadPoolExecutor(1) as pool:
            fitting = pool.submit(fit_daskps, client, small_net(), X, y)
            wait_until(lambda: placeholders(client) or fitting.done())
            cluster.scale(1)
            assert fitting.result(60).report_.world_size == 1


def test_adaptive_cluster_grows_from_nothing(fork_server):
    X, y = data(100)
    with local_cluster(n_workers=0, processes=True) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=0, maximum=3, interval="100ms", wait_count=1)
        with dask.config.set({"daskps.timeouts.workers": "90s"}):
            ours = fit_daskps(client, small_net(max_epochs=1), X, y, n_workers=2)
        assert ours.report_.world_size == 2
        assert placeholders(client) == []


def test_placeholders_go_when_the_fit_gives_up(client, session_client):
    with (
        dask.config.set({"daskps.timeouts.workers": "700ms"}),
        pytest.raises(ClusterTooSmallError),
        open_run(session_client, 6, 6),
    ):
        pass
    wait_until(lambda: placeholders(session_client) == [])


def test_adaptive_scaling_takes_no_worker_of_a_run(client, session_client):
    register(session_client)

    def would_close(dask_scheduler):
        return dask_scheduler.workers_to_close(n=4)

    with open_run(session_client, 3, 3) as run:
        closing = session_client.run_on_scheduler(would_close)
        assert len(closing) == 1
        assert closing[0] not in run.addresses
    wait_until(lambda: len(session_client.run_on_scheduler(would_close)) == 4)
