"""What a cluster and its client hold, process by process, to see whether it grows from fit to fit.

Run as a script, it makes many fits on a cluster of its own, and fails if something has grown: make soak.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import sys
import threading
from contextlib import contextmanager

import dask
from conftest import local_cluster
from dask.utils import key_split
from distributed import Client
from distributed.scheduler import DEFAULT_EXTENSIONS

from daskps import _events
from daskps._spec import SCHEDULER_PLUGIN, TOPIC, WORKER_PLUGIN

# How much more a process may hold, by kind, and nothing more of any other. Heartbeats have connections that
# come and go. Allocators keep what they once had, so resident bytes say little; what has been allocated and
# not freed says more.
TOLERATED = {
    "files": 4,
    "asyncio tasks": 4,
    "bytes": 24 * 2**20,
    "allocated bytes": 2**20,
    "small objects": 4000,
}

# Dask keeps records of what happens, which grow for hours: here they are full after a few fits.
SHORT_RECORDS = {
    "distributed.admin.log-length": 20,
    "distributed.admin.low-level-log-length": 20,
    "distributed.admin.system-monitor.log-length": 10,
    "distributed.diagnostics.computations.max-history": 5,
    "distributed.worker.profile.enabled": False,
}


def of_process():
    """Files, threads and memory of this process."""
    gc.collect()
    key_split.cache_clear()  # of the last 100,000 keys
    # asyncio's pool has a few, and starts the next whenever all are busy.
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(threads),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "allocated bytes": allocated_bytes(),
        "small objects": sys.getallocatedblocks(),  # Python's own, which malloc does not see one by one
    }


def allocated_bytes():
    """What malloc has given and not got back; 0 where nobody can say."""

    class Mallinfo2(ctypes.Structure):  # in here, since cloudpickle cannot bring it along
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = Mallinfo2
    found = mallinfo()
    return found.uordblks + found.hblkhd


async def hang_up(server):
    """Close connections that Dask keeps to use again: how many there are hangs on what met by chance."""
    server.rpc.collect()


class NoSpans:
    """In the place of Dask's record of spans, of which a fit has one or two: it keeps them for good."""

    def __init__(self, scheduler):
        pass

    def observe_tasks(self, tasks, code, span_metadata):
        return {}

    def heartbeat(self, worker, seconds):
        pass


async def of_worker(dask_worker):
    await hang_up(dask_worker)
    plugin = dask_worker.plugins[WORKER_PLUGIN]
    return {
        **of_process(),
        "asyncio tasks": len(asyncio.all_tasks()),
        "tasks": len(dask_worker.state.tasks),
        "data": len(dask_worker.data),
        "handlers": len(dask_worker.handlers) + len(dask_worker.stream_handlers),
        "plugins": len(dask_worker.plugins),
        "seats": len(plugin.seats),
    }


async def of_scheduler(dask_scheduler):
    await hang_up(dask_scheduler)
    plugin = dask_scheduler.plugins[SCHEDULER_PLUGIN]
    parts = (plugin, plugin.lender, plugin.leaving, plugin.lookout)
    own = {
        f"{type(part).__name__}.{name}": len(value)
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, (dict, set))
    }
    return {
        **of_process(),
        **own,
        "held": len(plugin.lender.leases.held()),
        "asyncio tasks": len(asyncio.all_tasks()),
        "tasks": len(dask_scheduler.tasks),
        "clients": len(dask_scheduler.clients),
        "handlers": len(dask_scheduler.handlers) + len(dask_scheduler.stream_handlers),
        "plugins": len(dask_scheduler.plugins),
        "subscribers": len(dask_scheduler._broker._topics[TOPIC].subscribers),
        "topics": len(dask_scheduler._broker._topics),
    }


def of_client(client):
    client.sync(hang_up, client)
    return {
        **of_process(),
        "futures": len(client.futures),
        "queues": len(_events._queues) + len(_events._watching),
        "subscriptions": len(client._event_handlers),
    }


def held(client):
    """What all processes hold: numbers by process and kind."""
    everywhere = {
        "client": of_client(client),
        "scheduler": client.run_on_scheduler(of_scheduler),
        **client.run(of_worker),
    }
    return {(where, kind): n for where, counts in everywhere.items() for kind, n in counts.items()}


def grown(before, after, tolerated=TOLERATED):
    """What has become more, and by more than is tolerated: before and after, by process and kind."""
    return {
        key: (before.get(key, 0), n)
        for key, n in after.items()
        if n - before.get(key, 0) > tolerated.get(key[1], 0)
    }


def settled(client, before, wait_until, seconds=30, tolerated=TOLERATED):
    """The least that all hold within so many seconds, or until nothing has grown since before.

    What comes and goes, such as the connection of a heartbeat, has not grown.
    """
    least = {}

    def is_true():
        for key, n in held(client).items():
            least[key] = min(n, least.get(key, n))
        return not grown(before, least, tolerated)

    try:
        wait_until(is_true, seconds=seconds, every=0.1)
    except AssertionError:
        return least
    return least


def short_fits(client, n, n_workers=2):
    """So many fits of one epoch, in all modes, by turns."""
    from nets import CNN3
    from reference import fit_daskps, make_net, xy

    X, y = xy(64, 3)
    net = make_net(CNN3, module__n=3, max_epochs=1, train_split=None)
    for i in range(n):
        fit_daskps(client, net, X, y, n_workers=n_workers, sync_every=["batch", "epoch", 1][i % 3])


def soak(client, n_fits, every):
    """Fit again and again; returns what has grown since the first ``every`` fits."""
    from probes import wait_until

    short_fits(client, every)
    before = settled(client, {}, wait_until, seconds=5)
    more = {}
    for done in range(2 * every, n_fits + 1, every):
        short_fits(client, every)
        after = settled(client, before, wait_until)
        more = grown(before, after)
        print(
            f"{done:6} fits", *_table(after), *(f"GROWN {key}: {n}" for key, n in more.items()), sep="\n  "
        )
        sys.stdout.flush()
    return more


def _table(counts):
    for where in dict.fromkeys(where for where, _ in counts):
        row = {kind: n for (place, kind), n in counts.items() if place == where}
        for kind in ("bytes", "allocated bytes"):
            row[f"{kind} (KiB)"] = row.pop(kind) // 2**10
        yield f"{where}: " + ", ".join(f"{kind} {n}" for kind, n in row.items())


@contextmanager
def own_cluster():
    """A client of a cluster that itself remembers next to nothing."""
    extensions = {**DEFAULT_EXTENSIONS, "spans": NoSpans}
    options = {"dashboard_address": ":0", "extensions": extensions}
    with (
        dask.config.set(SHORT_RECORDS),
        local_cluster(n_workers=2, scheduler_kwargs=options) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        yield client


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args()
    with own_cluster() as client:
        more = soak(client, options.fits, options.every)
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
