"""Fits that meet a fault in the middle of an epoch, and the proof that they did."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from nets import MARK, Halting, read
from probes import wait_until
from reference import make_net, xy
from skorch.callbacks import Callback

from daskps import DistributedCNNClassifier
from daskps._spec import SCHEDULER_PLUGIN

N_CLASSES = 3


class HaltsIn(Callback):
    """From this epoch on, counted from 1, a marked row halts its rank."""

    def __init__(self, path, epoch):
        self.path = path
        self.epoch = epoch

    def on_epoch_begin(self, net, **kwargs):
        if len(net.history) == self.epoch:
            (self.path / "halt").touch()


def marked(n, row, dtype=np.float32):
    """Random images, one of which is marked, and labels."""
    X, y = xy(n, N_CLASSES)
    X[row, 0, 0, 0] = MARK
    return X.astype(dtype), y


def halting_net(path, epoch=2, callbacks=(), **options):
    settings = {"module__n": N_CLASSES, "module__path": str(path), "batch_size": 30, **options}
    return make_net(Halting, callbacks=[("halts", HaltsIn(path, epoch)), *callbacks], **settings)


def fit_and(event, client, net, X, y, **options):
    """Fit, and let an event happen to the process that halts; returns the estimator, or the error."""
    path = Path(net.get_params()["module__path"])
    estimator = DistributedCNNClassifier(net, client=client, **options)
    torch.manual_seed(0)
    with ThreadPoolExecutor(1) as pool:
        fitting = pool.submit(estimator.fit, X, y)
        try:
            event(first_halted(path, fitting))
        finally:
            (path / "go").touch()
        error = fitting.exception(timeout=90)
    return estimator if error is None else error


def first_halted(path, fitting):
    """The process that halts first, as soon as one does."""

    def halted():
        return read(path / "halted") if (path / "halted").exists() else []

    wait_until(lambda: fitting.done() or halted(), seconds=90)
    assert not fitting.done(), fitting.exception()
    return halted()[0]["pid"]


def address_of(client, pid):
    return next(address for address, other in client.run(os.getpid).items() if other == pid)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid))


def stop(pid):
    """Let a process sleep until it is killed or woken."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T")


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def is_alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return state_of(pid) not in "ZX"
    except OSError:
        return False


def are_ready(n_workers, dask_scheduler):
    """Whether so many workers have loaded daskps."""
    return len(dask_scheduler.plugins[SCHEDULER_PLUGIN].lender.processes) == n_workers


class Calls(Callback):
    """Calls a function at the end of an epoch, counted from 1."""

    def __init__(self, function, epoch):
        self.function = function
        self.epoch = epoch

    def on_epoch_end(self, net, **kwargs):
        if len(net.history) == self.epoch:
            self.function()


def wait_for_ready(client, n_workers):
    wait_until(lambda: client.run_on_scheduler(are_ready, n_workers), seconds=60)


def wait_for_file(path):
    """A task that somebody else runs."""
    wait_until(lambda: os.path.exists(path), seconds=60)
