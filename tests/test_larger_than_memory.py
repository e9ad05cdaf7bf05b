"""A dask array that is larger than the memory that one worker may use."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from conftest import local_cluster
from dask import delayed
from distributed import Client
from nets import Flat
from probes import leftovers, wait_until
from reference import distance, fit_daskps, fit_plain, make_net
from skorch.callbacks import Callback

from daskps import on_ranks

MB = 2**20
LIMIT = 960 * MB  # of which torch has more than half, once it has trained
SHAPE = (1, 256, 256)
N, CHUNK, BATCH = 4400, 20, 20
Y = np.arange(N) % 3
NET = {
    "module__n_in": 2**16,
    "module__n_out": 3,
    "lr": 1e-4,
    "batch_size": BATCH,
    "max_epochs": 1,
}
TABLE = np.random.RandomState(0).rand(31, *SHAPE).astype(np.float32)

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="how memory is measured"),
]


def made(rows):
    factors = ((1 + rows % 7) / 7).astype(np.float32)
    return TABLE[rows % 31] * factors[:, None, None, None]


class Rows:
    """Rows that are made when they are asked for."""

    ndim = 4
    dtype = TABLE.dtype

    def __init__(self, order):
        self.order = order
        self.shape = (len(order), *SHAPE)

    def __len__(self):
        return len(self.order)

    def __getitem__(self, row):
        return made(self.order[[row]])[0]


def block(start):
    return made(np.arange(start, start + CHUNK))


@pytest.fixture(scope="module")
def narrow():
    # Dask looks every 100 ms how large a process is: too late for blocks that are made this quickly. It
    # counts what it holds itself each time.
    with (
        dask.config.set({"distributed.worker.memory.target": 0.1}),
        local_cluster(n_workers=2, processes=True, memory_limit=LIMIT) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        client.wait_for_workers(2)
        yield client


class Reads(Callback):
    """Counts on its rank what is read, from disk and from memory."""

    def on_train_begin(self, net, X=None, y=None, **kwargs):
        self.read_, self.spilled_ = 0, 0
        reader = X._reader
        read = reader._read

        def counted(key):
            self.read_ += 1
            self.spilled_ += key in reader._disk
            return read(key)

        reader._read = counted


def peak_memory(anew=False):
    """The most that this process has had, in bytes: from now on, or since then."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def fit(client, n_rows, n_workers, **options):
    """A fit for which the client needs no memory, and in which no worker dies."""
    X = da.concatenate([
        da.from_delayed(delayed(block)(start), (CHUNK, *SHAPE), TABLE.dtype)
        for start in range(0, n_rows, CHUNK)
    ])  # fmt: skip
    before = client.run(os.getpid)
    net = make_net(Flat, **NET, callbacks=[("reads", on_ranks(Reads()))], **options)
    begun = peak_memory(anew=True)
    ours = fit_daskps(client, net, X, Y[:n_rows], n_workers=n_workers)
    assert peak_memory() - begun < 200 * MB
    assert client.run(os.getpid) == before
    wait_until(lambda: leftovers(client) == set(), what=lambda: leftovers(client))
    return ours


def test_on_one_worker(narrow):
    assert N * TABLE[0].nbytes > 1.1 * LIMIT
    ours = fit(narrow, N, 1)
    reads = dict(ours.net_.callbacks_)["reads"].callback
    assert reads.read_ == N // CHUNK  # the first fifth to validate, the others to train
    assert reads.spilled_ > 0.8 * N // CHUNK
    plain = fit_plain(make_net(Flat, **NET), Rows(np.arange(N)), Y)
    assert distance(ours, plain) <= 1e-6
    for key in ("train_loss", "valid_loss", "valid_acc"):
        assert ours.history_[-1, key] == pytest.approx(plain.history[-1, key], rel=1e-5)


def test_on_two_workers(narrow):
    """A step takes half of its rows from each worker's half of the array."""
    n_rows = N // 2
    ours = fit(narrow, n_rows, 2, train_split=None)
    assert ours.report_.world_size == 2
    halves = np.arange(n_rows).reshape(2, -1, BATCH // 2)
    order = halves.transpose(1, 0, 2).ravel()
    plain = fit_plain(make_net(Flat, **NET, train_split=None), Rows(order), Y[order])
    assert distance(ours, plain) <= 1e-6
