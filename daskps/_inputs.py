"""What a user may pass as X and y, and what the rest of daskps gets: every fault is named here."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from distributed import Client
from sklearn.base import BaseEstimator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    check_consistent_length,
    column_or_1d,
    validate_data,
)

from daskps._weights import sample_weights

# Everything that Dask calls a collection has this method.
_DASK = "__dask_graph__"


@dataclass(frozen=True)
class TrainingData:
    """Checked input of ``fit``.

    Attributes
    ----------
    X : ndarray or dask.array.Array, (n_samples, ...)
    y : ndarray of int64, (n_samples,)
        Positions in ``classes``.
    classes : ndarray, (n_classes,)
        The sorted labels.
    weights : ndarray, (n_samples,), or None
        What every row counts; None if all count the same.
    """

    X: Any
    y: np.ndarray
    classes: np.ndarray
    weights: np.ndarray | None = None


def is_dask(values: Any) -> bool:
    """Whether this is a dask collection."""
    return hasattr(values, _DASK)


def check_fit(
    estimator: BaseEstimator, X: Any, y: Any, classes: Any, sample_weight: Any, client: Client | None
) -> TrainingData:
    """Check what was passed to ``fit`` and encode the labels.

    The client computes what has to be known of dask collections: y, and unknown chunk sizes of X.
    ``classes`` are all labels, if they are known; then X has to have the features of an earlier fit.

    Raises
    ------
    ValueError
        If X is empty, is no numbers, or has NaN or infinity; if y is missing, of another length, no
        classification target, or of one class only.
    """
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    with client.as_current() if client is not None else nullcontext():
        y, sample_weight = _local(y), _local(sample_weight)
        X = _check_dask(X) if is_dask(X) else _local(X)
    if is_dask(X):
        estimator.n_features_in_ = X.shape[1]
    else:
        goes_on = classes is not None and hasattr(estimator, "n_features_in_")
        X = validate_data(estimator, X, **_ARRAY, reset=not goes_on)
    y = column_or_1d(y, warn=True)
    check_classification_targets(y)
    check_consistent_length(X, y)
    if sample_weight is not None:
        sample_weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
    labels = np.unique(y if classes is None else classes)
    weights = sample_weights(sample_weight, estimator.class_weight, y)
    counted = y if weights is None else y[weights > 0]
    _refuse_one_class(estimator, np.unique(counted) if classes is None else labels)
    return TrainingData(X, encode(y, labels), labels, weights)


def _refuse_one_class(estimator: BaseEstimator, labels: np.ndarray) -> None:
    if len(labels) < 2:
        raise ValueError(
            f"{type(estimator).__name__} needs samples of at least 2 classes in the data, but the"
            f" data contains only one class: {labels.tolist()}."
        )


def encode(y: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The position of every label in the sorted ``labels``.

    Raises
    ------
    ValueError
        If one is not among them.
    """
    unknown = np.setdiff1d(y, labels)
    if len(unknown):
        raise ValueError(f"y has the labels {unknown.tolist()}, known are {labels.tolist()}.")
    return np.searchsorted(labels, y).astype(np.int64)


def check_predict(estimator: BaseEstimator, X: Any) -> np.ndarray:
    """Check what was passed to ``predict``; a dask array is computed."""
    X = X.compute() if is_dask(X) else _local(X)
    return validate_data(estimator, X, **_ARRAY, reset=False)


_ARRAY: dict[str, Any] = {"dtype": "numeric", "allow_nd": True}


def _local(values: Any) -> Any:
    """Dask collections and tensors as numpy arrays; anything else as it is."""
    if is_dask(values):
        values = values.compute()
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return values


def _check_dask(X: Any) -> Any:
    """A dask array cut along its first axis only, with known chunk sizes.

    Where they were not known, it is computed, on the cluster.
    """
    if not hasattr(X, "chunks"):
        raise TypeError(f"X must be an array, of numpy, torch or dask, got {type(X).__name__}.")
    if X.ndim < 2:
        raise ValueError(f"Expected X to have at least 2 dimensions, got the shape {X.shape}.")
    if X.dtype.kind not in "fiub":
        raise ValueError(f"X has the dtype {X.dtype}, numbers are needed.")
    if np.isnan(X.shape[0]):
        X = X.persist().compute_chunk_sizes()
    return X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
