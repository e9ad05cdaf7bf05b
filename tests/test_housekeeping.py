"""What Dask does for itself, held back while somebody trains."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from distributed import Nanny
from distributed.core import Status
from nets import MARK, Halting
from probes import wait_until
from reference import make_net, xy

from daskps import DistributedCNNClassifier, _housekeeping

STATISTICS = {"tick", "ticks", "profile"}


class Callback:
    def __init__(self, callback_time=100.0):
        self.runs = True
        self.callback_time = callback_time

    def is_running(self):
        return self.runs

    def stop(self):
        self.runs = False


class Server:
    def __init__(self, names, status=Status.running):
        self.periodic_callbacks = {name: Callback() for name in names}
        self.status = status

    def start_periodic_callbacks(self):
        for callback in self.periodic_callbacks.values():
            callback.runs = True

    def running(self):
        return {name for name, callback in self.periodic_callbacks.items() if callback.runs}


@pytest.mark.parametrize("names", [{*STATISTICS, "heartbeat"}, {"tick", "heartbeat"}, {"heartbeat"}])
def test_only_statistics_are_held_back(names):
    server = Server(names)
    _housekeeping.hold_back(server)
    assert server.running() == names - STATISTICS
    _housekeeping.go_on(server)
    assert server.running() == names


@pytest.mark.parametrize("name", ["profile", "heartbeat"])
def test_what_the_user_has_stopped_stays_so(name):
    names = {*STATISTICS, "heartbeat"}
    server = Server(names)
    server.periodic_callbacks[name].stop()
    _housekeeping.hold_back(server)
    _housekeeping.go_on(server)
    assert server.running() == names - {name}


@pytest.mark.parametrize(("usual", "meanwhile"), [(100, 500), (500, 500), (2000, 2000)])
def test_memory_is_watched_less_often_but_never_more(usual, meanwhile):
    server = Server({"memory_monitor", "heartbeat"})
    watch = server.periodic_callbacks["memory_monitor"]
    watch.callback_time = usual
    _housekeeping.hold_back(server)
    assert (watch.runs, watch.callback_time) == (True, meanwhile)
    _housekeeping.go_on(server)
    assert (watch.runs, watch.callback_time) == (True, usual)


def test_a_server_may_be_held_back_twice():
    """By another run, or before all of its callbacks have begun."""
    server = Server({*STATISTICS, "memory_monitor"})
    server.periodic_callbacks["profile"].stop()
    _housekeeping.hold_back(server)
    server.start_periodic_callbacks()
    _housekeeping.hold_back(server)
    assert server.running() == {"memory_monitor"}
    for _ in range(2):
        _housekeeping.go_on(server)
        assert server.running() == {*STATISTICS, "memory_monitor"}
        assert server.periodic_callbacks["memory_monitor"].callback_time == 100


@pytest.mark.parametrize("status", [Status.closing, Status.closed, Status.failed])
def test_of_a_server_that_ends_nothing_is_started(status):
    server = Server({"tick", "heartbeat"}, status)
    _housekeeping.hold_back(server)
    _housekeeping.go_on(server)
    assert server.running() == {"heartbeat"}


def test_a_worker_that_was_to_retire_may_have_to_stay():
    """Dask takes that back if nobody else can have its data."""
    server = Server({"tick", "memory_monitor"}, Status.closing_gracefully)
    _housekeeping.hold_back(server)
    _housekeeping.go_on(server)
    assert server.running() == {"tick", "memory_monitor"}
    assert server.periodic_callbacks["memory_monitor"].callback_time == 100


def test_nannies_of_another_event_loop_are_left_alone(monkeypatch):
    ours, other = SimpleNamespace(loop="a"), SimpleNamespace(loop="b")
    monkeypatch.setattr(Nanny, "_instances", [ours, other])
    scheduler = SimpleNamespace(loop="a")
    assert _housekeeping.with_nannies(scheduler) == [scheduler, ours]


def test_another_thread_may_make_a_nanny_meanwhile(monkeypatch):
    class Growing(list):
        def __iter__(self):
            if len(self) == 1:
                self.append(SimpleNamespace(loop="a"))
                raise RuntimeError("Set changed size during iteration")
            return super().__iter__()

    scheduler, nannies = SimpleNamespace(loop="a"), Growing([SimpleNamespace(loop="b")])
    monkeypatch.setattr(Nanny, "_instances", nannies)
    assert _housekeeping.with_nannies(scheduler) == [scheduler, nannies[1]]


def statistics_of_worker(dask_worker):
    running = {name: pc.is_running() for name, pc in dask_worker.periodic_callbacks.items()}
    seconds = dask_worker.periodic_callbacks["memory_monitor"].callback_time / 1000
    return *(running[name] for name in ("tick", "ticks", "profile", "heartbeat")), seconds


def statistics_of_scheduler(dask_scheduler):
    servers = _housekeeping.with_nannies(dask_scheduler)
    return [server.periodic_callbacks["tick"].is_running() for server in servers]


def test_a_fit_holds_them_back_for_its_length(client, cluster, tmp_path):
    """Of the workers that train, of the scheduler, and of the nannies that share its event loop."""
    X, y = xy(60, 3)
    X[3] = MARK
    (tmp_path / "halt").touch()
    net = make_net(Halting, module__n=3, module__path=str(tmp_path), max_epochs=1, train_split=None)
    estimator = DistributedCNNClassifier(net, n_workers=2, client=client)
    held, usual = (False, False, False, True, 0.5), (True, True, True, True, 0.1)

    def of_workers():
        return sorted(client.run(statistics_of_worker).values())

    with ThreadPoolExecutor(1) as pool:
        fit = pool.submit(estimator.fit, X, y)
        try:
            wait_until((tmp_path / "halted").exists)
            # The other rank may still be on its way.
            wait_until(lambda: of_workers() == [held] * 2 + [usual] * 2, what=of_workers)
            scheduler = client.run_on_scheduler(statistics_of_scheduler)
        finally:
            (tmp_path / "go").touch()
        fit.result(60)
    assert scheduler == [False] * (1 + len(cluster.workers))
    wait_until(lambda: of_workers() == [usual] * 4, what=of_workers)
    wait_until(lambda: all(client.run_on_scheduler(statistics_of_scheduler)))
