"""Gradients that leave while backward still computes others: those of the last layers are ready first.

The idea is that of PyTorch's DistributedDataParallel (Li et al., VLDB 2020): buckets in the reverse order
of the parameters, pushed in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from daskps._packing import FlatBuffer, bytes_of
from daskps._spec import Reduction
from daskps._transport import Channel
from daskps.exceptions import DaskpsError

# Buckets begin on a cache line.
_LINE = 64


def split(parameters: Sequence[Tensor], n_bytes: int) -> list[list[Tensor]]:
    """Cut parameters into buckets of at least so many bytes, from the last one on; 0 for one bucket."""
    buckets: list[list[Tensor]] = [[]]
    for parameter in reversed(parameters):
        if n_bytes and sum(p.nbytes for p in buckets[-1]) >= n_bytes:
            buckets.append([])
        buckets[-1].append(parameter)
    return buckets


def room_for(parameters: Sequence[Tensor]) -> int:
    """Bytes that are enough for any way to cut these parameters, beside their values and flags."""
    return len(parameters) * 2 * _LINE


class Bucket:
    """Some parameters whose gradients travel together, and their place in the channel's room."""

    def __init__(self, parameters: Sequence[Tensor], allocate: Callable[[int, str], np.ndarray]) -> None:
        self.parameters = parameters
        self._flat = FlatBuffer(parameters, allocate)
        self.values = self._flat.array
        self.narrow = self._flat.narrow

    def pack(self, loss: float, scale: float) -> None:
        """Write ``scale`` times the gradients into the room."""
        self._flat.pack([parameter.grad for parameter in self.parameters], loss, scale)

    def take(self, combined: np.ndarray) -> float:
        """Put combined gradients in the place of the rank's own; returns the loss that came along."""
        grads, loss = self._flat.unpack(combined)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            _set_gradient(parameter, grad)
        return loss


class GradientExchange:
    """The exchange of the gradients of one step after another.

    Parameters
    ----------
    parameters : sequence of Tensor
    channel : Channel
    reduction : {'mean', 'sum'}
    bucket_bytes : int

    Attributes
    ----------
    diverged : bool
        Whether this rank's part of the last exchange was not finite.
    """

    def __init__(
        self, parameters: Sequence[Tensor], channel: Channel, reduction: Reduction, bucket_bytes: int
    ) -> None:
        self.parameters = parameters
        self._channel = channel
        self._reduction: Reduction = reduction
        pieces = split(parameters, bucket_bytes)
        self._room = self._whole_room(pieces)
        self._taken = 0
        self._buckets = [Bucket(piece, self._allocate) for piece in pieces]
        self._handles: list = []
        self._weigh: Callable[[], float] | None = None
        self.diverged = False
        self._forget_step()
        if len(self._buckets) > 1:
            self._watch()

    def backward_follows(self, weight: Callable[[], float]) -> None:
        """The next backward is the only one of its step; ``weight`` tells what its gradients count."""
        self._weigh = weight if len(self._buckets) > 1 else None

    def finish(self, weight: float, loss: float) -> float | None:
        """All gradients are there: exchange what is not on its way, and put the combined ones in place.

        Returns
        -------
        float or None
            The combined loss; None if nothing had any weight.
        """
        if self._n_pushed and weight != self._weight:
            raise _not_foreseen(f"counted {self._weight:g} in backward and {weight:g} after it")
        before = self._channel.n_not_finite
        results = self._results(weight, loss)
        # Who is to blame is asked only if a result is nobody's mean any more.
        self.diverged = self._channel.n_not_finite > before and weight > 0 and self._is_bad()
        losses = [
            bucket.take(combined)
            for bucket, combined in zip(self._buckets, results, strict=True)
            if combined.size
        ]
        self._forget_step()
        return losses[-1] if losses else None

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def _results(self, weight: float, loss: float) -> list[np.ndarray]:
        *_, last = self._buckets
        if last is self._buckets[0]:
            self._pack(last, weight, loss)
            return [self._channel.push_pull(last.values, weight, self._reduction, last.narrow)]
        for bucket in self._buckets[self._n_pushed :]:
            self._push(bucket, weight, loss if bucket is last else 0.0)
        # A result is good until a push at its place, so until the next step.
        return [self._channel.pull() for _ in self._buckets]

    def _is_bad(self) -> bool:
        return not all(np.isfinite(bucket.values).all() for bucket in self._buckets)

    def _push(self, bucket: Bucket, weight: float, loss: float) -> None:
        self._pack(bucket, weight, loss)
        self._channel.push(bucket.values, weight, self._reduction, bucket.narrow)
        self._n_pushed += 1
        self._weight = weight

    def _pack(self, bucket: Bucket, weight: float, loss: float) -> None:
        if weight > 0:
            bucket.pack(loss, weight if self._reduction == "mean" else 1.0)

    def _watch(self) -> None:
        """Hear of every gradient of a parameter that is there; the last bucket waits for the loss."""
        for number, bucket in enumerate(self._buckets[:-1]):
            for place, parameter in enumerate(bucket.parameters):
                heard = partial(self._arrived, number, place)
                self._handles.append(parameter.register_post_accumulate_grad_hook(heard))

    def _arrived(self, number: int, place: int, parameter: Tensor) -> None:
        if self._weigh is None:
            return
        if number < self._n_pushed:
            raise _not_foreseen("computed a gradient again that was on its way")
        if (number, place) in self._ready:
            self._weigh = None  # there may be more to come: nothing leaves before backward is done
            return
        self._ready.add((number, place))
        self._push_what_is_ready(self._weigh())

    def _push_what_is_ready(self, weight: float) -> None:
        while weight > 0 and self._n_pushed < len(self._buckets) - 1:
            bucket = self._buckets[self._n_pushed]
            if not all((self._n_pushed, p) in self._ready for p in range(len(bucket.parameters))):
                return
            self._push(bucket, weight, 0.0)

    def _forget_step(self) -> None:
        self._weigh = None
        self._ready: set[tuple[int, int]] = set()
        self._n_pushed = 0
        self._weight = 0.0

    def _whole_room(self, pieces: Sequence[Sequence[Tensor]]) -> np.ndarray:
        n_bytes = sum(_lines(bytes_of(piece)) for piece in pieces)
        return self._channel.allocate(n_bytes, "uint8")

    def _allocate(self, size: int, dtype: str) -> np.ndarray:
        start, n_bytes = self._taken, size * np.dtype(dtype).itemsize
        self._taken += _lines(n_bytes)
        return self._room[start : start + n_bytes].view(dtype)


def _lines(n_bytes: int) -> int:
    """Bytes of the cache lines that so many bytes fill."""
    return -(-n_bytes // _LINE) * _LINE


def _not_foreseen(what: str) -> DaskpsError:
    return DaskpsError(
        f"A training step {what}, while gradients leave as they come: set daskps.bucket-size to 0, so"
        " that they leave when backward is done."
    )


def _set_gradient(parameter: Tensor, grad: Tensor | None) -> None:
    if grad is None or parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = None if grad is None else grad.clone()
    else:
        parameter.grad.copy_(grad)
