"""Functions and objects for tasks, which the scheduler passes on without importing what they need.

The scheduler unpickles every graph that it is sent, and with a function the module that defines it:
the scheduler would import torch.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Late:
    """A function that is imported when it is called, on the worker."""

    module: str
    name: str

    @property
    def __name__(self) -> str:
        """What Dask calls the tasks, for example on its dashboard."""
        return "daskps-" + self.name.strip("_").replace("_", "-").lower()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Import the function and call it."""
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)


class Passed:
    """An object on its way through the scheduler, as the bytes that it came as."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple:
        return unpickled, (self._data,)


def unpickled(data: bytes) -> Any:
    """The object that was pickled; something to pass on in a scheduler's process without torch.

    For the ``__reduce__`` of an object: ``data`` is a pickle of its class and state.
    """
    if _only_passes_on():
        return Passed(data)
    cls, state = pickle.loads(data)
    made = cls.__new__(cls)
    made.__setstate__(state)
    return made


def _only_passes_on() -> bool:
    scheduler = sys.modules.get("distributed.scheduler")
    return scheduler is not None and bool(scheduler.Scheduler._instances) and "torch" not in sys.modules
