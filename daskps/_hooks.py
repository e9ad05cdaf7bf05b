"""On which side a callback runs.

A callback runs on one side with all its hooks: on the client, or on every rank. On the ranks run those
that act inside a step, where only the replicas are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sklearn.base import clone
from skorch import NeuralNet
from skorch.callbacks import (
    BatchScoring,
    Callback,
    Checkpoint,
    EarlyStopping,
    EpochScoring,
    InputShapeSetter,
    LRScheduler,
    ParamMapper,
    PassthroughScoring,
    TrainEndCheckpoint,
)
from torch.optim.lr_scheduler import ReduceLROnPlateau

NamedCallbacks = list[tuple[str, Any]]


class OnRanks(Callback):
    """A callback that runs on every rank, on the combined gradient. Made by `on_ranks`.

    In plain skorch it does what the wrapped callback does.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def initialize(self) -> OnRanks:
        """Initialise the wrapped callback."""
        self.callback.initialize()
        return self

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Pass the event on."""
        self.callback.on_train_begin(net, X=X, y=y, **kwargs)

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **kwargs: Any) -> None:
        """Pass the event on."""
        self.callback.on_train_end(net, X=X, y=y, **kwargs)

    def on_epoch_begin(self, net: Any, **kwargs: Any) -> None:
        """Pass the event on."""
        self.callback.on_epoch_begin(net, **kwargs)

    def on_epoch_end(self, net: Any, **kwargs: Any) -> None:
        """Pass the event on."""
        self.callback.on_epoch_end(net, **kwargs)

    def on_batch_begin(self, net: Any, **kwargs: Any) -> None:
        """Pass the event on."""
        self.callback.on_batch_begin(net, **kwargs)

    def on_batch_end(self, net: Any, **kwargs: Any) -> None:
        """Pass the event on."""
        self.callback.on_batch_end(net, **kwargs)

    def on_grad_computed(self, net: Any, named_parameters: Any, **kwargs: Any) -> None:
        """Pass the event on."""
        self.callback.on_grad_computed(net, named_parameters=named_parameters, **kwargs)


def on_ranks(callback: Callback) -> OnRanks:
    """Let a callback run on every rank instead of on the client.

    Parameters
    ----------
    callback : skorch.callbacks.Callback
        One that changes parameters or the optimizer in its batch hooks, or reads the net there. On a
        rank it finds the net as it is in that step.

    Returns
    -------
    OnRanks
        To be given to the net in place of the callback.

    Raises
    ------
    TypeError
        If it is no callback; a class is none.

    Examples
    --------
    >>> from skorch.callbacks import Callback
    >>> class ClampWeights(Callback):
    ...     def on_batch_end(self, net, **kwargs):
    ...         for parameter in net.module_.parameters():
    ...             parameter.data.clamp_(-1, 1)
    >>> callbacks = [("clamp", on_ranks(ClampWeights()))]
    """
    if not isinstance(callback, Callback):
        raise TypeError(f"on_ranks needs a skorch.callbacks.Callback, an instance, got {callback!r}.")
    return OnRanks(callback)


def without_callbacks(net: NeuralNet) -> NeuralNet:
    """An uninitialised copy of a net without callbacks.

    A callback that holds more than its parameters after a while can no longer be cloned.
    """
    shown = object.__new__(type(net))
    vars(shown).update(vars(net), callbacks="disable")
    return clone(shown)


def runs_on_ranks(callback: Any) -> bool:
    """Whether a callback acts inside a step."""
    if isinstance(callback, OnRanks):
        return True
    if isinstance(callback, LRScheduler):
        return bool(callback.step_every == "batch")
    own = getattr(type(callback), "on_grad_computed", None)
    return own is not None and own is not Callback.on_grad_computed


def may_draw(callbacks: NamedCallbacks) -> bool:
    """Whether random numbers may be drawn in a hook: skorch's own callbacks on ranks draw none."""
    inner = [getattr(c, "callback", c) if isinstance(c, OnRanks) else c for _, c in callbacks]
    return not all(type(callback).__module__.startswith("skorch.") for callback in inner)


def rank_side(net: NeuralNet) -> NamedCallbacks:
    """The initialised callbacks of a net that run on the ranks."""
    return [(name, callback) for name, callback in net.callbacks_ if runs_on_ranks(callback)]


@contextmanager
def client_side_only(net: NeuralNet) -> Iterator[None]:
    """Take the callbacks that run on the ranks out of the net for the length of the block."""
    every = list(net.callbacks_)
    net.callbacks_ = [(name, callback) for name, callback in every if not runs_on_ranks(callback)]
    try:
        yield
    finally:
        held = dict(net.callbacks_)
        net.callbacks_ = [(name, held.get(name, callback)) for name, callback in every]


def replace(net: NeuralNet, callbacks: NamedCallbacks) -> None:
    """Put callbacks that come back from the ranks in the place of those of the same names."""
    new = dict(callbacks)
    net.callbacks_ = [(name, new.get(name, callback)) for name, callback in net.callbacks_]


def sets_parameters(net: NeuralNet) -> bool:
    """Whether a callback of skorch sets parameters when an epoch begins, maybe at random."""
    return any(isinstance(callback, ParamMapper) for _, callback in net.callbacks_)


def wants_predictions(net: NeuralNet) -> bool:
    """Whether a callback on the client scores the predictions of training batches."""
    return any(
        isinstance(callback, (EpochScoring, BatchScoring)) and callback.on_train and _caches(net, callback)
        for _, callback in net.callbacks_
    )


def _caches(net: NeuralNet, callback: Any) -> bool:
    """Whether a score uses the predictions of the steps; the net overrules the callback."""
    return bool(callback.use_caching if net.use_caching == "auto" else net.use_caching)


def set_input_shapes(net: NeuralNet, X: Any, y: Any) -> None:
    """Let the net take its shape from the data before anything is asked of its module."""
    for _, callback in net.callbacks_:
        if isinstance(callback, InputShapeSetter):
            callback.on_train_begin(net, X=X, y=y)


def files(net: NeuralNet) -> set[str]:
    """The paths that checkpoints of the net write to, before a number of the epoch is put in."""
    paths = set()
    for _, callback in net.callbacks_:
        if isinstance(callback, (Checkpoint, TrainEndCheckpoint)):
            names = [value for key, value in vars(callback).items() if key.startswith("f_")]
            paths |= {
                os.path.abspath(os.path.join(callback.dirname, callback.fn_prefix + name))
                for name in names
                if isinstance(name, str)
            }
    return paths


def check(net: NeuralNet, every: int | None) -> None:
    """Refuse callbacks that cannot do here what they do in one process.

    Raises
    ------
    ValueError
        If a callback would need the net of the middle of an epoch on the client, or steps a schedule
        by a loss that ranks do not share.
    """
    for name, callback in net.callbacks_:
        if isinstance(callback, BatchScoring) and callback.on_train and not _caches(net, callback):
            raise ValueError(
                f"The callback {name!r} scores training batches with use_caching=False: that needs the"
                " net of the middle of an epoch, which only the ranks have. Set use_caching=True."
            )
        if every != 0 and _plateau_by_batch(callback):
            raise ValueError(
                f"The callback {name!r} lowers the learning rate at a plateau of the batch loss, which"
                " ranks share only with sync_every='batch'. Use step_every='epoch'."
            )


def scores_without_cache(net: NeuralNet) -> list[str]:
    """The names of callbacks whose scores make the client predict."""
    return [
        name
        for name, callback in net.callbacks_
        if isinstance(callback, (BatchScoring, EpochScoring)) and not _caches(net, callback)
    ]


def check_caching(net: NeuralNet) -> None:
    """Refuse scores that would need the rows of a dask array on the client.

    Raises
    ------
    ValueError
        If a callback scores without the cached predictions.
    """
    for name in scores_without_cache(net):
        raise ValueError(
            f"The callback {name!r} scores with use_caching=False: that needs the rows on the client,"
            " and X is a dask array, whose rows stay on the workers. Set use_caching=True."
        )


def check_monitors(net: NeuralNet) -> None:
    """Refuse callbacks that wait for a score of validation rows where there are none.

    Raises
    ------
    ValueError
        If a callback monitors such a score.
    """
    scores = {"valid_loss", "valid_acc"}
    for _, callback in net.callbacks_:
        if isinstance(callback, (BatchScoring, EpochScoring, PassthroughScoring)) and not callback.on_train:
            scores.add(getattr(callback, "name_", callback.name))
    for name, callback in net.callbacks_:
        monitor = _monitored(callback)
        if monitor is not None and monitor.removesuffix("_best") in scores:
            raise ValueError(
                f"The callback {name!r} monitors {monitor!r}, a score of validation rows, and there are"
                f" none: train_split is {net.train_split}. The folds of a search are no validation rows"
                " of the net. Give the net a train_split, or let the callback monitor a score of the"
                " training rows, such as 'train_loss'."
            )


def _monitored(callback: Any) -> str | None:
    """The score in the history that a callback of skorch cannot do without."""
    waits = isinstance(callback, (EarlyStopping, Checkpoint))
    if isinstance(callback, LRScheduler):
        waits = callback.step_every == "epoch" and _is_plateau(callback)
    return callback.monitor if waits and isinstance(callback.monitor, str) else None


def _plateau_by_batch(callback: Any) -> bool:
    return isinstance(callback, LRScheduler) and callback.step_every == "batch" and _is_plateau(callback)


def _is_plateau(callback: LRScheduler) -> bool:
    policy = callback._get_policy_cls()
    return isinstance(policy, type) and issubclass(policy, ReduceLROnPlateau)
