"""Whole fits on a cluster: what two workers gain over one, and what it costs in accuracy.

The time is that of the epochs, taken from the history: workers started, data sent and modules
imported before the first epoch are not in it, nor is the first epoch.
"""

from __future__ import annotations

import statistics

from dask.distributed import Client, LocalCluster
from sklearn.model_selection import train_test_split

from daskps import DistributedCNNClassifier
from daskps.datasets import load_digits_images

EPOCHS = 6
WORKERS = 2


def seconds_per_epoch(clf):
    return statistics.median(clf.history_[1:, "dur"])


def fit(client, n_workers, sync_every, X, y):
    clf = DistributedCNNClassifier(
        sync_every=sync_every, n_workers=n_workers, client=client, random_state=0
    )
    clf.set_params(net__max_epochs=EPOCHS)
    return clf.fit(X, y)


class DigitsOnTwoWorkers:
    """Both fits in one call, so that the ratio is between neighbours in time."""

    params = (["batch", "epoch"],)
    param_names = ("sync_every",)
    timeout = 600

    def setup_cache(self):
        X, y = load_digits_images()
        X, X_test, y, y_test = train_test_split(X, y, test_size=0.25, random_state=0, stratify=y)
        results = {}
        with (
            LocalCluster(
                n_workers=WORKERS, threads_per_worker=1, dashboard_address=None
            ) as cluster,
            Client(cluster) as client,
        ):
            for sync_every in self.params[0]:
                alone = fit(client, 1, sync_every, X, y)
                together = fit(client, WORKERS, sync_every, X, y)
                results[sync_every] = {
                    "speedup": seconds_per_epoch(alone) / seconds_per_epoch(together),
                    "accuracy": together.score(X_test, y_test),
                }
        return results

    setup_cache.timeout = 600

    def track_speedup(self, results, sync_every):
        return results[sync_every]["speedup"]

    track_speedup.unit = "times one worker's images/s"

    def track_test_accuracy(self, results, sync_every):
        return results[sync_every]["accuracy"]

    track_test_accuracy.unit = "share of the test rows"
