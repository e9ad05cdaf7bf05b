"""Tensors laid end to end in one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

Allocate = Callable[[int, str], np.ndarray]

_DOUBLE = (torch.float64, torch.complex128)


def wire_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """float64 if any tensor has that precision, else float32."""
    return torch.float64 if any(t.dtype in _DOUBLE for t in tensors) else torch.float32


class FlatBuffer:
    """One buffer for tensors of fixed shapes: their values, then a presence flag for each, then the loss.

    A tensor that is None on this rank is packed as absent: it adds nothing and its flag is 0. Absent
    on all ranks stays None.

    Parameters
    ----------
    like : sequence of Tensor
        Tensors of the shapes and dtypes to pack.
    allocate : callable, optional
        Takes a size and a dtype and gives the buffer's memory.
    """

    def __init__(self, like: Sequence[Tensor], allocate: Allocate = np.empty) -> None:
        self._dtypes = [tensor.dtype for tensor in like]
        self._complex = [tensor.is_complex() for tensor in like]
        self._shapes = [_real(tensor).shape for tensor in like]
        self._ends = np.cumsum([0, *(shape.numel() for shape in self._shapes)]).tolist()
        dtype = str(wire_dtype(like)).removeprefix("torch.")
        self.array = allocate(self._ends[-1] + len(like) + 1, dtype)
        self._flat = torch.from_numpy(self.array)
        self._slots = self._cut(self._flat)

    def pack(self, tensors: Sequence[Tensor | None], loss: float, scale: float) -> np.ndarray:
        """Write ``scale`` times the tensors, their flags and the loss into the buffer."""
        for slot, tensor in zip(self._slots, tensors, strict=True):
            if tensor is None:
                slot.zero_()
            else:
                dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
                slot.copy_(_real(dense))
        self.array[self._ends[-1] : -1] = [tensor is not None for tensor in tensors]
        self.array[-1] = loss
        if scale != 1:
            self._flat.mul_(scale)
        return self.array

    def unpack(self, combined: np.ndarray) -> tuple[list[Tensor | None], float]:
        """Read a combined buffer: tensors that may be views of it, and the loss."""
        present = (combined[self._ends[-1] : -1] != 0).tolist()
        slots = self._cut(torch.from_numpy(combined))
        tensors = [
            self._restored(index, slot) if flag else None
            for index, (slot, flag) in enumerate(zip(slots, present, strict=True))
        ]
        return tensors, float(combined[-1])

    def _cut(self, flat: Tensor) -> list[Tensor]:
        bounds = zip(pairwise(self._ends), self._shapes, strict=True)
        return [flat[start:end].view(shape) for (start, end), shape in bounds]

    def _restored(self, index: int, slot: Tensor) -> Tensor:
        if self._complex[index]:
            slot = torch.view_as_complex(slot)
        return slot.to(self._dtypes[index])


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """How many bytes a buffer for these tensors has."""
    size = sum(_real(tensor).numel() + 1 for tensor in tensors) + 1
    return size * wire_dtype(tensors).itemsize


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
