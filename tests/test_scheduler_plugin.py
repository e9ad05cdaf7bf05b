"""The scheduler's side on a real scheduler: registration, leases, and who ends a run."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import dask
import numpy as np
import pytest
from distributed import Client
from distributed.core import Status
from nets import CNN3, Gated, read
from probes import leftovers, wait_until
from ranks import RULES
from reference import fit_daskps, make_net, xy

from daskps import ClusterTooSmallError, __version__
from daskps._launch import open_run
from daskps._plugins import register
from daskps._spec import OPEN, SCHEDULER_PLUGIN, WORKER_PLUGIN
from daskps.exceptions import DaskpsError, RunAbortedError


def plugin_of(cluster):
    return cluster.scheduler.plugins[SCHEDULER_PLUGIN]


def held(client):
    return [run for _, kind, run in leftovers(client) if kind == "held"]


def waiting(client):
    return [run for _, kind, run in leftovers(client) if kind == "waiting"]


# Registration


def test_registered_once(client, cluster):
    """However many clients register it, at the same time or later."""
    register(client)
    first = plugin_of(cluster)
    clients = [Client(cluster, set_as_default=False) for _ in range(4)]
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(register, clients))
    finally:
        for other in clients:
            other.close()
    assert plugin_of(cluster) is first
    names = client.run(lambda dask_worker: [name for name in dask_worker.plugins if "daskps" in name])
    assert set(map(tuple, names.values())) == {(WORKER_PLUGIN,)}


def test_every_worker_has_said_in_which_process_it_is(client, cluster, session_client):
    with open_run(session_client, 4, 4):
        processes = plugin_of(cluster).lender.processes
        assert processes.keys() == cluster.scheduler.workers.keys()
        assert len(set(processes.values())) == 4


# Leases


@pytest.mark.parametrize(
    ("n_workers", "most", "expected"), [(None, 100, 4), (None, 3, 3), (2, 100, 2), (4, 3, 3), (1, 1, 1)]
)
def test_how_many(client, session_client, n_workers, most, expected):
    with open_run(session_client, n_workers, most) as run:
        assert run.world_size == expected
        assert len(set(run.addresses)) == expected


def test_two_runs_share_no_worker(client, session_client):
    with open_run(session_client, 2, 2) as one, open_run(session_client, 2, 2) as two:
        assert len({*one.addresses, *two.addresses}) == 4


def test_first_come_first_served(client, session_client):
    """A request that could be met already waits for an earlier one that could not."""
    granted = []

    def ask(n):
        with open_run(session_client, n, n):
            granted.append(n)

    with open_run(session_client, 2, 2):
        threads = [threading.Thread(target=ask, args=(n,)) for n in (4, 1)]
        for n_waiting, thread in enumerate(threads, start=1):
            thread.start()
            wait_until(lambda n_waiting=n_waiting: len(waiting(session_client)) == n_waiting)
        assert granted == []
    for thread in threads:
        thread.join(20)
    assert granted == [4, 1]


def test_more_than_there_are(client, session_client, cluster):
    """After the time that the config gives, with both numbers; who is behind does not wait for it."""
    register(session_client)
    with dask.config.set({"daskps.timeouts.workers": "1s"}), ThreadPoolExecutor(1) as pool:
        too_many = pool.submit(open_run(session_client, 5, 5).__enter__)
        wait_until(plugin_of(cluster).lender.leases.waiting)  # not for so long that asking may take longer
        with open_run(session_client, 4, 4) as run:
            assert run.world_size == 4
        with pytest.raises(ClusterTooSmallError, match=r"5 process.* 4 usable came"):
            too_many.result(20)


def test_workers_that_annotations_exclude_are_counted(client, session_client, cluster):
    one = sorted(cluster.scheduler.workers)[0]
    excluded = rf"1 usable came.* Not among them: 3 that the annotations .*workers=.*'{one}'"
    with (
        dask.config.set({"daskps.timeouts.workers": "50ms"}),
        dask.annotate(workers=[one]),
        pytest.raises(ClusterTooSmallError, match=excluded),
    ):
        open_run(session_client, 2, 2).__enter__()


def test_a_long_wait_for_others_is_no_small_cluster(client, session_client):
    """There are enough workers, others have them: that is no error however long it takes."""
    with dask.config.set({"daskps.timeouts.workers": "50ms"}), ThreadPoolExecutor(1) as pool:
        with open_run(session_client, 4, 4):
            second = pool.submit(enter_and_leave, session_client, 4)
            wait_until(lambda: waiting(session_client))
            # The plugin looks again twice a second: the next look is later than the patience.
            with pytest.raises(TimeoutError):
                second.result(timeout=1.2)
        assert second.result(20) == 4


def enter_and_leave(client, n):
    with open_run(client, n, n) as run:
        return run.world_size


@pytest.mark.parametrize("status", [Status.paused, Status.closing_gracefully])
def test_workers_that_do_not_run_are_not_used(client, session_client, cluster, status):
    scheduler = cluster.scheduler
    idle = sorted(scheduler.workers)[1]

    def set_status(name, dask_scheduler):
        worker = dask_scheduler.workers[idle]
        dask_scheduler.handle_worker_status_change(name, worker, stimulus_id="test")

    session_client.run_on_scheduler(set_status, status.name)
    try:
        with open_run(session_client, None, 8) as run:
            assert run.world_size == 3
            assert idle not in run.addresses
        too_few = rf"4 process.* 3 usable.*Dask has paused \['{idle}'\]"
        with (
            dask.config.set({"daskps.timeouts.workers": "50ms"}),
            pytest.raises(ClusterTooSmallError) as raised,
        ):
            open_run(session_client, 4, 4).__enter__()
        assert bool(re.search(too_few, str(raised.value))) is (status == Status.paused)
    finally:
        session_client.run_on_scheduler(set_status, "running")
    with open_run(session_client, None, 8) as run:
        assert idle in run.addresses


# The end of a run


def gated(tmp_path, n=3):
    log, gate = str(tmp_path / "log"), tmp_path / "gate"
    net = make_net(
        Gated, module__n=n, module__path=log, module__gate=str(gate), batch_size=16, train_split=None
    )
    return net, gate, lambda: (tmp_path / "log").exists() and len(read(log)) >= 2


def test_a_lease_ends_when_the_ranks_have_left(client, session_client, tmp_path):
    """Not when the run ends: a thread in the middle of a step still uses its process."""
    net, gate, ranks_are_there = gated(tmp_path)
    X, y = xy(60, 3)
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(fit_daskps, session_client, net, X, y, n_workers=2)
        wait_until(ranks_are_there)
        (run_id,) = held(session_client)
        session_client.run_on_scheduler(end_run, run_id)
        left = leftovers(session_client)
        assert ("scheduler", "leaving", run_id) in left
        assert ("scheduler", "held", run_id) in left
        assert ("scheduler", "run", run_id) not in left
        gate.touch()
        with pytest.raises(RunAbortedError):
            fit.result(20)
    wait_until(lambda: not held(session_client))


async def end_run(run_id, dask_scheduler):
    await dask_scheduler.plugins[SCHEDULER_PLUGIN].close_run(run_id, [])


def test_ranks_leave_when_their_client_is_gone(client, session_client, cluster, tmp_path):
    """The tasks are forgotten by Dask, which stops no thread: the plugin's news does."""
    net, gate, ranks_are_there = gated(tmp_path)
    X, y = xy(60, 3)
    gone = Client(cluster, set_as_default=False)
    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(fit_daskps, gone, net, X, y, n_workers=2)
        wait_until(ranks_are_there)
        gone.close()
        gate.touch()
        wait_until(lambda: not held(session_client))
        error = fit.exception(20)
    assert error is not None
    n_batches = len(read(str(tmp_path / "log")))
    assert n_batches < 2 * 3 * 4


def test_a_client_that_died_before_its_request_was_read_gets_no_workers(client, session_client, cluster):
    """Nobody would close that run."""

    async def ask():
        message = {
            "client": "Client-gone",
            "version": __version__,
            "n_workers": 1,
            "most": 1,
            "rules": list(RULES),
        }
        request = getattr(session_client.scheduler, OPEN)
        return await request(run_id="late", workers=None, resources=None, **message)

    register(session_client)
    with pytest.raises(RunAbortedError, match="the client Client-gone is gone"):
        session_client.sync(ask)
    assert not held(session_client)


def test_closing_twice(client, session_client):
    """Handlers may come late, twice, and for runs that nobody knows."""
    with open_run(session_client, 2, 2) as run:
        session_client.run_on_scheduler(end_run, run.run_id)
    session_client.run_on_scheduler(end_run, run.run_id)
    session_client.run_on_scheduler(end_run, "nobody")
    session_client.run_on_scheduler(say_left, "nobody")


async def say_left(run_id, dask_scheduler):
    await dask_scheduler.plugins[SCHEDULER_PLUGIN].left("nobody", run_id, generation=0)


def test_a_poisoned_run_takes_no_more_rounds(client, session_client, cluster):
    with open_run(session_client, 2, 2) as run:
        server = plugin_of(cluster).runs[run.run_id].server
        server.fail(DaskpsError("first"))
        server.fail(DaskpsError("second"))
        assert str(server.error) == "first"


def test_nothing_grows_from_fit_to_fit(client, session_client, cluster):
    """BR-50 in small: what a scheduler holds after a fit is what it held before."""
    X, y = xy(60, 3)
    net = make_net(CNN3, module__n=3, max_epochs=1)

    def count():
        wait_until(lambda: not held(session_client))
        scheduler, plugin = cluster.scheduler, plugin_of(cluster)
        return {
            "plugins": len(scheduler.plugins),
            "handlers": len(scheduler.handlers) + len(scheduler.stream_handlers),
            "plugin": [len(value) for value in vars(plugin).values() if isinstance(value, dict)],
            "clients": len(scheduler.clients),
        }

    fit_daskps(client, net, X, y)
    before = count()
    for _ in range(3):
        fit_daskps(client, net, X, y)
        with pytest.raises(ValueError, match="outputs"):
            fit_daskps(client, net, X, np.arange(60) % 5)
    assert count() == before
