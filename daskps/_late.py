"""Functions for tasks, by name.

The scheduler unpickles every graph that it is sent, and with a function the module that defines it:
the scheduler would import torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Late:
    """A function that is imported when it is called, on the worker."""

    module: str
    name: str

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Import the function and call it."""
        return getattr(importlib.import_module(self.module), self.name)(*args, **kwargs)
