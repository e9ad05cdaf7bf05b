"""The client's net: built from what the user gave, and checked before any work is sent."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.base import clone
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier
from skorch.callbacks import Callback, LoadInitState

from daskps import _hooks, _loading, _losses, _random
from daskps._casting import InputCast
from daskps._freezing import copied
from daskps._inputs import TrainingData


def build(net: NeuralNetClassifier) -> NeuralNetClassifier:
    """An initialised copy of the user's net, which itself is never changed.

    Raises
    ------
    TypeError
        If ``net`` is not a NeuralNetClassifier, or one of its callbacks cannot be cloned.
    ValueError
        If an option of the net has no meaning.
    """
    _check_net(net)
    for callback in net.callbacks or () if isinstance(net.callbacks, list) else ():
        _check_cloneable(callback)
    built = _initialised(clone(net))
    for _, callback in built.callbacks_:
        if isinstance(callback, LoadInitState):  # of a checkpoint that is no longer the net's, but a clone
            callback.checkpoint.initialize()
    return built


def _initialised(net: NeuralNetClassifier) -> NeuralNetClassifier:
    try:
        return net.initialize()
    except (AssertionError, RuntimeError) as error:
        if str(net.device).startswith("cpu"):
            raise
        raise ValueError(f"device={net.device!r} is not available here: {error}") from error


def _check_net(net: Any) -> None:
    if not isinstance(net, (NeuralNetClassifier, NeuralNetBinaryClassifier)):
        raise TypeError(
            "The 'net' parameter must be an instance of skorch.NeuralNetClassifier,"
            f" skorch.NeuralNetBinaryClassifier or None, got {net!r} instead."
        )
    _refuse_own_loops(net)
    _refuse_own_samplers(net)


def check_names(net: Any, names: Iterable[str]) -> None:
    """Refuse parameters that a net does not have: skorch takes any name with two underscores.

    Raises
    ------
    ValueError
        If there is no net, or if it and its parts do not know a name.
    """
    for name in names:
        if not hasattr(net, "prefixes_"):
            raise ValueError(f"There is no parameter net__{name} to set: 'net' is {net!r}.")
        known = {*net.prefixes_, *net.get_params(deep=False)}
        first = name.partition("__")[0]
        if first not in known:
            near = get_close_matches(first, known, 1)
            hint = f" Did you mean {name.replace(first, near[0], 1)!r}?" if near else ""
            raise ValueError(f"Invalid parameter {name!r} for {type(net).__name__}.{hint}")


def go_on(net: NeuralNetClassifier) -> NeuralNetClassifier:
    """A copy of an initialised net with its weights, optimizer state, history and callbacks.

    Raises
    ------
    TypeError, ValueError
        As `build`.
    """
    _check_net(net)
    return copied(net)


def check(net: NeuralNetClassifier, rows: Any, data: TrainingData, n_rows: int, every: int | None) -> None:
    """Everything about an initialised net that would fail on a worker.

    Parameters
    ----------
    net : NeuralNetClassifier
    rows : Tensor of shape (2, ...), or dict of them
        Two rows of X, or zeros of their shape and dtype.
    data : TrainingData
    n_rows : int
        How many rows train.
    every : int or None
        Steps between two averages, 0 in batch mode.

    Raises
    ------
    ValueError
        If the module cannot take the rows or has too few outputs, if the loss cannot be averaged or
        weighted, or if there would be no step.
    """
    _hooks.check(net, every)
    check_sync(net, every)
    _loading.check_options(net)
    check_steps(net, n_rows)
    output = check_module(net, rows, len(data.classes))
    if data.weights is not None:
        check_weighting(net, output)


def check_module(net: NeuralNetClassifier, rows: Any, n_classes: int) -> Any:
    """Run the module on two rows: does it take them, and has it an output for every class?

    Returns
    -------
    Tensor or tuple of Tensor
        What the module gave.

    Raises
    ------
    ValueError
        If not.
    """
    try:
        with _random.LOCK, torch.random.fork_rng(devices=[]):
            values = InputCast.of(net.module_).tensor(rows)
            output = net.evaluation_step((values, None))
    except Exception as error:
        raise ValueError(f"The net's module cannot take rows of X, {_described(rows)}: {error}") from error
    first = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(first, torch.Tensor):
        raise ValueError(
            f"The net's module returns a {type(first).__name__}: a tensor is needed, or a tuple that begins"
            " with one."
        )
    width = first.shape[1] if first.ndim > 1 else 1
    if isinstance(net, NeuralNetBinaryClassifier):
        if n_classes > 2:
            raise ValueError(f"A NeuralNetBinaryClassifier knows 2 classes, y has {n_classes}.")
    elif width < n_classes:
        raise ValueError(
            f"The net's module has {width} outputs, y has {n_classes} classes: the module needs at"
            " least one output for each class."
        )
    return output


def _described(rows: Any) -> str:
    if isinstance(rows, dict):
        return ", ".join(f"{key!r} {_described(value)}" for key, value in rows.items())
    if not isinstance(rows, torch.Tensor):
        return f"of type {type(rows).__name__}"
    return f"of shape {tuple(rows.shape[1:])} and dtype {str(rows.dtype).removeprefix('torch.')}"


def check_weighting(net: NeuralNetClassifier, output: Any) -> None:
    """Can the net's loss be weighted row by row?

    Raises
    ------
    ValueError
        If the criterion has no ``reduction``, or the net's ``get_loss`` returns a single number.
    """
    if not hasattr(net.criterion_, "reduction"):
        raise ValueError(
            f"Weights are not possible with the criterion {type(net.criterion_).__name__}: it has no"
            " 'reduction' and so no loss of each row."
        )
    y = torch.as_tensor(np.zeros(2, target_dtype(net)))
    with _random.LOCK, torch.random.fork_rng(devices=[]), torch.no_grad(), _losses.unreduced(net):
        losses = net.get_loss(output, y, training=True)
    if losses.ndim == 0 or len(losses) != 2:
        raise ValueError(
            f"Weights are not possible with {type(net).__name__}.get_loss: it returns one number where"
            " the criterion has reduction='none', instead of a loss for each row."
        )


def target_dtype(net: NeuralNetClassifier) -> type:
    """What the criterion takes as targets: class indices, or numbers from a binary classifier."""
    if not isinstance(net, NeuralNetBinaryClassifier):
        return np.int64
    # Torch computes a loss in the targets' dtype.
    return np.float64 if InputCast.of(net.module_).dtype == torch.float64 else np.float32


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
        If ``drop_last`` drops all rows, or there are none, or ``max_epochs`` is no number of epochs.
    """
    if not isinstance(net.max_epochs, Integral):
        raise ValueError(f"max_epochs must be an integer, got {net.max_epochs!r}.")
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
    for method in ("fit", "partial_fit", "fit_loop", "run_single_epoch", "get_iterator"):
        if not getattr(type(net), method).__module__.startswith("skorch."):
            instead = "override train_step, validation_step or the hooks"
            if method == "get_iterator":
                instead = "set iterator_train and iterator_valid"
            raise TypeError(
                f"{type(net).__name__} overrides {method}, which daskps replaces by an epoch on the"
                f" cluster: {instead} instead."
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
