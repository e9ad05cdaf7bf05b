"""After many fits all processes hold as much as after a few; and what grows is found."""

from __future__ import annotations

import asyncio
import math
import os
import threading

import pytest
from conftest import N_WORKERS
from growth import TOLERATED, grown, held, settled, short_fits
from probes import wait_until, workers_of

# On the shared cluster Dask's own records still grow.
COARSE = {**TOLERATED, "allocated bytes": math.inf, "small objects": math.inf}

KINDS = ("files", "threads", "asyncio tasks", "allocated bytes", "small objects", "handlers")

N = 10
# Of what comes and goes on a cluster that has just done something else, beside what is tolerated.
N_FLEETING = 60
leaked = {}
plugged = threading.Event()


async def leak(server):
    """Some of each kind, in the process of a worker or of the scheduler."""
    for _ in range(N):
        threading.Thread(target=plugged.wait, daemon=True).start()
    leaked["files"] = [os.open(os.devnull, os.O_RDONLY) for _ in range(N_FLEETING)]
    leaked["tasks"] = [asyncio.create_task(asyncio.Event().wait()) for _ in range(N_FLEETING)]
    leaked["small"] = [float(i) for i in range(2 * TOLERATED["small objects"])]
    leaked["large"] = bytearray(2 * TOLERATED["allocated bytes"])
    server.handlers["leaked"] = leak


async def plug(server):
    plugged.set()
    for file in leaked["files"]:
        os.close(file)
    for task in leaked["tasks"]:
        task.cancel()
    leaked.clear()
    del server.handlers["leaked"]


async def leak_worker(dask_worker):
    await leak(dask_worker)


async def plug_worker(dask_worker):
    await plug(dask_worker)


async def leak_scheduler(dask_scheduler):
    await leak(dask_scheduler)


async def plug_scheduler(dask_scheduler):
    await plug(dask_scheduler)


def test_more_than_is_tolerated_has_grown():
    before = {("client", "threads"): 3, ("client", "bytes"): 0}
    after = {("client", "threads"): 4, ("client", "bytes"): TOLERATED["bytes"], ("scheduler", "tasks"): 1}
    assert grown(before, after) == {("client", "threads"): (3, 4), ("scheduler", "tasks"): (0, 1)}
    assert grown(before, {("client", "bytes"): TOLERATED["bytes"] + 1})
    assert not grown(after, before)


def test_a_leak_of_each_kind_is_found(client):
    short_fits(client, 1, N_WORKERS)
    before = settled(client, {}, wait_until, seconds=1)
    worker = next(iter(workers_of(client)))
    client.run(leak_worker, workers=[worker])
    client.run_on_scheduler(leak_scheduler)
    future = client.scatter(1)
    try:
        found = grown(before, settled(client, before, wait_until, seconds=1))
    finally:
        future.release()
        client.run(plug_worker, workers=[worker])
        client.run_on_scheduler(plug_scheduler)
    planted = {(where, kind) for where in (worker, "scheduler") for kind in KINDS}
    planted |= {("client", "futures"), ("scheduler", "tasks")}
    assert planted - found.keys() == set()


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_nothing_grows_with_the_number_of_fits(client):
    short_fits(client, 10, N_WORKERS)  # on all: the first fit of a worker imports torch
    before = settled(client, {}, wait_until, seconds=1)
    short_fits(client, 40, N_WORKERS)
    after = settled(client, before, wait_until, tolerated=COARSE)
    assert grown(before, after, COARSE) == {}
    kinds = {kind for _, kind in held(client)}
    assert {"files", "threads", "bytes", "handlers", "subscribers", "seats", "futures"} <= kinds
