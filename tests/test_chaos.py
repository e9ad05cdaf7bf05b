"""Every fault, at every moment of a fit, in both modes and on both transports.

A fit ends with the right parameters or raises the right error; then the cluster trains again and keeps
nothing. ``make chaos`` runs a cover of all pairs, and all combinations with ``CHAOS=all``.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product

import dask
import numpy as np
import pytest
import torch
from conftest import bring_back
from faults import N_CLASSES, HaltsIn, address_of, first_halted, is_alive, kill, state_of, stop
from nets import CNN3, MARK, Halting
from probes import leftovers, wait_until, workers_of
from ranks import fds
from reference import distance, fit_daskps, fit_plain, make_net, xy

from daskps import ClusterTooSmallError, DistributedCNNClassifier, _launch, _sources
from daskps._launch import Run
from daskps._spec import WORKER_PLUGIN
from daskps._watch import Watch

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

N_WORKERS = 3
N_EPOCHS = 2

# On a busy machine a worker may need minutes to come back; on a quiet one nothing waits for so long.
PATIENCE = 240.0
SETTINGS = {"daskps.timeouts.silence": f"{PATIENCE}s", "daskps.timeouts.workers": f"{PATIENCE}s"}

# In a module's forward pass: which row halts its rank, in which epoch, and whether in training.
HALTS = {
    "first round": (5, 1, True),
    "mid-epoch": (45, 2, True),
    "validation": (None, 1, False),
    "last round": (85, 2, True),
}

# On the client: before which call the fault happens.
CALLS = {
    "leasing": (Watch, "ask"),
    "scattering": (_sources, "scatter"),
    "opening": (Run, "_send"),
    "closing": (_launch, "_close"),
}

PHASES = [*list(CALLS)[:3], *HALTS, "closing"]
EVENTS = ["SIGKILL", "SIGSTOP", "exception", "abort", "restart", "close", "cut"]
MODES = ["batch", "epoch"]
TRANSPORTS = ["shared-memory", "comm"]


def cover():
    """All pairs of values of two factors, in as many cases as there are phases and events."""
    for i, phase in enumerate(PHASES):
        for j, event in enumerate(EVENTS):
            yield phase, event, MODES[(i + j) % 2], TRANSPORTS[(i // 2 + j) % 2]


def is_complete(cases, factors):
    pairs = combinations(range(len(factors)), 2)
    return all(
        {(case[a], case[b]) for case in cases} == set(product(factors[a], factors[b])) for a, b in pairs
    )


FACTORS = [PHASES, EVENTS, MODES, TRANSPORTS]
CASES = list(product(*FACTORS)) if os.environ.get("CHAOS") == "all" else list(cover())


def test_all_pairs_are_covered():
    assert is_complete(list(cover()), FACTORS)
    assert not is_complete(list(cover())[1:], FACTORS)


def is_known(client, address):
    return address in workers_of(client)


# Faults. Each returns how to see that it has happened.


def sigkill(client, pid, address):
    kill(pid)
    return lambda: not is_alive(pid)


def sigstop(client, pid, address):
    stop(pid)
    return lambda: not is_alive(pid) or state_of(pid) == "T"


def abort(client, pid, address):
    os.kill(pid, signal.SIGABRT)
    wait_until(lambda: not is_alive(pid))
    return lambda: not is_alive(pid)


def restart(client, pid, address):
    """By its nanny, which waits for the thread of the rank: go on as soon as Dask has lost the worker."""
    pool = ThreadPoolExecutor(1)
    restarting = pool.submit(client.restart_workers, [address], timeout=PATIENCE)
    pool.shutdown(wait=False)
    wait_until(lambda: restarting.done() or not is_known(client, address), PATIENCE)
    return lambda: restarting.done() and restarting.result() == {address: "OK"} and not is_alive(pid)


def close(client, pid, address):
    def close_itself(dask_worker):
        dask_worker.loop.add_callback(dask_worker.close, nanny=False, executor_wait=False)

    client.run(close_itself, workers=[address], on_error="ignore")
    return lambda: not is_known(client, address)


def cut(client, pid, address):
    """The connection of its rank's values or, if there is none, that of the worker itself."""

    def cut_itself(dask_worker):
        plugin = dask_worker.plugins.get(WORKER_PLUGIN)
        seats = [] if plugin is None else plugin.seats.values()
        socks = [seat.channel._sock for seat in seats if hasattr(seat.channel, "_sock")]
        for sock in socks:
            socket.socket.shutdown(sock, socket.SHUT_RDWR)
        if not socks:
            dask_worker.batched_stream.comm.abort()
        return len(socks)

    # A worker without a connection closes, maybe before it answers.
    n_socks = client.run(cut_itself, workers=[address], on_error="ignore").get(address)
    return lambda: n_socks == 1 or not is_known(client, address)


DEEDS = {
    "SIGKILL": sigkill,
    "SIGSTOP": sigstop,
    "abort": abort,
    "restart": restart,
    "close": close,
    "cut": cut,
}


class Chaos:
    """A fault that happens once, and the proof that it did."""

    def __init__(self, client, event, path):
        self.client = client
        self.event = event
        self.path = path
        self.has_happened = None
        self.pid = self.address = None

    def happen_to(self, pid):
        self.pid, self.address = pid, address_of(self.client, pid)
        if self.event in ("exception", "abort") and (self.path / "halted").exists():
            (self.path / {"exception": "raise", "abort": "abort"}[self.event]).touch()
            self.has_happened = lambda: True if self.event == "exception" else not is_alive(pid)
        else:
            self.has_happened = DEEDS[self.event](self.client, pid, self.address)

    def wait_until_noticed(self):
        """Nobody may take a dead worker for one that can train, nor wait while one ends in peace."""
        if self.pid is None:
            return
        if is_alive(self.pid) and (self.event == "SIGSTOP" or not is_known(self.client, self.address)):
            kill(self.pid)
        if not is_alive(self.pid):
            wait_until(lambda: not is_known(self.client, self.address), PATIENCE)

    def instead_of(self, original):
        """A function that lets the fault happen before, or raises after, it does what it did."""
        pids = sorted(self.client.run(os.getpid).values())

        def disturbed(*args, **kwargs):
            if self.has_happened is not None:
                return original(*args, **kwargs)
            if self.event != "exception":
                self.happen_to(pids[0])
                return original(*args, **kwargs)
            self.has_happened = lambda: True
            original(*args, **kwargs)
            raise ValueError("boom")

        return disturbed


def data(phase):
    X, y = xy(90 if phase != "validation" else 113, N_CLASSES)
    row = HALTS.get(phase, (0, 0, True))[0]
    X[slice(None) if row is None else row, 0, 0, 0] = MARK
    return X.astype(np.float64), y


def net_for(phase, path):
    _, epoch, training = HALTS.get(phase, (0, N_EPOCHS + 1, True))
    split = {} if phase == "validation" else {"train_split": None}
    return make_net(
        Halting,
        module__n=N_CLASSES,
        module__path=str(path),
        module__dtype=torch.float64,
        module__training=training,
        batch_size=10,
        max_epochs=N_EPOCHS,
        callbacks=[("halts", HaltsIn(path, epoch))],
        **split,
    )


def fit(client, net, X, y, sync_every):
    torch.manual_seed(0)
    return DistributedCNNClassifier(net, client=client, n_workers=N_WORKERS, sync_every=sync_every).fit(
        X, y
    )


def disturbed_fit(chaos, phase, net, X, y, sync_every, monkeypatch):
    """The estimator, or the error."""
    if phase in CALLS:
        where, name = CALLS[phase]
        monkeypatch.setattr(where, name, chaos.instead_of(getattr(where, name)))
    with ThreadPoolExecutor(1) as pool:
        fitting = pool.submit(fit, chaos.client, net, X, y, sync_every)
        try:
            if phase not in CALLS:
                chaos.happen_to(first_halted(chaos.path, fitting))
        finally:
            (chaos.path / "go").touch()
        error = fitting.exception(timeout=PATIENCE)
    return fitting.result() if error is None else error


def expected(client, fitted, net, X, y, sync_every):
    """In batch mode plain skorch; else what as many workers reach that nothing happens to."""
    net.set_params(callbacks=None)
    if sync_every == "batch":
        return fit_plain(net, X, y)
    epochs = [entry.epoch for entry in fitted.report_.ranks]
    again = DistributedCNNClassifier(net.set_params(max_epochs=1), client=client, sync_every=sync_every)
    torch.manual_seed(0)
    for epoch in range(N_EPOCHS):
        again.set_params(n_workers=epochs.count(epoch)).partial_fit(X, y)
    return again


def may_stay_away(phase, event):
    """A nanny does not replace a worker whose connection to Dask was cut."""
    return (phase, event) == ("leasing", "cut")


def shorter(phase, event):
    """Deadlines that a case has to wait for."""
    settings = {"daskps.timeouts.silence": "2s"} if event == "SIGSTOP" else {}
    return {**settings, "daskps.timeouts.workers": "1s"} if may_stay_away(phase, event) else settings


def ids(case):
    return "-".join(case).replace(" ", "_")


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_chaos(mortals, tmp_path, monkeypatch, case):
    phase, event, sync_every, transport = case
    chaos = Chaos(mortals, event, tmp_path)
    X, y = data(phase)
    net = net_for(phase, tmp_path)
    with dask.config.set({**SETTINGS, **shorter(phase, event), "daskps.transport": transport}):
        outcome = disturbed_fit(chaos, phase, net, X, y, sync_every, monkeypatch)
    wait_until(chaos.has_happened, PATIENCE)
    monkeypatch.undo()
    if event == "exception":
        assert type(outcome) is ValueError
        assert str(outcome) == "boom"
    elif not (may_stay_away(phase, event) and type(outcome) is ClusterTooSmallError):
        assert isinstance(outcome, DistributedCNNClassifier), repr(outcome)
        assert len(outcome.history_) == N_EPOCHS
    chaos.wait_until_noticed()
    bring_back(mortals)
    if isinstance(outcome, DistributedCNNClassifier):
        assert distance(outcome, expected(mortals, outcome, net, X, y, sync_every)) <= 1e-10
    if not isinstance(outcome, DistributedCNNClassifier) or sync_every == "batch":
        again = fit_daskps(mortals, make_net(CNN3, module__n=N_CLASSES, max_epochs=1), X, y)
        assert again.report_.world_size == N_WORKERS
    nothing_is_left(mortals)


def nothing_is_left(client):
    def threads():
        return [thread.name for thread in threading.enumerate() if thread.name == "daskps-rounds"]

    def segments():
        return [name for name in fds().values() if "memfd" in name]

    wait_until(lambda: not threads() and not segments(), what=lambda: f"{threads()} {segments()}")
    assert not [run for _, kind, run in leftovers(client) if kind == "waiting"]
