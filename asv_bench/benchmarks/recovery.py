"""A worker that is killed in the middle of an epoch: how long until the others go on without it.

All times are taken on one machine, by its clock: that of the signal, that at which Dask's scheduler removed
the worker, and that at which a rank reported the first step of the epoch that began again.
"""

import os
import signal
import statistics
from time import time

import dask
from skorch.callbacks import Callback

from daskps import DistributedCNNClassifier
from daskps._spec import TOPIC

from .clusters import cluster
from .fit import digits
from .nets import new_net
from .profile import PROFILE

WORKERS = 2
MODES = ("batch", "epoch")


class Calls(Callback):
    """A function, once, as soon as a step of the second epoch is reported."""

    def __init__(self, function):
        self.function = function

    def on_batch_end(self, net, training=False, **kwargs):
        if len(net.history) == 2 and len(net.history[-1, "batches"]) == 1:
            self.function()


class Recovery:
    """Until the worker is removed, which is Dask's doing, and from then until a step without it."""

    params = MODES
    param_names = ("sync_every",)
    timeout = 3600

    def setup_cache(self):
        return {mode: self.measure(mode) for mode in MODES}

    setup_cache.timeout = 3600

    def measure(self, mode):
        noticed, recovered = zip(*(self.once(mode) for _ in range(PROFILE.turns)), strict=True)
        return {"noticed": statistics.median(noticed), "recovered": statistics.median(recovered)}

    def once(self, mode):
        X, _, y, _ = digits()
        killed = []
        with cluster(WORKERS) as (client, _), dask.config.set({"daskps.report-interval": "1ms"}):
            worker, pid = min(client.run(os.getpid).items())

            def kill():  # replayed when the epoch has begun again, too
                if not killed:
                    killed.append(time())
                    os.kill(pid, signal.SIGKILL)

            net = new_net(batch_size=32, max_epochs=2, lr=0.02)
            net.set_params(callbacks=[("kills", Calls(kill))])
            DistributedCNNClassifier(net, sync_every=mode, client=client, random_state=0).fit(X, y)
            removed = removed_at(client, worker)
            return removed - killed[0], first_step_at(client) - removed

    def track_noticed_seconds(self, results, sync_every):
        return results[sync_every]["noticed"]

    track_noticed_seconds.unit = "seconds"

    def track_recovery_seconds(self, results, sync_every):
        return results[sync_every]["recovered"]

    track_recovery_seconds.unit = "seconds"


def removed_at(client, worker):
    """When Dask's scheduler removed a worker."""
    return next(t for t, event in client.get_events(worker) if event["action"] == "remove-worker")


def first_step_at(client):
    """When the scheduler heard of the first step that was made without the worker."""
    events = client.get_events(TOPIC)
    return next(t for t, event in events if "losses" in event and event["generation"] == 1)
