"""The cluster that all tests share, and the check that each leaves it as it found it."""

from __future__ import annotations

import os

# Before anything loads torch, here or in a worker: two pools that spin would fight for the cores.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import dask  # noqa: E402
import pytest  # noqa: E402
from distributed import Client, LocalCluster, Status  # noqa: E402
from distributed.utils import get_mp_context  # noqa: E402

N_WORKERS = 4

# After 15 seconds without its worker, LocalCluster would close a nanny for good. On a busy machine a new
# process may need longer than that.
dask.config.set({"distributed.deploy.lost-worker-timeout": "10m"})


# Under another one, as nice and its like set it, a rank's thread keeps what it has.
needs_usual_policy = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="not Linux, or tests run under another scheduling policy than the usual one",
)


def local_cluster(**options):
    """A cluster without a dashboard: nobody looks, and its port may be taken."""
    quiet = {"dashboard_address": None, "scheduler_kwargs": {"dashboard_address": ":0"}}
    return LocalCluster(**{"threads_per_worker": 1, **quiet, **options})


@pytest.fixture(scope="session")
def fork_server():
    """Workers are forked from a process that has imported torch, which costs more than most tests do."""
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        # Dask sets a list of its own at the first call, without torch.
        get_mp_context().set_forkserver_preload(["distributed", "torch", "skorch", "daskps._tasks"])
        yield


@pytest.fixture(scope="session")
def cluster(fork_server):
    """Four worker processes."""
    with local_cluster(n_workers=N_WORKERS, processes=True) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def session_client(cluster):
    # Not the default client: a test that wants such a one says so.
    with Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(N_WORKERS)
        yield client


@pytest.fixture
def client(session_client):
    """The shared cluster's client. After the test the cluster answers, and nothing new is left there."""
    from probes import leftovers, wait_until

    before = leftovers(session_client)

    def new():
        return leftovers(session_client) - before

    yield session_client
    assert session_client.submit(int, pure=False).result(timeout=60) == 0
    # A test that failed before may have left something: that is its fault, not everybody's.
    wait_until(lambda: new() == set(), what=lambda: f"left on the cluster: {new()}")


# Workers that may be killed: their nannies start others, which the fork server has ready at once.

N_MORTALS = 3


@pytest.fixture(scope="session")
def mortal_cluster(fork_server):
    options = {"n_workers": N_MORTALS, "processes": True}
    with local_cluster(**options) as cluster, Client(cluster, set_as_default=False) as client:
        yield client


def bring_back(client):
    """Wait for all workers; a nanny does not replace one whose connection to Dask was cut."""
    from probes import wait_until, workers_of

    def is_back():
        replace_nannies(client.cluster)
        return len(workers_of(client)) == N_MORTALS

    wait_until(is_back, seconds=240)


def replace_nannies(cluster):
    """Start new ones in the place of those that have closed with their worker."""
    closed = [name for name, nanny in cluster.workers.items() if nanny.status == Status.closed]
    for name in closed:
        del cluster.workers[name]
    if closed:
        cluster.scale(N_MORTALS)


@pytest.fixture
def mortals(mortal_cluster):
    """A client of workers that may be killed. Afterwards all are there again, and nothing is left."""
    from probes import leftovers, wait_until

    before = leftovers(mortal_cluster)

    def is_as_before():
        try:
            return leftovers(mortal_cluster) <= before
        except OSError:  # a worker went while it was asked
            return False

    yield mortal_cluster
    bring_back(mortal_cluster)
    wait_until(is_as_before, seconds=240, what=lambda: f"left on the cluster: {leftovers(mortal_cluster)}")
