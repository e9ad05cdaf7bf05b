"""The command line: ``daskps demo``."""

from __future__ import annotations

import argparse
import logging
import math
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EPOCHS = {"digits": 20, "fashion-mnist": 3}
BATCH_SIZE = 32


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        demo(options.data, options.workers, options.epochs or EPOCHS[options.data])
    except FileNotFoundError as error:
        print(f"daskps: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass(frozen=True)
class Outcome:
    """One row of the demo's table."""

    mode: str
    workers: int
    images_per_second: float
    accuracy: float
    predicted: float | None = None


def demo(data: str, n_workers: int, n_epochs: int) -> list[Outcome]:
    """Train the same net in one process and on a local cluster, and print what came of it.

    Parameters
    ----------
    data : {'digits', 'fashion-mnist'}
    n_workers : int
        Workers of one thread each.
    n_epochs : int

    Returns
    -------
    list of Outcome
        Plain skorch, 'batch' and 'epoch'.
    """
    from distributed import Client, LocalCluster

    split = _load(data)
    # A busy machine tears an interpreter with torch down in more than the seconds that Dask allows.
    logging.getLogger("distributed.nanny").setLevel(logging.ERROR)
    print(_describe(data, split, n_workers, n_epochs), flush=True)
    cluster = LocalCluster(n_workers, threads_per_worker=1, scheduler_kwargs={"dashboard_address": ":0"})
    with cluster, Client(cluster, set_as_default=False) as client:
        plain = _train_plainly(split, n_epochs)
        trained = [_train(split, n_epochs, mode, n_workers, client) for mode in ("batch", "epoch")]
    outcomes = [plain, *trained]
    print(table(outcomes))
    if data == "digits":
        print("\nDigits are too small for a speedup: an epoch's work is shorter than its start and end.")
        print("See one with: daskps demo --data fashion-mnist")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """The demo's results as text; the first row is what the others are compared with."""
    base = outcomes[0].images_per_second
    head = f"{'mode':<14}{'workers':>8}{'images/s':>10}{'speedup':>9}{'predicted':>11}{'test accuracy':>15}"
    rows = [
        f"{o.mode:<14}{o.workers:>8}{o.images_per_second:>10.0f}{o.images_per_second / base:>9.2f}"
        f"{'-' if o.predicted is None else format(o.predicted, '.2f'):>11}{o.accuracy:>15.4f}"
        for o in outcomes
    ]
    return "\n".join(["", head, *rows])


def _train_plainly(split: Any, n_epochs: int) -> Outcome:
    import torch

    X_train, X_test, y_train, y_test = split
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net = _net(split, n_epochs, 1).fit(X_train, y_train)
    finally:
        torch.set_num_threads(threads)
    seconds = sorted(net.history[:, "dur"])[n_epochs // 2]
    return Outcome("plain skorch", 1, len(X_train) / seconds, float(net.score(X_test, y_test)))


def _train(split: Any, n_epochs: int, sync_every: str, n_workers: int, client: Any) -> Outcome:
    from daskps import DistributedCNNClassifier

    X_train, X_test, y_train, y_test = split
    clf = DistributedCNNClassifier(
        _net(split, n_epochs, 1 if sync_every == "batch" else n_workers),
        sync_every=sync_every,
        n_workers=n_workers,
        client=client,
        random_state=0,
    ).fit(X_train, y_train)
    seconds = sorted(clf.history_[:, "dur"])[n_epochs // 2]
    return Outcome(
        sync_every,
        clf.report_.world_size,
        len(X_train) / seconds,
        float(clf.score(X_test, y_test)),
        clf.report_.predicted_speedup,
    )


def _net(split: Any, n_epochs: int, n_shards: int) -> Any:
    import torch
    from skorch import NeuralNetClassifier
    from skorch.callbacks import ProgressBar

    from daskps import CNN

    X_train, _, y_train, _ = split
    n_batches = math.ceil(len(X_train) / n_shards / BATCH_SIZE)
    torch.manual_seed(0)
    return NeuralNetClassifier(
        CNN,
        module__input_shape=X_train.shape[1:],
        module__n_classes=int(y_train.max()) + 1,
        criterion=torch.nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.05 if len(X_train) < 10_000 else 0.01,
        batch_size=BATCH_SIZE,
        max_epochs=n_epochs,
        iterator_train__shuffle=True,
        train_split=None,
        verbose=0,
        callbacks=[ProgressBar(batches_per_epoch=n_batches, detect_notebook=False)]
        if sys.stderr.isatty()
        else [],
    )


def _load(data: str) -> Any:
    from daskps import datasets

    if data == "digits":
        return datasets.load_digits_images()
    return datasets.load_fashion_mnist()


def _describe(data: str, split: Any, n_workers: int, n_epochs: int) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return (
        f"{data}: {len(split[0])} training images, {len(split[1])} test images, {n_epochs} epochs,"
        f" {n_workers} workers of one thread, {platform.machine()} with {cores} cores"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="daskps", description="Train one network on a Dask cluster.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "demo", help="train a CNN in one process and on a local cluster, and compare"
    )
    command.add_argument("--data", choices=sorted(EPOCHS), default="digits")
    command.add_argument("--workers", type=_positive, default=2, metavar="K")
    command.add_argument("--epochs", type=_positive, default=None, metavar="N")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not an integer >= 1")
    return value
