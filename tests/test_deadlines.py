"""Silence decides, not slowness; and every wait has an end, which names who was waited for."""

from __future__ import annotations

import asyncio

import dask
import numpy as np
import pytest
import torch
from faults import (
    address_of,
    fit_and,
    halting_net,
    is_alive,
    kill,
    marked,
    stop,
    wait_for_file,
)
from nets import CNN3
from probes import wait_until, workers_of
from reference import distance, fit_daskps, fit_plain, make_net, xy

from daskps import ClusterTooSmallError, RoundTimeoutError, WorkerBusyError
from daskps._spec import SCHEDULER_PLUGIN

# On a busy machine a nanny may need minutes for another worker.
pytestmark = pytest.mark.timeout(400)

# Ten heartbeats, which are half a second apart.
SILENCE = {"daskps.timeouts.silence": "5s"}


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_a_worker_that_falls_silent_is_lost(mortals, tmp_path, sync_every):
    """SIGSTOP: its connections stay open, and nothing comes."""
    stopped = {}

    def event(pid):
        stopped[pid] = address_of(mortals, pid)
        stop(pid)

    X, y = marked(203, 95, np.float64)
    net = halting_net(tmp_path, module__dtype=torch.float64)
    with dask.config.set(SILENCE):
        ours = fit_and(event, mortals, net, X, y, n_workers=3, sync_every=sync_every)
    ((pid, address),) = stopped.items()
    assert ours.report_.events[0].worker == address
    if sync_every == "batch":
        assert distance(ours, fit_plain(net.set_params(callbacks=None), X, y)) <= 1e-10
    wait_until(lambda: not is_alive(pid), seconds=60)  # its nanny has started another one


def test_a_slow_rank_is_waited_for_and_then_it_is_an_error(mortals, tmp_path):
    """Longer than silence would last: its worker's heart beats."""
    X, y = marked(203, 95)
    fit_daskps(mortals, make_net(CNN3, module__n=3, max_epochs=1), X, y)  # the first may start slowly
    runs = mortals.cluster.scheduler.plugins[SCHEDULER_PLUGIN].runs

    def sleep_until_all_have_lost_patience(pid):
        wait_until(lambda: not runs)

    with dask.config.set({"daskps.timeouts.silence": "4s", "daskps.timeouts.round": "5s"}):
        error = fit_and(
            sleep_until_all_have_lost_patience, mortals, halting_net(tmp_path), X, y, n_workers=3
        )
    assert type(error) is RoundTimeoutError
    for part in ("for ranks [", "5 s", "daskps.timeouts.round"):
        assert part in str(error)


def test_a_worker_that_is_busy_with_other_tasks(client, session_client, tmp_path):
    """The error names the tasks, also with a single rank, which waits for nobody."""
    X, y = xy(203, 3)
    net = make_net(CNN3, module__n=3)
    workers = sorted(workers_of(session_client))
    busy, gate = workers[0], tmp_path / "gate"
    other = session_client.submit(wait_for_file, str(gate), workers=[busy], key="somebody-elses")
    try:
        wait_until(lambda: other.key in session_client.processing()[busy])
        for allowed in (workers, [busy]):
            with (
                dask.config.set({"daskps.timeouts.start": "700ms"}),
                dask.annotate(workers=allowed),
                pytest.raises(WorkerBusyError) as caught,
            ):
                fit_daskps(session_client, net, X, y)
            for part in (busy, "somebody-elses", "0.7 s", "daskps.timeouts.start"):
                assert part in str(caught.value)
    finally:
        gate.touch()
        other.result(timeout=20)
        other.release()
    assert fit_daskps(session_client, net, X, y).report_.world_size == 4


def test_a_silent_worker_is_lent_to_nobody_as_long_as_dask_still_knows_it(mortals, tmp_path, monkeypatch):
    """Where the network is cut its nanny does not answer either, for which Dask waits half a minute."""
    scheduler, asked = mortals.cluster.scheduler, []

    async def restart_workers(*args, **kwargs):
        asked.append((args, kwargs))
        await asyncio.Event().wait()

    monkeypatch.setattr(scheduler, "restart_workers", restart_workers)
    stopped = []

    def event(pid):
        stopped.append((pid, address_of(mortals, pid)))
        stop(pid)

    X, y = marked(203, 95)
    try:
        with dask.config.set(SILENCE):
            ours = fit_and(event, mortals, halting_net(tmp_path, max_epochs=4), X, y)
            ((_, address),) = stopped
            assert address in workers_of(mortals)
            again = fit_daskps(mortals, make_net(CNN3, module__n=3, max_epochs=1), X, y)
            with (
                dask.config.set({"daskps.timeouts.workers": "50ms"}),
                pytest.raises(ClusterTooSmallError, match=rf"2 usable came.*{address}.* sent no heartbeat"),
            ):
                fit_daskps(mortals, make_net(CNN3, module__n=3), X, y, n_workers=3)
    finally:
        for pid, _ in stopped:
            kill(pid)
    assert [(event.epoch, event.worker) for event in ours.report_.events] == [(1, address)]
    assert [sum(entry.epoch == epoch for entry in ours.report_.ranks) for epoch in range(4)] == [3, 2, 2, 2]
    assert (again.report_.world_size, again.report_.events) == (2, [])
    assert [args for args, _ in asked] == [([address],)]
