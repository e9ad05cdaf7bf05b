"""On which side a callback runs.

A callback runs on one side with all its hooks: on the client, or on every rank. On the ranks run those
that act inside a step, where only the replicas are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from skorch import NeuralNet
from skorch.callbacks import BatchScoring, Callback, EpochScoring, LRScheduler

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

    Examples
    --------
    >>> from skorch.callbacks import Callback
    >>> class ClampWeights(Callback):
    ...     def on_batch_end(self, net, **kwargs):
    ...         for parameter in net.module_.parameters():
    ...             parameter.data.clamp_(-1, 1)
    >>> callbacks = [("clamp", on_ranks(ClampWeights()))]
    """
    return OnRanks(callback)


def runs_on_ranks(callback: Any) -> bool:
    """Whether a callback acts inside a step."""
    if isinstance(callback, OnRanks):
        return True
    if isinstance(callback, LRScheduler):
        return bool(callback.step_every == "batch")
    own = getattr(type(callback), "on_grad_computed", None)
    return own is not None and own is not Callback.on_grad_computed


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


def wants_predictions(net: NeuralNet) -> bool:
    """Whether a callback on the client scores the predictions of training batches."""
    return any(
        isinstance(callback, (EpochScoring, BatchScoring)) and callback.on_train and callback.use_caching
        for _, callback in net.callbacks_
    )


def check(net: NeuralNet, every: int | None) -> None:
    """Refuse callbacks that cannot do here what they do in one process.

    Raises
    ------
    ValueError
        If a callback would need the net of the middle of an epoch on the client, or steps a schedule
        by a loss that ranks do not share.
    """
    for name, callback in net.callbacks_:
        if isinstance(callback, BatchScoring) and callback.on_train and not callback.use_caching:
            raise ValueError(
                f"The callback {name!r} scores training batches with use_caching=False: that needs the"
                " net of the middle of an epoch, which only the ranks have. Set use_caching=True."
            )
        if every != 0 and _plateau_by_batch(callback):
            raise ValueError(
                f"The callback {name!r} lowers the learning rate at a plateau of the batch loss, which"
                " ranks share only with sync_every='batch'. Use step_every='epoch'."
            )


def _plateau_by_batch(callback: Any) -> bool:
    if not isinstance(callback, LRScheduler) or callback.step_every != "batch":
        return False
    policy = callback.policy if isinstance(callback.policy, str) else callback.policy.__name__
    return policy == "ReduceLROnPlateau"
