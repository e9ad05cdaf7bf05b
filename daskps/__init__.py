"""Train one neural network on a Dask cluster, as a scikit-learn estimator.

Importing this package imports neither torch nor skorch: the scheduler needs it too, and has neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from daskps import config as config

if TYPE_CHECKING:
    from daskps import datasets as datasets
    from daskps._check import check as check
    from daskps._hooks import on_ranks as on_ranks
    from daskps.classifier import DistributedCNNClassifier as DistributedCNNClassifier
    from daskps.exceptions import ClusterTooSmallError as ClusterTooSmallError
    from daskps.exceptions import DaskpsError as DaskpsError
    from daskps.exceptions import DivergenceError as DivergenceError
    from daskps.exceptions import InstallationError as InstallationError
    from daskps.exceptions import RoundTimeoutError as RoundTimeoutError
    from daskps.exceptions import WorkerBusyError as WorkerBusyError
    from daskps.exceptions import WorkerLostError as WorkerLostError
    from daskps.modules import CNN as CNN
    from daskps.report import FitReport as FitReport
    from daskps.speedup import SpeedupModel as SpeedupModel

__version__ = "0.1.0"

_HOMES = {
    "CNN": "daskps.modules",
    "ClusterTooSmallError": "daskps.exceptions",
    "DaskpsError": "daskps.exceptions",
    "DistributedCNNClassifier": "daskps.classifier",
    "DivergenceError": "daskps.exceptions",
    "FitReport": "daskps.report",
    "InstallationError": "daskps.exceptions",
    "RoundTimeoutError": "daskps.exceptions",
    "SpeedupModel": "daskps.speedup",
    "WorkerBusyError": "daskps.exceptions",
    "WorkerLostError": "daskps.exceptions",
    "check": "daskps._check",
    "on_ranks": "daskps._hooks",
}

__all__ = [
    "CNN",
    "ClusterTooSmallError",
    "DaskpsError",
    "DistributedCNNClassifier",
    "DivergenceError",
    "FitReport",
    "InstallationError",
    "RoundTimeoutError",
    "SpeedupModel",
    "WorkerBusyError",
    "WorkerLostError",
    "__version__",
    "check",
    "datasets",
    "on_ranks",
]


def __getattr__(name: str) -> Any:
    if name == "datasets":
        return importlib.import_module("daskps.datasets")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'daskps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
