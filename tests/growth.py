"""What a cluster and its client hold, process by process, to see whether it grows from fit to fit.

Run as a script, it makes many fits on a cluster of its own, and fails if something has grown: make soak.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import threading

from daskps import _events
from daskps._spec import SCHEDULER_PLUGIN, TOPIC, WORKER_PLUGIN

# How much the memory of a process may grow: allocators keep what they once had.
BYTES_TOLERATED = 24 * 2**20


def of_process():
    """Files, threads and resident bytes of this process."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "bytes": pages * os.sysconf("SC_PAGE_SIZE"),
    }


async def hang_up(server):
    """Close connections that Dask keeps to use again: how many there are hangs on what met by chance."""
    server.rpc.collect()


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


def grown(before, after):
    """What has become more: kind, before and after; of bytes, what is more than tolerated."""
    return {
        key: (before.get(key, 0), n)
        for key, n in after.items()
        if n - before.get(key, 0) > (BYTES_TOLERATED if key[1] == "bytes" else 0)
    }


def settled(client, before, wait_until, seconds=30):
    """What all hold, as soon as nothing more than before is there that only takes a while to go."""
    latest = {}

    def is_true():
        latest.clear()
        latest.update(held(client))
        return not grown(before, latest)

    try:
        wait_until(is_true, seconds=seconds, every=0.1)
    except AssertionError:
        return dict(latest)
    return dict(latest)


def short_fits(client, n):
    """So many fits of one epoch, in all modes, by turns."""
    from nets import CNN3
    from reference import fit_daskps, make_net, xy

    X, y = xy(64, 3)
    net = make_net(CNN3, module__n=3, max_epochs=1, train_split=None)
    for i in range(n):
        fit_daskps(client, net, X, y, n_workers=2, sync_every=["batch", "epoch", 1][i % 3])


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
        row["MiB"] = row.pop("bytes") // 2**20
        yield f"{where}: " + ", ".join(f"{kind} {n}" for kind, n in row.items())


def main():
    from conftest import local_cluster
    from distributed import Client

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("--fits", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    options = parser.parse_args()
    with local_cluster(n_workers=2) as cluster, Client(cluster, set_as_default=False) as client:
        more = soak(client, options.fits, options.every)
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
