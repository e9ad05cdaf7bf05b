"""The client's net: built from what the user gave, and checked before any work is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback

from daskps import _hooks, _loading, _losses
from daskps._casting import InputCast


def build(net: NeuralNetClassifier) -> NeuralNetClassifier:
    """An initialised copy of the user's net, which itself is never changed.

    Raises
    ------
    TypeError
        If ``net`` is not a NeuralNetClassifier, or one of its callbacks cannot be cloned.
    ValueError
        If an option of the net has no meaning.
    """
    if not isinstance(net, NeuralNetClassifier):
        raise TypeError(
            "The 'net' parameter must be an instance of skorch.NeuralNetClassifier or None, got"
            f" {net!r} instead."
        )
    _refuse_own_loops(net)
    _refuse_own_samplers(net)
    for callback in net.callbacks or () if isinstance(net.callbacks, list) else ():
        _check_cloneable(callback)
    return clone(net).initialize()


def check(
    net: NeuralNetClassifier, row: np.ndarray, n_classes: int, n_rows: int, every: int | None
) -> None:
    """Everything about an initialised net that would fail on a worker.

    Parameters
    ----------
    net : NeuralNetClassifier
    row : ndarray of shape (1, ...)
        One row of X, or zeros of its shape and dtype.
    n_classes, n_rows : int
    every : int or None
        Steps between two averages, 0 in batch mode.

    Raises
    ------
    ValueError
        If the module cannot take the row or has too few outputs, if the loss cannot be averaged, or if
        there would be no step.
    """
    _hooks.check(net, every)
    check_sync(net, every)
    check_steps(net, n_rows)
    check_module(net, row, n_classes)


def check_module(net: NeuralNetClassifier, row: np.ndarray, n_classes: int) -> None:
    """Run the module on one row: does it take it, and has it an output for every class?

    Raises
    ------
    ValueError
        If not.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            values = InputCast.of(net.module_).tensor(torch.as_tensor(row))
            output = net.evaluation_step((values, None))
    except Exception as error:
        raise ValueError(
            f"The net's module cannot take a row of X, of shape {row.shape[1:]} and dtype"
            f" {row.dtype}: {error}"
        ) from error
    output = output[0] if isinstance(output, tuple) else output
    width = output.shape[1] if output.ndim > 1 else 1
    if width < n_classes:
        raise ValueError(
            f"The net's module has {width} outputs, y has {n_classes} classes: the module needs at"
            " least one output for each class."
        )


def check_sync(net: NeuralNetClassifier, every: int | None) -> None:
    """Refuse a loss that cannot be averaged over local steps.

    Raises
    ------
    ValueError
        If the criterion adds over its rows and ranks step on their own.
    """
    if every != 0 and _losses.reduction(net) == "sum":
        raise ValueError(
            "criterion__reduction='sum' needs sync_every='batch': an average of local steps on summed"
            " losses is no step on the sum. Use reduction='mean' or sync_every='batch'."
        )


def check_steps(net: NeuralNetClassifier, n_rows: int) -> None:
    """Refuse a fit that would not make a single step.

    Raises
    ------
    ValueError
        If ``drop_last`` drops all rows, or there are none.
    """
    batching = _loading.batching(net, True)
    if not len(batching.sizes(n_rows)):
        raise ValueError(
            f"{n_rows} training rows make no batch of {batching.batch_size} rows with"
            f" drop_last={batching.drop_last}: the fit would have no step."
        )


def _check_cloneable(callback: Any) -> None:
    name, callback = callback if isinstance(callback, tuple) else (type(callback).__name__, callback)
    if isinstance(callback, type):
        return
    try:
        clone(callback, safe=isinstance(callback, Callback))
    except Exception as error:
        raise TypeError(
            f"The callback {name!r} ({type(callback).__name__}) cannot be cloned: {error}. Let its"
            " constructor only store its arguments, and make everything else in initialize() or"
            " on_train_begin(), under names that end with an underscore."
        ) from error


def _refuse_own_loops(net: NeuralNetClassifier) -> None:
    for method in ("fit_loop", "run_single_epoch"):
        if getattr(type(net), method) is not getattr(NeuralNetClassifier, method):
            raise TypeError(
                f"{type(net).__name__} overrides {method}, which daskps replaces by an epoch on the"
                " cluster: override train_step, validation_step or the hooks instead."
            )


def _refuse_own_samplers(net: NeuralNetClassifier) -> None:
    for iterator in ("iterator_train", "iterator_valid"):
        options = net.get_params_for(iterator)
        for option in ("sampler", "batch_sampler"):
            if options.get(option) is not None:
                raise ValueError(
                    f"{iterator}__{option} is not possible: which rows make up a batch is decided"
                    f" for all workers together. Use {iterator}__shuffle or order the rows."
                )
        if options.get("num_workers"):
            raise ValueError(
                f"{iterator}__num_workers={options['num_workers']} is not possible: a Dask worker"
                " may not have child processes. Set it to 0 and give Dask more workers."
            )
