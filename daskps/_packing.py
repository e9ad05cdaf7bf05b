"""Tensors laid end to end in one flat buffer, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._dtypes = [tensor.dtype for tensor in like]
        self._complex = [tensor.is_complex() for tensor in like]
        shapes = [_real(tensor).shape for tensor in like]
        ends = np.cumsum([0, *(shape.numel() for shape in shapes)]).tolist()
        self._flat = torch.zeros(ends[-1] + len(like) + 1, dtype=wire_dtype(like))
        self._slots = [
            self._flat[start:end].view(shape)
            for start, end, shape in zip(ends, ends[1:], shapes, strict=False)
        ]
        self._flags = self._flat[ends[-1] : -1]
        self.array: np.ndarray = self._flat.numpy()

    def pack(self, tensors: Sequence[Tensor | None], loss: float, scale: float) -> np.ndarray:
        """Write ``scale`` times the tensors, their flags and the loss into the buffer."""
        for index, (slot, tensor) in enumerate(zip(self._slots, tensors, strict=True)):
            if tensor is None:
                slot.zero_()
            else:
                dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
                slot.copy_(_real(dense))
            self._flags[index] = tensor is not None
        self._flat[-1] = loss
        if scale != 1:
            self._flat.mul_(scale)
        return self.array

    def unpack(self, combined: np.ndarray) -> tuple[list[Tensor | None], float]:
        """Read a combined buffer: tensors that are valid until the next pack, and the loss."""
        np.copyto(self.array, combined)
        present = (self._flags != 0).tolist()
        tensors = [self._restored(index) if flag else None for index, flag in enumerate(present)]
        return tensors, float(self._flat[-1])

    def _restored(self, index: int) -> Tensor:
        slot = self._slots[index]
        if self._complex[index]:
            slot = torch.view_as_complex(slot)
        return slot.to(self._dtypes[index])


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
