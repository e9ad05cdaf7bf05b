"""By what a loss divides: the weight of a rank's contribution."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from skorch import NeuralNet, NeuralNetClassifier
from torch import nn

from daskps._spec import Reduction

_SKORCH_LOSSES = (NeuralNet.get_loss, NeuralNetClassifier.get_loss)
_FORWARDS = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def reduction(net: NeuralNet) -> Reduction:
    """'sum' for a criterion that adds over its rows, else 'mean'."""
    return "sum" if getattr(net.criterion_, "reduction", "mean") == "sum" else "mean"


def divisor(
    net: NeuralNet,
    loss_owner: type[NeuralNet],
    y_true: torch.Tensor,
    weights: torch.Tensor | None = None,
) -> float:
    """What the net's loss of these targets divides by.

    Parameters
    ----------
    net : NeuralNet
        With an initialised ``criterion_``.
    loss_owner : type
        The user's net class, to see whether ``get_loss`` is skorch's own.
    y_true : torch.Tensor
        The targets of one batch.
    weights : torch.Tensor of shape (n_rows,), optional
        Sample weights.

    Returns
    -------
    float
        For CrossEntropyLoss and NLLLoss of class indices, the summed class weights of the targets
        that are not ``ignore_index``. For any other loss the number of rows. Sample weights multiply
        either.
    """
    shares = _shares(net.criterion_, y_true) if _counts_targets(net, loss_owner, y_true) else None
    if weights is None:
        return float(len(y_true)) if shares is None else float(shares.sum())
    if shares is None:
        return float(weights.sum())
    return float((weights * shares.double().reshape(len(weights), -1).mean(1)).sum())


def _counts_targets(net: NeuralNet, loss_owner: type[NeuralNet], y_true: torch.Tensor) -> bool:
    """Whether the loss divides by the class weights of its targets; with probabilities by rows."""
    own_loss = loss_owner.get_loss not in _SKORCH_LOSSES
    known = getattr(type(net.criterion_), "forward", None) in _FORWARDS
    return known and not own_loss and not y_true.is_floating_point()


def _shares(criterion: Any, y_true: torch.Tensor) -> torch.Tensor:
    """The class weight of every target, 0 where it is ignored."""
    counted = y_true != criterion.ignore_index
    if criterion.weight is None:
        return counted
    return criterion.weight[y_true.where(counted, 0)] * counted


@contextmanager
def unreduced(net: NeuralNet) -> Iterator[Reduction]:
    """Let the criterion return the loss of every row for the length of the block.

    Yields
    ------
    str
        Its own reduction.
    """
    criterion: Any = net.criterion_
    own = criterion.reduction
    criterion.reduction = "none"
    try:
        yield own
    finally:
        criterion.reduction = own
