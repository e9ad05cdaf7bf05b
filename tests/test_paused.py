"""Workers that Dask has paused, maybe for ever: what waits for them does so for a bounded time."""

from __future__ import annotations

from types import SimpleNamespace

import dask
import dask.array as da
import pytest
from distributed import Status, get_worker
from nets import CNN3
from probes import wait_until, workers_of
from reference import fit_daskps, make_net, xy

from daskps import WorkerBusyError
from daskps._paused import Paused, holding_up

# In place of 0.8 of its memory: no process has so little.
FULL = 1e-6


class Worker:
    """As much of Dask's state of a worker as is looked at."""

    def __init__(self, address, status):
        self.address = address
        self.status = status
        self.memory = SimpleNamespace(process=5)
        self.memory_limit = 6


class Task:
    """As much of Dask's state of a task as is looked at."""

    def __init__(self, state="waiting", waiting_on=None, on=None, only=None):
        self.state = state
        self.waiting_on = None if waiting_on is None else set(waiting_on)
        self.processing_on = on
        self.worker_restrictions = only


RUNS = Worker("a", Status.running)
PAUSED = Worker("b", Status.paused)
WORKERS = {"a": RUNS, "b": PAUSED}


class TestHoldingUp:
    @pytest.mark.parametrize(
        ("task", "found"),
        [
            (Task("processing", on=PAUSED), ["b"]),
            (Task("processing", on=RUNS), []),
            (Task("memory"), []),
            (Task("no-worker", only={"b", "gone"}), ["b"]),
            (Task("no-worker", only={"a"}), []),
            (Task("no-worker"), ["b"]),
            (Task(waiting_on=[Task(waiting_on=[Task("processing", on=PAUSED)])]), ["b"]),
            (Task(waiting_on=[Task("processing", on=RUNS), Task("no-worker", only={"b"})]), ["b"]),
        ],
    )
    def test_names_who_is_waited_for(self, task, found):
        scheduler = SimpleNamespace(tasks={"x": task}, workers=WORKERS)
        assert [paused.address for paused in holding_up(scheduler, ["x"])] == found

    def test_says_how_full_it_is(self):
        scheduler = SimpleNamespace(tasks={"x": Task("processing", on=PAUSED)}, workers=WORKERS)
        assert holding_up(scheduler, ["x", "gone"]) == [Paused("b", 5, 6)]


def set_pause(fraction, dask_worker):
    dask_worker.memory_manager.memory_pause_fraction = fraction


def pause_on(block, address):
    """A block after which its worker is full, if that is the one."""
    here = get_worker()
    if here.address == address:
        set_pause(FULL, here)
        wait_until(lambda: here.status == Status.paused)
    return block


@pytest.fixture
def victim(client, session_client):
    """The address of a worker; afterwards it runs again."""
    address = sorted(workers_of(session_client))[1]
    before = dask.config.get("distributed.worker.memory.pause")
    yield address
    session_client.run(set_pause, before, workers=[address])
    wait_until(lambda: status_of(session_client, address) == "running")


def status_of(client, address):
    return workers_of(client)[address]["status"]


def fit_impatiently(client, X, y):
    with dask.config.set({"daskps.timeouts.start": "1s"}), pytest.raises(WorkerBusyError) as caught:
        fit_daskps(client, make_net(CNN3, module__n=3, max_epochs=1), X, y)
    return str(caught.value)


def test_a_rank_whose_worker_is_paused_before_it_has_its_rows(session_client, victim):
    X, y = xy(160, 3)
    blocks = da.from_array(X, chunks=(10, 1, 8, 8)).map_blocks(pause_on, victim, meta=X[:0])
    reason = fit_impatiently(session_client, blocks, y)
    for part in (victim, "paused", "daskps.timeouts.start (1 s)", "memory_limit"):
        assert part in reason
    assert len(reason.splitlines()) == 1  # the other ranks are ready
    assert fit_daskps(session_client, make_net(CNN3, module__n=3), X, y).report_.world_size == 3


def test_blocks_that_a_paused_worker_without_a_rank_has_to_compute(session_client, victim):
    X, y = xy(160, 3)
    blocks = da.from_array(X, chunks=(10, 1, 8, 8)).map_blocks(pause_on, victim, meta=X[:0])
    (persisted,) = session_client.persist([blocks], workers=[victim])
    wait_until(lambda: status_of(session_client, victim) == "paused")
    assert victim in fit_impatiently(session_client, persisted, y)
    session_client.cancel([persisted])  # the error's traceback holds it as well
