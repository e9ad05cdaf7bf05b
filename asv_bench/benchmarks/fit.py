"""Whole fits: what workers gain over plain skorch, and what it costs in accuracy, memory and start-up.

Everything that a ratio compares is measured in one call, in turns. The time is that of the epochs,
without the first one: workers started, data sent and modules imported are not in it, but count as start-up.
"""

import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from daskps import DistributedCNNClassifier
from daskps.datasets import load_digits_images

from .clusters import cluster, scheduler_peak_memory
from .nets import new_net
from .profile import PROFILE

# asv finds this package by other means than the path, which is what a new process gets to know.
sys.path.append(str(Path(__file__).parents[1]))

WORKERS = 2
MODES = ("batch", "epoch", 8)


def digits():
    """Handwritten digits, enlarged to 28x28: real images, here on every machine, and worth computing."""
    X_train, X_test, y_train, y_test = load_digits_images()
    return _enlarged(X_train), _enlarged(X_test), y_train, y_test


def _enlarged(X):
    return np.pad(X.repeat(3, axis=2).repeat(3, axis=3), ((0, 0), (0, 0), (2, 2), (2, 2)))


def net():
    return new_net(batch_size=32, max_epochs=1 + PROFILE.epochs, lr=0.02)


def plain_seconds(X, y):
    """An epoch of plain skorch on one core.

    In a process of its own: in one that has trained before, the allocator has other habits, and an epoch
    may take a third longer.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_plain_seconds, X, y).result()


def _plain_seconds(X, y):
    torch.set_num_threads(1)
    fitted = net().fit(X, y)
    return statistics.median(fitted.history[1:, "dur"])


def fitted(client, sync_every, n_workers, X, y):
    clf = DistributedCNNClassifier(
        net(), sync_every=sync_every, n_workers=n_workers, client=client, random_state=0
    )
    return clf.fit(X, y)


def seconds(clf):
    """An epoch of a fit."""
    return statistics.median(clf.report_.epoch_seconds[1:])


def sync_share(report):
    idle = sum(entry.wait_seconds + entry.sync_seconds for entry in report.ranks)
    return idle / (idle + sum(entry.compute_seconds for entry in report.ranks))


class StrongScaling:
    """The same rows on more workers."""

    params = MODES
    param_names = ("sync_every",)
    timeout = 3600

    def setup_cache(self):
        return {mode: self.measure(mode) for mode in MODES}

    setup_cache.timeout = 3600

    def measure(self, mode):
        X_train, X_test, y_train, y_test = digits()
        speedups = []
        with cluster(WORKERS) as (client, cluster_seconds):
            for turn in range(PROFILE.turns):
                alone = plain_seconds(X_train, y_train)
                clf = fitted(client, mode, WORKERS, X_train, y_train)
                speedups.append(alone / seconds(clf))
                if turn == 0:
                    startup = cluster_seconds + sum(clf.report_.startup_seconds.values())
            memory = scheduler_peak_memory(client)
        begun = perf_counter()
        str(clf.report_), clf.report_.to_dict()
        told = perf_counter() - begun
        return {
            "speedup": statistics.median(speedups),
            "sync_share": sync_share(clf.report_),
            "test_accuracy": float(clf.score(X_test, y_test)),
            "scheduler_peak_memory": memory,
            "startup_seconds": startup,
            "report_share": told / sum(clf.report_.epoch_seconds),
        }

    def track_speedup(self, results, sync_every):
        return results[sync_every]["speedup"]

    track_speedup.unit = "times plain skorch on one core"

    def track_efficiency(self, results, sync_every):
        return results[sync_every]["speedup"] / WORKERS

    track_efficiency.unit = "speedup for each worker"

    def track_sync_share(self, results, sync_every):
        return results[sync_every]["sync_share"]

    track_sync_share.unit = "share of the ranks' time"

    def track_test_accuracy(self, results, sync_every):
        return results[sync_every]["test_accuracy"]

    track_test_accuracy.unit = "share of the test rows"

    def track_scheduler_peak_memory(self, results, sync_every):
        return results[sync_every]["scheduler_peak_memory"]

    track_scheduler_peak_memory.unit = "bytes"

    def track_startup_seconds(self, results, sync_every):
        return results[sync_every]["startup_seconds"]

    track_startup_seconds.unit = "seconds"

    def track_report_share(self, results, sync_every):
        return results[sync_every]["report_share"]

    track_report_share.unit = "share of the epochs' time"


class WeakScaling:
    """Rows that grow with the workers: the same work for each."""

    params = MODES
    param_names = ("sync_every",)
    timeout = 3600

    def setup_cache(self):
        X, _, y, _ = digits()
        half = len(X) // WORKERS
        with cluster(WORKERS) as (client, _):
            return {mode: self.measure(client, mode, X, y, half) for mode in MODES}

    setup_cache.timeout = 3600

    def measure(self, client, mode, X, y, half):
        ratios = []
        for _ in range(PROFILE.turns):
            one = seconds(fitted(client, mode, 1, X[:half], y[:half]))
            ratios.append(one / seconds(fitted(client, mode, WORKERS, X, y)))
        return statistics.median(ratios)

    def track_efficiency(self, results, sync_every):
        return results[sync_every]

    track_efficiency.unit = "one worker's time over that of all"
