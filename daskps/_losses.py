"""By what a loss divides: the weight of a rank's contribution."""

from __future__ import annotations

import torch
from skorch import NeuralNet, NeuralNetClassifier
from torch import nn

from daskps._spec import Reduction

_SKORCH_LOSSES = (NeuralNet.get_loss, NeuralNetClassifier.get_loss)
_FORWARDS = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def reduction(net: NeuralNet) -> Reduction:
    """'sum' for a criterion that adds over its rows, else 'mean'."""
    return "sum" if getattr(net.criterion_, "reduction", "mean") == "sum" else "mean"


def divisor(net: NeuralNet, loss_owner: type[NeuralNet], y_true: torch.Tensor) -> float:
    """What the net's loss of these targets divides by.

    Parameters
    ----------
    net : NeuralNet
        With an initialised ``criterion_``.
    loss_owner : type
        The user's net class, to see whether ``get_loss`` is skorch's own.
    y_true : torch.Tensor
        The targets of one batch.

    Returns
    -------
    float
        For CrossEntropyLoss and NLLLoss of class indices, the summed class weights of the targets
        that are not ``ignore_index``. For any other loss the number of rows.
    """
    criterion = net.criterion_
    own_loss = loss_owner.get_loss not in _SKORCH_LOSSES
    if own_loss or getattr(type(criterion), "forward", None) not in _FORWARDS:
        return float(len(y_true))
    if y_true.is_floating_point():  # class probabilities: the mean is over rows
        return float(len(y_true))
    counted = y_true[y_true != criterion.ignore_index]
    if criterion.weight is None:
        return float(counted.numel())
    return float(criterion.weight[counted].sum())
