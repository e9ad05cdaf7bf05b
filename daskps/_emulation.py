"""A net that waits where others compute, so that many ranks can be measured on few cores.

What it exchanges is real: it has as many parameters as it is told, and a gradient for each.
"""

from __future__ import annotations

from time import sleep
from typing import Any

import torch
from torch import Tensor, nn


class _Gradient(torch.autograd.Function):
    """Zeros as logits, and a gradient for every parameter, for as little computing as possible."""

    @staticmethod
    def forward(ctx: Any, parameters: Tensor, n_rows: int, n_classes: int) -> Tensor:
        ctx.like = parameters
        return parameters.new_zeros(n_rows, n_classes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.zeros_like(ctx.like), None, None


class Waiting(nn.Module):
    """Waits ``c0 + c1 * rows`` seconds in its forward pass.

    Parameters
    ----------
    n_parameters : int
    n_classes : int
    c0, c1 : float
        Seconds: in any case, and for each row.
    """

    def __init__(self, n_parameters: int, n_classes: int, c0: float, c1: float) -> None:
        super().__init__()
        self.parameters_ = nn.Parameter(torch.zeros(n_parameters))
        self.n_classes = n_classes
        self.c0 = c0
        self.c1 = c1

    def forward(self, X: Tensor) -> Tensor:
        """Wait, and return zeros."""
        sleep(self.c0 + self.c1 * len(X))
        return _Gradient.apply(self.parameters_, len(X), self.n_classes)
