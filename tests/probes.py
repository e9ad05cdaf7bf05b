"""Functions that tests run on the scheduler and on workers, to look at what is there."""

from __future__ import annotations

import threading
from time import monotonic

from daskps._spec import SCHEDULER_PLUGIN, WORKER_PLUGIN

PAUSE = threading.Event()


def wait_until(is_true, seconds=60.0, what=lambda: "it did not come true", every=0.01):
    """Look again and again; fail after so many seconds, and say what is wrong."""
    deadline = monotonic() + seconds
    while not is_true():
        assert monotonic() < deadline, f"after {seconds} s: {what()}"
        PAUSE.wait(every)


def on_scheduler(dask_scheduler):
    """Everything that a fit could leave behind in the scheduler."""
    found = [("task", str(key)) for key in dask_scheduler.tasks]
    plugin = dask_scheduler.plugins.get(SCHEDULER_PLUGIN)
    if plugin is not None:
        found += [("run", run) for run in plugin.runs]
        found += [("leaving", run) for run, _ in plugin.leaving.awaited]
        found += [("held", run) for run in plugin.lender.leases.held()]
        found += [("waiting", run) for run in plugin.lender.leases.waiting()]
    return found


def on_worker(dask_worker):
    """Everything that a fit could leave behind in a worker."""
    plugin = dask_worker.plugins.get(WORKER_PLUGIN)
    seats = [] if plugin is None else plugin.seats
    return [("data", str(key)) for key in dask_worker.data] + [("seat", run) for run, _ in seats]


def workers_of(client):
    """What Dask says of every worker; its client overwrites ``scheduler_info`` every now and then."""
    return client.sync(client.scheduler.identity, n_workers=-1)["workers"]


def failures_logged(client):
    """What Dask's workers have written about tasks that raised."""
    logs = client.get_worker_logs().values()
    return [text for lines in logs for _, text in lines if "Compute Failed" in text]


def leftovers(client):
    """What is left on the whole cluster."""
    left = {"scheduler": client.run_on_scheduler(on_scheduler), **client.run(on_worker)}
    return {(where, *found) for where, founds in left.items() for found in founds}


def replicas(dask_worker):
    """Rank and state of every replica that a worker holds."""
    plugin = dask_worker.plugins[WORKER_PLUGIN]
    return [
        (seat.ticket.rank, {k: v.numpy().copy() for k, v in seat.replica.module_.state_dict().items()})
        for seat in plugin.seats.values()
    ]


def states_by_rank(client):
    """The replicas' states of the only run that is open, in rank order."""
    found = [pair for pairs in client.run(replicas).values() for pair in pairs]
    return [values for _, values in sorted(found, key=lambda pair: pair[0])]
