"""Probabilities from a fitted net: here, or lazily where the chunks of a dask array are."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import torch
from skorch import NeuralNetBinaryClassifier, NeuralNetClassifier
from torch.utils.data import DataLoader

from daskps._casting import InputCast
from daskps._freezing import freeze, thaw
from daskps._late import Late


def probabilities(net: NeuralNetClassifier, n_classes: int, X: Any) -> np.ndarray:
    """(n_samples, n_classes) probabilities, whatever the net's criterion."""
    result = _quiet(net).predict_proba(InputCast.of(net.module_).array(X))
    if np.isnan(result).any():
        warnings.warn("The net's output is NaN: its training diverged, or X has such values.", stacklevel=3)
    elif not np.allclose(result.sum(axis=1), 1, atol=0.01):
        warnings.warn(
            f"Rows of predict_proba do not sum to 1: with predict_nonlinearity={net.predict_nonlinearity!r}"
            f" and {type(net.criterion_).__name__}, skorch does not know how to make probabilities of what"
            " the module returns. Pass the net a function that does.",
            stacklevel=3,
        )
    if result.shape[1] > n_classes:  # outputs that no label of fit belongs to
        result = result[:, :n_classes]
        result = result / result.sum(axis=1, keepdims=True)
    return result


def _quiet(net: NeuralNetClassifier) -> NeuralNetClassifier:
    """The same net, whose loader leaves torch's generator alone: another thread may have seeded it."""
    quiet = object.__new__(type(net))
    vars(quiet).update(vars(net))
    if net.iterator_valid is DataLoader:
        vars(quiet).setdefault("iterator_valid__generator", torch.Generator())
    return quiet


def lazy_probabilities(net: NeuralNetClassifier, n_classes: int, X: Any) -> Any:
    """The same as a dask array, with the chunks of X along the rows."""
    from dask import delayed

    # One task makes the predictor, and Dask brings it once to every worker, not once to every chunk.
    dtype = _numpy_dtype(net)
    predictor = delayed(Late(__name__, "Predictor"), pure=True)(freeze(net), n_classes, dtype)
    return X.map_blocks(
        Late(__name__, "_predict_block"),
        predictor,
        drop_axis=list(range(1, X.ndim)),
        new_axis=[1],
        chunks=(X.chunks[0], (n_classes,)),
        meta=np.empty((0, n_classes), dtype),
    )


def lazy_labels(net: NeuralNetClassifier, probabilities: Any, classes: np.ndarray) -> Any:
    """The same as `labels`, of a dask array."""
    return probabilities.map_blocks(
        Late(__name__, "_label_block"),
        classes,
        _threshold(net),
        drop_axis=[1],
        meta=np.empty(0, classes.dtype),
    )


def labels(net: NeuralNetClassifier, probabilities: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """The most probable label of every row; of two classes the one that the net's threshold decides on."""
    return _label_block(probabilities, classes, _threshold(net))


class Predictor:
    """A frozen net that thaws where it is used for the first time."""

    def __init__(self, frozen: bytes, n_classes: int, dtype: np.dtype) -> None:
        self._frozen = frozen
        self._n_classes = n_classes
        self._dtype = dtype
        self._net: NeuralNetClassifier | None = None
        self._lock = threading.Lock()

    def __call__(self, X: np.ndarray) -> np.ndarray:
        """Predict one chunk, which may be empty."""
        if not len(X):
            return np.empty((0, self._n_classes), self._dtype)
        with self._lock:
            self._net = self._net or thaw(self._frozen)
        return probabilities(self._net, self._n_classes, X)

    def __reduce__(self) -> tuple:
        return Predictor, (self._frozen, self._n_classes, self._dtype)

    def __sizeof__(self) -> int:
        return len(self._frozen)


def _predict_block(X: np.ndarray, predictor: Predictor) -> np.ndarray:
    return predictor(np.asarray(X))


def _threshold(net: NeuralNetClassifier) -> float | None:
    return net.threshold if isinstance(net, NeuralNetBinaryClassifier) else None


def _label_block(probabilities: np.ndarray, classes: np.ndarray, threshold: float | None) -> np.ndarray:
    if threshold is None:
        return classes[probabilities.argmax(axis=1)]
    return classes[(probabilities[:, 1] > threshold).astype(int)]


def _numpy_dtype(net: NeuralNetClassifier) -> np.dtype:
    dtype = InputCast.of(net.module_).dtype or torch.float32
    return np.dtype(str(dtype).removeprefix("torch."))
