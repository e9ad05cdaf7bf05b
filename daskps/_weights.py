"""Sample weights: what the user gives, and what a batch does with them."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np
import torch
from sklearn.utils.class_weight import compute_sample_weight
from torch.utils.data import Dataset


def sample_weights(given: np.ndarray | None, class_weight: Any, y: np.ndarray) -> np.ndarray | None:
    """The weight of every row, or None where all rows weigh the same.

    Constant weights change no weighted mean, but they would change its last bits.

    Parameters
    ----------
    given : ndarray of shape (n_samples,) or None
    class_weight : None, 'balanced' or dict
    y : ndarray of shape (n_samples,)
        Original labels.

    Raises
    ------
    ValueError
        If a class has a weight that is none, or no row has any.
    """
    weights = np.ones(len(y)) if given is None else given
    if class_weight is not None:
        weights = weights * compute_sample_weight(_checked(class_weight), y)
    if not weights.any():
        raise ValueError(f"No row counts: with class_weight={class_weight!r} every row has the weight 0.")
    return None if (weights == weights[0]).all() else weights


def _checked(class_weight: Any) -> Any:
    if isinstance(class_weight, str) and class_weight == "balanced":
        return class_weight
    if not isinstance(class_weight, dict):
        raise ValueError(
            "The 'class_weight' parameter must be None, 'balanced' or a dict, got"
            f" {class_weight!r} instead."
        )
    if not all(_is_weight(weight) for weight in class_weight.values()):
        raise ValueError(
            "The 'class_weight' parameter must hold finite numbers that are not negative, got"
            f" {class_weight!r} instead."
        )
    return class_weight


def _is_weight(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < np.inf


class WeightedRows(Dataset):
    """A dataset whose targets come with their weights, as (X, (y, weight))."""

    def __init__(self, dataset: Any, weights: np.ndarray) -> None:
        self.dataset = dataset
        self.weights = weights

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: Any) -> tuple:
        X, y = self.dataset[index]
        return X, (y, self.weights[index])


def weighted_loss(losses: torch.Tensor, weights: torch.Tensor, total: float) -> torch.Tensor:
    """The weighted sum of the rows' losses over ``total``; 0 if that is 0."""
    rows = losses.reshape(len(losses), -1).mean(1)
    return (rows * weights.to(rows.dtype)).sum() / (total or 1.0)
