"""What a user may pass as X and y, and what the rest of daskps gets: every fault is named here."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from dask.delayed import Delayed
from distributed import Client
from sklearn.base import BaseEstimator
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    _check_sample_weight,
    check_array,
    check_consistent_length,
    column_or_1d,
    validate_data,
)
from torch.utils.data import Dataset, IterableDataset

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


def is_frame(values: Any) -> bool:
    """Whether this is a dask data frame or series."""
    return is_dask(values) and not isinstance(values, Delayed) and hasattr(values, "to_dask_array")


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
    goes_on = classes is not None and hasattr(estimator, "n_features_in_")
    with client.as_current() if client is not None else nullcontext():
        y, sample_weight = local(y), local(sample_weight)
        X = check_X(estimator, X, reset=not goes_on)
    y = _check_y(estimator, labels_of(X, y))
    _check_lengths(X, y)
    if sample_weight is not None:
        sample_weight = _check_sample_weight(sample_weight, y, ensure_non_negative=True)
    labels = np.unique(y if classes is None else classes)
    weights = sample_weights(sample_weight, estimator.class_weight, y)
    counted = y if weights is None else y[weights > 0]
    _refuse_one_class(estimator, np.unique(counted) if classes is None else labels)
    return TrainingData(X, encode(y, labels), labels, weights)


def check_X(estimator: BaseEstimator, X: Any, reset: bool) -> Any:
    """X as numpy array, dask array, dict of numpy arrays or torch dataset.

    With ``reset`` its features are noted on the estimator, else they are compared with those.

    Raises
    ------
    TypeError, ValueError
        If it is none of these, or not what the estimator was fitted on.
    """
    if isinstance(X, Dataset):
        _check_dataset(X)
        return X
    if isinstance(X, dict) and not hasattr(X, "shape"):  # some sparse matrices are dicts too
        if not X:
            raise ValueError("X is a dict without any array.")
        return {name: _check_part(name, part) for name, part in X.items()}
    if not is_dask(X):
        return _check_array(estimator, local(X), reset)
    if not isinstance(X, Delayed) and getattr(X, "ndim", 0) > 1:  # a Delayed has every attribute
        _check_features(estimator, X, reset)
    if is_frame(X):
        X = X.to_dask_array(lengths=True) if reset else X.to_dask_array()
    return _check_dask(X, reset)


def _check_features(estimator: BaseEstimator, X: Any, reset: bool) -> None:
    """Note number and names of the features of a dask collection, or compare them."""
    seen = X.head(1, npartitions=-1) if is_frame(X) else X
    _check_feature_names(estimator, seen, reset=reset)
    _check_n_features(estimator, seen, reset=reset)


def _check_array(estimator: BaseEstimator, X: Any, reset: bool) -> np.ndarray:
    try:
        return _plain(validate_data(estimator, X, dtype="numeric", allow_nd=True, reset=reset))
    except ValueError as error:
        dtype = getattr(X, "dtype", None)
        if dtype is None or dtype.kind not in "OUS":
            raise
        raise ValueError(f"X has the dtype {dtype}, numbers are needed: {error}") from error


def _check_y(estimator: BaseEstimator, y: Any) -> np.ndarray:
    if y is None:
        raise ValueError(f"{type(estimator).__name__} requires y to be passed, but the target y is None.")
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    _check_one_kind(y)
    check_classification_targets(y)
    return y


def _check_part(name: Any, part: Any) -> np.ndarray:
    return _plain(check_array(local(part), dtype="numeric", allow_nd=True, input_name=f"X[{name!r}]"))


def _plain(X: np.ndarray) -> np.ndarray:
    """The rows as torch takes them: in native byte order, at most doubles, no negative strides."""
    if X.dtype.kind not in "fiub":
        X = _numbers(X)
    too_long = X.dtype.kind == "f" and X.dtype.itemsize > 8
    X = X.astype(np.float64 if too_long else X.dtype.newbyteorder("="), copy=False)
    return X.copy() if min(X.strides) < 0 else X


def _numbers(X: np.ndarray) -> np.ndarray:
    """What scikit-learn lets pass as objects: columns of several kinds, integers that no dtype can hold."""
    try:
        numbers = X.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"X has the dtype {X.dtype}, numbers are needed: {error}") from error
    assert_all_finite(numbers, input_name="X")
    return numbers


def _check_lengths(X: Any, y: np.ndarray) -> None:
    parts = X.values() if isinstance(X, dict) else [X]
    for part in parts:
        check_consistent_length(part, y) if not isinstance(X, Dataset) else None
    if isinstance(X, Dataset) and len(X) != len(y):  # type: ignore[arg-type]
        raise ValueError(f"The dataset X has {len(X)} items, y has {len(y)} labels.")  # type: ignore[arg-type]


def _check_dataset(dataset: Any) -> None:
    """Refuse a torch dataset whose rows cannot be dealt to workers."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(f"X is a {name} without a length or rows by number: pass a map-style Dataset.")
    if not len(dataset):
        raise ValueError(f"X is a {name} with 0 items: at least 1 is needed.")
    item = dataset[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        what = f"{len(item)} part(s)" if isinstance(item, (tuple, list)) else f"a {type(item).__name__}"
        raise ValueError(f"Items of the dataset X have to be pairs (X, y), those of {name} are {what}.")


def labels_of(X: Any, y: Any) -> Any:
    """y, or where there is none what a map-style dataset brings along."""
    if y is not None or not isinstance(X, Dataset):
        return y
    n_rows = len(X)  # type: ignore[arg-type]
    return np.array([np.asarray(X[row][1]).item() for row in range(n_rows)])


def _check_one_kind(y: np.ndarray) -> None:
    if y.dtype.kind != "O":
        return
    kinds = {type(label): label for label in y}
    try:
        sorted(kinds.values())
    except TypeError as error:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(  # in the words of scikit-learn, which does not say which kinds
            f"Unknown label type: unknown. Labels have to be of one kind, those of y are {names}."
        ) from error


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


def local(values: Any) -> Any:
    """Dask collections and tensors as numpy arrays; anything else as it is."""
    if is_dask(values):
        values = values.compute()
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return values


def _check_dask(X: Any, known_lengths: bool) -> Any:
    """A dask array cut along its first axis only.

    Where the lengths of chunks have to be known and are not, it is computed, on the cluster.
    """
    if isinstance(X, Delayed) or not hasattr(X, "chunks"):
        raise TypeError(
            f"X must be an array or a data frame, of numpy, torch, pandas or dask, a dict of arrays or a"
            f" torch Dataset, got {type(X).__name__}."
        )
    if X.ndim < 2:
        raise ValueError(f"Expected X to have at least 2 dimensions, got the shape {X.shape}.")
    if X.dtype.kind not in "fiub":
        raise ValueError(f"X has the dtype {X.dtype}, numbers are needed.")
    if known_lengths and np.isnan(X.shape[0]):
        X = X.persist().compute_chunk_sizes()
    if X.shape[0] == 0:
        raise ValueError(f"X has 0 samples, its shape is {X.shape}: at least 1 is needed.")
    return X.rechunk(dict.fromkeys(range(1, X.ndim), -1))
