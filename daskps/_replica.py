"""A rank's copy of the user's net, which meets the other ranks where its gradients are ready."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import cloudpickle
import torch
from skorch import NeuralNet
from skorch.utils import TeeGenerator

from daskps import _hooks, _losses, _random, _state
from daskps._casting import InputCast
from daskps._spec import Rules
from daskps._sync import Alone, Sync
from daskps._weights import weighted_loss


class Opening(NamedTuple):
    """What a rank needs to build its replica. A tuple, so that Dask sees its size."""

    net: bytes
    """The uninitialised net, without callbacks, silent."""
    state: bytes
    every: int | None
    """Steps between two averages; 0 for gradients at every step, None for one average an epoch."""
    callbacks: bytes
    """The callbacks that run on ranks; empty if there are none."""
    history: bytes
    """What these callbacks find in the net's history."""
    rules: Rules


class _Synchronised:
    """What a replica does that the user's net does not. Goes in front of the user's class.

    The meeting is in the net's ``on_grad_computed`` method, which skorch calls before all callbacks:
    these see the combined gradient.
    """

    sync_: Sync
    stream_: _random.RankStream | None = None
    cast_: InputCast
    rounds_: int
    weighted_: bool
    weight_: float
    loss_: torch.Tensor | None
    counts_: bool
    diverged_: bool
    """Whether a loss or a gradient of this rank was not finite."""
    callbacks_: list
    common_: _random.Stream | None
    draws_: bool

    def infer(self, x: Any, **fit_params: Any) -> Any:
        return super().infer(self.cast_.tensor(x), **fit_params)  # type: ignore[misc]

    def get_loss(self, y_pred: Any, y_true: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not kwargs.get("training"):
            return super().get_loss(y_pred, y_true, *args, **kwargs)  # type: ignore[misc]
        if self.weighted_:
            loss = self._weighted_loss(y_pred, *y_true, **kwargs)
        else:
            self.weight_ += _losses.divisor(self, owner(self), y_true)
            loss = super().get_loss(y_pred, y_true, *args, **kwargs)  # type: ignore[misc]
        self.loss_ = loss
        if self.counts_ and self.one_backward_:
            self.sync_.backward_follows(lambda: self.weight_)
        return loss

    def train_step_single(self, batch: Any, **fit_params: Any) -> dict:
        step = super().train_step_single(batch, **fit_params)  # type: ignore[misc]
        if self.loss_ is None:  # computed without get_loss
            self.weight_ = float(len(batch[0]))
        # What the optimizer's closure returns, whether get_loss had made it or not.
        self.loss_ = step["loss"]
        return step

    def _weighted_loss(
        self, y_pred: Any, y_true: torch.Tensor, weights: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """The net's own loss of every row, and their weighted mean."""
        total = _losses.divisor(self, owner(self), y_true, weights)
        self.weight_ += total
        with _losses.unreduced(self) as reduction:
            losses = super().get_loss(y_pred, y_true, **kwargs)  # type: ignore[misc]
        return weighted_loss(losses, weights, total if reduction == "mean" else 1.0)

    def on_grad_computed(self, net: Any, named_parameters: Any, **kwargs: Any) -> None:
        self.meet(kwargs.get("batch"))
        super().on_grad_computed(net, named_parameters, **kwargs)  # type: ignore[misc]

    def notify(self, method_name: str, **kwargs: Any) -> None:
        getattr(self, method_name)(self, **kwargs)
        self.call_hooks(method_name, **kwargs)

    def call_hooks(self, name: str, **kwargs: Any) -> None:
        """Call a hook of the callbacks, which draw the same random numbers on every rank.

        Not so for a validation batch, which only one rank has.
        """
        common = self.common_ if kwargs.get("training") is not False else None
        with nullcontext() if common is None else common.drawn():
            for _, callback in self.callbacks_:
                getattr(callback, name)(self, **kwargs)

    def meet(self, batch: Any = None) -> None:
        """Push this rank's gradients and take the combined ones."""
        loss, weight = self.loss_, self.weight_
        if loss is None and batch is not None:  # a train_step that computes its loss itself
            weight = float(len(batch[0]))
        if not self.counts_:
            weight = 0.0
        own = float("nan") if loss is None else loss.item()
        with nullcontext() if self.stream_ is None else self.stream_.paused():
            combined = self.sync_.gradients(weight, own)
        bad_loss = weight > 0 and loss is not None and not math.isfinite(own)
        self.diverged_ = self.diverged_ or bad_loss or self.sync_.diverged
        self.rounds_ += 1
        self.step_weight_ = weight
        if loss is not None:
            # In place: what the optimizer's closure returns is this tensor, and a line search
            # that saw each rank's own loss would make the ranks call it unequally often.
            loss.data.fill_(combined)
        self.last_loss_ = combined
        self.weight_, self.loss_ = 0.0, None

    @property
    def one_backward_(self) -> bool:
        """Whether a step is skorch's own: a loss, its backward, and then the meeting."""
        kind: Any = owner(self)
        own = kind.train_step_single is not NeuralNet.train_step_single
        return not own and not self.steps_its_own_way_

    @property
    def steps_its_own_way_(self) -> bool:
        """Whether the user's ``train_step`` decides how often ranks meet in a step."""
        return owner(self).train_step is not NeuralNet.train_step  # type: ignore[attr-defined]

    def shadow_step(self, batch: Any) -> float:
        """A step in the user's own way whose rows count nothing: to meet as often as the others do."""
        self.counts_ = False
        try:
            self.train_step(batch)  # type: ignore[attr-defined]
        finally:
            self.counts_ = True
        return self.last_loss_

    def idle_step(self) -> float:
        """A step in which this rank has no rows: its gradient is that of the others."""
        losses: list[float] = []

        def closure() -> float:
            self._zero_grad_optimizer()  # type: ignore[attr-defined]
            # Not only the meeting: what clips the combined gradient must clip it here too.
            named = TeeGenerator(self.get_all_learnable_params())  # type: ignore[attr-defined]
            self.notify("on_grad_computed", named_parameters=named, training=True)
            losses.append(self.last_loss_)
            return self.last_loss_

        self._step_optimizer(closure)  # type: ignore[attr-defined]
        return losses[0]  # that of the step, like skorch's: later ones are the line search's


def build(opening: Opening) -> NeuralNet:
    """A replica of the client's net.

    Built with the net's own ``initialize`` methods and then loaded: a pickle of the fitted net would
    tie its optimizer to other tensors.
    """
    net = cloudpickle.loads(opening.net)
    net.__class__ = type("Replica", (_Synchronised, type(net)), {})
    net.sync_, net.rounds_, net.weighted_, net.counts_ = Alone(net), 0, False, True
    net.weight_, net.step_weight_, net.loss_, net.last_loss_ = 0.0, 0.0, None, float("nan")
    net.draws_, net.common_, net.diverged_ = False, None, False
    with _random.LOCK, _random.seeded(0):
        net.initialize()
    net.cast_ = InputCast.of(net.module_)
    _state.load(net, opening.state)
    if opening.callbacks:
        net.callbacks_ = _state.load_callbacks(net, opening.callbacks)
        net.draws_ = _hooks.may_draw(net.callbacks_)
        net.history_ = cloudpickle.loads(opening.history)
    return net


def open_with(net: NeuralNet, every: int | None, callbacks: bytes, rules: Rules) -> Opening:
    """What replicas of a net are built from."""
    bare = _hooks.without_callbacks(net).set_params(verbose=0, train_split=None)
    history = cloudpickle.dumps(_ended_epochs(net)) if callbacks else b""
    return Opening(cloudpickle.dumps(bare), _state.dump(net), every, callbacks, history, rules)


def _ended_epochs(net: NeuralNet) -> Any:
    """The history without a last row that the client has begun and the ranks have yet to begin."""
    history = type(net.history)()
    ended = len(net.history) and "train_batch_count" in net.history[-1]
    history.extend(net.history if ended else net.history[:-1])
    return history


def owner(replica: Any) -> type:
    """The user's class behind a replica."""
    return type(replica).__mro__[2]
