"""``daskps demo``: plain skorch beside two modes, on a local cluster."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from daskps import _machine, _workload
from daskps._workload import Split
from daskps.classifier import DistributedCNNClassifier

BATCH_SIZE = 32


@dataclass(frozen=True)
class Line:
    """One row of the demo's table."""

    mode: str
    workers: int
    images_per_second: float
    accuracy: float
    predicted: float | None = None


def demo(data: str, n_workers: int, n_epochs: int) -> list[Line]:
    """Train the same net in one process and on a local cluster, and print what came of it.

    Parameters
    ----------
    data : {'digits', 'fashion-mnist'}
    n_workers : int
        Workers of one thread each.
    n_epochs : int

    Returns
    -------
    list of Line
        Plain skorch, 'batch' and 'epoch'.
    """
    from distributed import Client, LocalCluster

    split = _workload.load(data)
    # A busy machine tears an interpreter with torch down in more than the seconds that Dask allows.
    logging.getLogger("distributed.nanny").setLevel(logging.ERROR)
    print(_describe(data, split, n_workers, n_epochs), flush=True)
    no_port = {"dashboard_address": ":0"}
    cluster = LocalCluster(n_workers=n_workers, threads_per_worker=1, scheduler_kwargs=no_port)
    with cluster, Client(cluster, set_as_default=False) as client:
        plain = _train_plainly(split, n_epochs)
        trained = [_train(split, n_epochs, mode, n_workers, client) for mode in ("batch", "epoch")]
    outcomes = [plain, *trained]
    print(table(outcomes))
    print("\nPredicted: C/(C/K + S), with C and S of that fit. Its C holds what workers on one machine")
    print("cost each other, and what a step costs whatever its rows: more workers do not divide these.")
    if data == "digits":
        print("\nDigits are few: the start and end of an epoch count. With 60,000 images:")
        print("daskps demo --data fashion-mnist")
    return outcomes


def table(outcomes: Sequence[Line]) -> str:
    """The demo's results as text; the first row is what the others are compared with."""
    base = outcomes[0].images_per_second
    head = f"{'mode':<14}{'workers':>8}{'images/s':>10}{'speedup':>9}{'predicted':>11}{'test accuracy':>15}"
    rows = [
        f"{o.mode:<14}{o.workers:>8}{o.images_per_second:>10.0f}{o.images_per_second / base:>9.2f}"
        f"{'-' if o.predicted is None else format(o.predicted, '.2f'):>11}{o.accuracy:>15.4f}"
        for o in outcomes
    ]
    return "\n".join(["", head, *rows])


def _train_plainly(split: Split, n_epochs: int) -> Line:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net = _net(split, n_epochs, 1).fit(split.X_train, split.y_train)
    finally:
        torch.set_num_threads(threads)
    seconds = _epoch_seconds(net.history, n_epochs)
    return Line(
        "plain skorch", 1, len(split.X_train) / seconds, float(net.score(split.X_test, split.y_test))
    )


def _train(split: Split, n_epochs: int, sync_every: str, n_workers: int, client: Any) -> Line:
    clf = DistributedCNNClassifier(
        _net(split, n_epochs, 1 if sync_every == "batch" else n_workers),
        sync_every=sync_every,
        n_workers=n_workers,
        client=client,
        random_state=0,
    ).fit(split.X_train, split.y_train)
    seconds = _epoch_seconds(clf.history_, n_epochs)
    return Line(
        sync_every,
        clf.report_.world_size,
        len(split.X_train) / seconds,
        float(clf.score(split.X_test, split.y_test)),
        clf.report_.predicted_speedup,
    )


def _epoch_seconds(history: Any, n_epochs: int) -> float:
    """The median. A fit that Ctrl-C has stopped returns as if it were done; the demo stops too."""
    if len(history) < n_epochs:
        raise KeyboardInterrupt
    return float(sorted(history[:, "dur"])[n_epochs // 2])


def _net(split: Split, n_epochs: int, n_shards: int) -> Any:
    from skorch.callbacks import ProgressBar

    n_batches = math.ceil(len(split.X_train) / n_shards / BATCH_SIZE)
    bar = ProgressBar(batches_per_epoch=n_batches, detect_notebook=False)
    return _workload.new_net(split, BATCH_SIZE, n_epochs, callbacks=[bar] if sys.stderr.isatty() else [])


def _describe(data: str, split: Split, n_workers: int, n_epochs: int) -> str:
    machine = _machine.describe()
    return (
        f"{data}: {len(split.X_train)} training images, {len(split.X_test)} test images, {n_epochs} epochs,"
        f" {n_workers} workers of one thread, {machine['processor']} with {machine['cores']} cores"
    )
