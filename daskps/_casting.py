"""Which input a net can compute with, and how other input becomes that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

_IN_NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}


@dataclass(frozen=True)
class InputCast:
    """The conversion of a net's input: floats, and integers that are no indices, to one dtype.

    Parameters
    ----------
    dtype : torch.dtype or None
        What the net computes with; None if it has no parameters of its own.
    integers : bool
        Whether integers are numbers. To an embedding they are indices.
    """

    dtype: torch.dtype | None
    integers: bool

    @classmethod
    def of(cls, module: nn.Module) -> InputCast:
        """The conversion for a module: the dtype is that of its first floating parameter."""
        dtypes = (p.dtype for p in module.parameters() if p.is_floating_point())
        embeds = any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) for m in module.modules())
        return cls(next(dtypes, None), not embeds)

    def tensor(self, values: Any) -> Any:
        """The converted tensor; dicts and sequences of tensors likewise."""
        if isinstance(values, dict):
            return {key: self.tensor(value) for key, value in values.items()}
        if isinstance(values, (tuple, list)):
            return type(values)(self.tensor(value) for value in values)
        if not isinstance(values, torch.Tensor) or not self._concerns(values):
            return values
        return values.to(self.dtype)

    def array(self, values: Any) -> Any:
        """The converted array, of a layout that torch takes; in float32 for a bfloat16 module.

        Dicts of arrays likewise; a dataset stays as it is.
        """
        if isinstance(values, dict):
            return {key: self.array(value) for key, value in values.items()}
        if not isinstance(values, np.ndarray):
            return values
        kind = values.dtype.kind
        dtype = values.dtype.newbyteorder("=")
        if self.dtype is not None and (kind == "f" or (kind in "iub" and self.integers)):
            dtype = np.dtype(_IN_NUMPY.get(self.dtype, np.float32))
        elif kind == "u" and values.itemsize > 1:  # torch has few operations for it
            dtype = np.dtype(np.int64)
        # Torch warns of arrays that may not be written.
        return np.require(values, dtype, ["C", "W"])

    def shrunk(self, values: Any) -> Any:
        """The converted array if that is smaller, and the input itself else: it has to travel."""
        if isinstance(values, dict):
            return {key: self.shrunk(value) for key, value in values.items()}
        if not isinstance(values, np.ndarray):
            return values
        wide = values.dtype.kind == "f" and self.dtype == torch.float32 and values.itemsize > 4
        return values.astype(np.float32) if wide else values

    def _concerns(self, tensor: torch.Tensor) -> bool:
        if self.dtype is None or tensor.is_complex():
            return False
        return tensor.is_floating_point() or self.integers
