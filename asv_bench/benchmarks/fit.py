"""Whole fits on a cluster: what two workers gain over one, and what it costs in accuracy.

The time is that of the epochs, taken from the history: workers started, data sent and modules
imported before the first epoch are not in it, nor is the first epoch.
"""

from __future__ import annotations

import statistics

from dask.distributed import Client, LocalCluster

from daskps import DistributedCNNClassifier
from daskps.datasets import load_digits_images

WORKERS = 2
CLUSTER = {
    "n_workers": WORKERS,
    "threads_per_worker": 1,
    "dashboard_address": None,
    "scheduler_kwargs": {"dashboard_address": ":0"},
}


def seconds_per_epoch(clf):
    return statistics.median(clf.history_[1:, "dur"])


class DigitsOnTwoWorkers:
    """The built-in net. Both fits in one call, so that the ratio is between neighbours in time."""

    params = ("batch", "epoch")
    param_names = ("sync_every",)

    def setup_cache(self):
        with LocalCluster(**CLUSTER) as cluster, Client(cluster) as client:
            return {sync_every: self.compare(client, sync_every) for sync_every in self.params}

    setup_cache.timeout = 600

    def compare(self, client, sync_every):
        X_train, X_test, y_train, y_test = load_digits_images()
        alone, together = (
            DistributedCNNClassifier(
                sync_every=sync_every, n_workers=n_workers, client=client, random_state=0
            ).fit(X_train, y_train)
            for n_workers in (1, WORKERS)
        )
        return {
            "speedup": seconds_per_epoch(alone) / seconds_per_epoch(together),
            "accuracy": together.score(X_test, y_test),
        }

    def track_speedup(self, results, sync_every):
        return results[sync_every]["speedup"]

    track_speedup.unit = "times one worker's images/s"

    def track_test_accuracy(self, results, sync_every):
        return results[sync_every]["accuracy"]

    track_test_accuracy.unit = "share of the test rows"
