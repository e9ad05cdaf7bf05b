"""From the arguments of a fit to a job: the client's net, the rows and the seed, all checked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from skorch import NeuralNetClassifier
from torch.utils.data import Dataset, default_collate

from daskps import _hooks, _inputs, _loading, _master, _random
from daskps._casting import InputCast
from daskps._inputs import TrainingData
from daskps._sources import ArraySource, DaskSource, Source
from daskps._training import Job
from daskps.modules import default_net, input_statistics


@dataclass(frozen=True)
class Start:
    """What a fit starts from.

    Attributes
    ----------
    net : NeuralNetClassifier or None
        The user's net, or the net of an earlier fit; None for a built-in one.
    goes_on : bool
        Whether to start from the state of an initialised net instead of from new weights.
    seed : int or None
        Of everything random; None leaves it to torch's generator.
    changes : dict
        Parameters of the net to be set before it goes on.
    """

    net: NeuralNetClassifier | None
    goes_on: bool
    seed: int | None
    changes: dict[str, Any] = field(default_factory=dict)


def prepare(start: Start, data: TrainingData, every: int | None) -> Job:
    """Make the client's net and cut off the validation rows.

    Parameters
    ----------
    start : Start
    data : TrainingData
    every : int or None
        Steps between two averages; 0 for gradients at every step, None for one average an epoch.

    Raises
    ------
    ValueError, TypeError
        If the net, the data and ``every`` do not go together.
    """
    net = _net(start, data)
    with _hooks.client_side_only(net):  # as in skorch before the split: a callback may set parameters
        net.notify("on_train_begin", X=data.X, y=data.y)
    seed = int(torch.randint(2**31 - 1, ())) if start.seed is None else start.seed
    source = _source(net, data)
    _master.check(net, _two_rows(data.X), data, len(source.dataset_train), every)
    if _inputs.is_dask(data.X):
        _hooks.check_caching(net)
    if source.dataset_valid is None:
        _hooks.check_monitors(net)
    return Job(net, source, every, seed)


def _net(start: Start, data: TrainingData) -> NeuralNetClassifier:
    if start.goes_on and start.net is not None:
        net = _master.go_on(start.net)
        with _random.LOCK, _random.seeded(start.seed):
            return net.set_params(**start.changes)
    given = start.net if start.net is not None else _default_net(data)
    with _random.LOCK, _random.seeded(start.seed):
        net = _master.build(given)
        _hooks.set_input_shapes(net, data.X, data.y)
    return net


def _default_net(data: TrainingData) -> NeuralNetClassifier:
    if not hasattr(data.X, "ndim"):
        raise ValueError(f"net=None makes a net for one array, X is a {type(data.X).__name__}: pass a net.")
    mean, std = input_statistics(data.X, data.weights)
    wide = data.X.ndim == 2 and data.X.dtype.itemsize == 8
    dtype = torch.float64 if wide else torch.float32
    return default_net(data.X.shape[1:], len(data.classes), dtype=dtype, mean=mean, std=std)


def _source(net: NeuralNetClassifier, data: TrainingData) -> Source:
    data = replace(data, y=data.y.astype(_master.target_dtype(net)))
    net.check_data(data.X, data.y)
    if isinstance(data.X, np.ndarray):
        _loading.check_dataset(net, data.X[:2], data.y[:2])
    try:
        if _inputs.is_dask(data.X):
            return DaskSource(net, data)
        cast = InputCast.of(net.module_)
        predicts = isinstance(data.X, np.ndarray) and _hooks.scores_without_cache(net)
        return ArraySource(net, cast.array(data.X) if predicts else cast.shrunk(data.X), data)
    except ValueError as error:
        raise ValueError(
            f"train_split={net.train_split!r} cannot split n_samples={len(data.y)}: {error}"
        ) from error


def _two_rows(X: Any) -> Any:
    """Two rows as the module gets them, in a tensor or a dict of tensors."""
    if isinstance(X, dict):
        return {key: _two_rows(value) for key, value in X.items()}
    if isinstance(X, Dataset):
        return default_collate([X[0][0], X[0][0]])
    if _inputs.is_dask(X):
        return torch.as_tensor(np.zeros((2, *X.shape[1:]), X.dtype))
    return torch.as_tensor(np.concatenate([X[:1], X[:1]]))
