"""Clusters whose scheduler is a process of its own, as in production, and what their processes hold."""

from contextlib import contextmanager
from time import perf_counter

from dask.distributed import Client
from distributed.deploy.subprocess import SubprocessCluster


@contextmanager
def cluster(n_workers):
    """A client of a cluster of workers with one thread, and the seconds that it took to come."""
    begun = perf_counter()
    options = {"dashboard_address": ":0", "n_workers": n_workers, "threads_per_worker": 1}
    with SubprocessCluster(**options) as processes, Client(processes) as client:
        client.wait_for_workers(n_workers)
        yield client, perf_counter() - begun


def scheduler_peak_memory(client):
    """Bytes."""

    def peak():  # nested: the scheduler cannot import this module
        with open("/proc/self/status", encoding="utf-8") as status:
            (kib,) = (line.split()[1] for line in status if line.startswith("VmHWM:"))
        return 1024 * int(kib)

    return client.run_on_scheduler(peak)
