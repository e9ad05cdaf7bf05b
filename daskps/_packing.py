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
        self._slots = self._cut(self.array)
        self._seen: tuple[tuple, list[Tensor]] | None = None

    def pack(self, tensors: Sequence[Tensor | None], loss: float, scale: float) -> np.ndarray:
        """Write ``scale`` times the tensors, their flags and the loss into the buffer."""
        for slot, tensor in zip(self._slots, tensors, strict=True):
            if tensor is None:
                slot.zero_()
            else:
                _write(slot, tensor.detach(), scale)
        self.array[self._ends[-1] :] = [*(float(tensor is not None) for tensor in tensors), loss]
        if scale != 1:
            self.array[self._ends[-1] :] *= scale
        return self.array

    def unpack(self, combined: np.ndarray) -> tuple[list[Tensor | None], float]:
        """Read a combined buffer: tensors that may be views of it, and the loss."""
        present = (combined[self._ends[-1] : -1] != 0).tolist()
        slots = self._slots_of(combined)
        tensors = [
            self._restored(index, slot) if flag else None
            for index, (slot, flag) in enumerate(zip(slots, present, strict=True))
        ]
        return tensors, float(combined[-1])

    @property
    def narrow(self) -> int:
        """How many values, from the first, may be narrowed: not the flags and not the loss."""
        return self._ends[-1] if self.array.dtype == np.float32 else 0

    def _slots_of(self, combined: np.ndarray) -> list[Tensor]:
        # Results come to the same place again and again, and cutting costs more than reading.
        key = (combined.__array_interface__["data"], combined.shape, combined.dtype)
        if self._seen is None or self._seen[0] != key:
            self._seen = key, self._cut(combined)
        return self._seen[1]

    def _cut(self, array: np.ndarray) -> list[Tensor]:
        flat = torch.from_numpy(array)
        bounds = zip(pairwise(self._ends), self._shapes, strict=True)
        return [flat[start:end].view(shape) for (start, end), shape in bounds]

    def _restored(self, index: int, slot: Tensor) -> Tensor:
        if self._complex[index]:
            aligned = slot if slot.storage_offset() % 2 == 0 else slot.clone()
            slot = torch.view_as_complex(aligned)
        return slot.to(self._dtypes[index])


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """How many bytes a buffer for these tensors has."""
    size = sum(_real(tensor).numel() + 1 for tensor in tensors) + 1
    return size * wire_dtype(tensors).itemsize


def _write(slot: Tensor, tensor: Tensor, scale: float) -> None:
    """Write ``scale`` times a tensor."""
    if tensor.dtype == slot.dtype and tensor.shape == slot.shape and tensor.layout == torch.strided:
        torch.mul(tensor, scale, out=slot)
        return
    slot.copy_(_real(tensor.to_dense() if tensor.is_sparse else tensor))
    if scale != 1:
        slot.mul_(scale)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
