"""What ranks exchange, and when: gradients at every step, or averages now and then, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from skorch import NeuralNet
from torch import Tensor

from daskps import _losses
from daskps._buckets import GradientExchange, room_for
from daskps._packing import FlatBuffer, bytes_of
from daskps._transport import Channel


def capacity(net: NeuralNet) -> int:
    """How many bytes the largest contribution of a net may have.

    State of optimizers may be more; it takes several rounds, once an epoch.
    """
    parameters = [p for _, p in net.get_all_learnable_params()]
    return bytes_of([*parameters, *_floating_buffers(net)]) + room_for(parameters)


class Sync(Protocol):
    """The moments of an epoch at which ranks may meet."""

    lockstep: bool
    """Whether all ranks take part in every step, also without rows of their own."""
    diverged: bool
    """Whether this rank's part of the last round was not finite."""

    def epoch_began(self) -> None:
        """All ranks hold the same state now."""

    def backward_follows(self, weight: Callable[[], float]) -> None:
        """The next backward is the only one of its step; ``weight`` tells what its gradients count."""

    def gradients(self, weight: float, loss: float) -> float:
        """The gradients of one step are there; returns the loss that the step has.

        Where nothing had any weight, there are no gradients afterwards, and so no step.
        """

    def stepped(self, step: int) -> None:
        """The optimizer has made its step number ``step``, counted from 0."""

    def epoch_ended(self) -> bool:
        """All steps are done; returns whether the ranks now hold the same state."""


class Alone:
    """World size 1: nothing to exchange."""

    lockstep = False
    diverged = False

    def __init__(self, net: NeuralNet) -> None:
        self._net = net

    def epoch_began(self) -> None:
        pass

    def backward_follows(self, weight: Callable[[], float]) -> None:
        pass

    def gradients(self, weight: float, loss: float) -> float:
        if weight == 0:
            _drop_gradients(_learnable(self._net))
        return loss

    def stepped(self, step: int) -> None:
        pass

    def epoch_ended(self) -> bool:
        return True


class GradientSync:
    """Batch mode: every step is one step on the union of the ranks' rows."""

    lockstep = True
    diverged = False

    def __init__(self, net: NeuralNet, channel: Channel, rank: int, bucket_bytes: int = 0) -> None:
        self._net = net
        self._channel = channel
        self._buffers = BufferSync(net, channel, rank)
        self._bucket_bytes = bucket_bytes
        self._exchange = self._new_exchange()

    def epoch_began(self) -> None:
        self._weight = 0.0
        self._exchange.close()
        # Anew in every epoch: a callback may have frozen or freed parameters.
        self._exchange = self._new_exchange()
        self._buffers.mark()

    def backward_follows(self, weight: Callable[[], float]) -> None:
        self._exchange.backward_follows(weight)

    def gradients(self, weight: float, loss: float) -> float:
        self._weight += weight
        combined = self._exchange.finish(weight, loss)
        if combined is None:
            _drop_gradients(self._exchange.parameters)
            return loss
        self.diverged = self._exchange.diverged
        return combined

    def stepped(self, step: int) -> None:
        pass

    def epoch_ended(self) -> bool:
        self._buffers.average(self._weight)
        return True

    def _new_exchange(self) -> GradientExchange:
        parameters, reduction = _learnable(self._net), _losses.reduction(self._net)
        return GradientExchange(parameters, self._channel, reduction, self._bucket_bytes)


class LocalSGD:
    """Epoch mode and every H steps: ranks step on their own rows and average what they hold.

    Parameters
    ----------
    every : int or None
        Steps between two rounds, counted from the start of the epoch; None for one round an epoch.
    """

    lockstep = False
    diverged = False  # a gradient that is not finite shows in the next loss

    def __init__(self, net: NeuralNet, channel: Channel, rank: int, every: int | None) -> None:
        self._net = net
        self._channel = channel
        self._every = every
        self._buffers = BufferSync(net, channel, rank)

    def epoch_began(self) -> None:
        self._step_weight = self._weight = self._epoch_weight = 0.0
        self._unsynced = False
        # Anew in every epoch: a callback may have frozen or freed parameters.
        learnable = _learnable(self._net)
        self._values = Average(
            lambda: [*learnable, *_floating_buffers(self._net)], self._channel, narrow=True
        )
        self._values.mark()

    def backward_follows(self, weight: Callable[[], float]) -> None:
        pass

    def gradients(self, weight: float, loss: float) -> float:
        self._step_weight = weight  # not added: an optimizer may look at its rows several times
        if weight == 0:
            _drop_gradients(_learnable(self._net))
        return loss

    def stepped(self, step: int) -> None:
        self._weight += self._step_weight
        self._epoch_weight += self._step_weight
        self._step_weight = 0.0
        self._unsynced = True
        if self._every is not None and (step + 1) % self._every == 0:
            self._meet()

    def epoch_ended(self) -> bool:
        if self._unsynced:
            self._meet()
        uniform = average_optimizer_state(self._net, self._channel, self._epoch_weight)
        self._buffers.broadcast_integers()
        return uniform

    def _meet(self) -> None:
        self._values.average(self._weight)
        self._weight = 0.0
        self._unsynced = False


class Average:
    """The weighted mean of the ranks' tensors, taken over what changed since they were last equal.

    A mean of the values themselves would move by a rounding error what no rank has touched.

    Parameters
    ----------
    find : callable
        Returns the tensors: a module may put another one in a buffer's place.
    channel : Channel
    narrow : bool
        Whether changes may be rounded to the run's wire dtype.
    """

    def __init__(self, find: Callable[[], list[Tensor]], channel: Channel, narrow: bool = False) -> None:
        self._narrow = narrow
        self._find = find
        self._channel = channel
        self._flat = FlatBuffer(find())
        self._common: list[Tensor] = []

    def mark(self) -> None:
        """All ranks hold the same values now."""
        self._common = [tensor.detach().clone() for tensor in self._find()]

    @torch.no_grad()
    def average(self, weight: float) -> None:
        """Replace the values on every rank by their mean."""
        tensors = self._find()
        if not tensors:
            return
        if weight > 0:
            pairs = zip(tensors, self._common, strict=True)
            self._flat.pack([now - then for now, then in pairs], 0.0, weight)
        narrow = self._flat.narrow if self._narrow else 0
        combined = self._channel.push_pull(self._flat.array, weight, "mean", narrow)
        if combined.size:
            changes, _ = self._flat.unpack(combined)
            for tensor, then, change in zip(tensors, self._common, changes, strict=True):
                tensor.copy_(then if change is None else then + change)
        self.mark()


class BufferSync:
    """The buffers of all modules: floating ones are averaged, integers are rank 0's."""

    def __init__(self, net: NeuralNet, channel: Channel, rank: int) -> None:
        self._net = net
        self._channel = channel
        self._rank = rank
        self._floating = Average(lambda: _floating_buffers(net), channel)

    def mark(self) -> None:
        """All ranks hold the same buffers now."""
        self._floating.mark()

    def average(self, weight: float) -> None:
        """Average the floating buffers, weighted, and broadcast the others."""
        self._floating.average(weight)
        self.broadcast_integers()

    def broadcast_integers(self) -> None:
        """Give every rank the integer buffers of rank 0, byte by byte, so that any dtype is exact."""
        integers = [buffer for buffer in _buffers(self._net) if not _is_floating(buffer)]
        if not integers:
            return
        sent = np.concatenate([_bytes_of(buffer) for buffer in integers]).astype("float32")
        weight = 1.0 if self._rank == 0 else 0.0
        received = self._channel.push_pull(sent, weight, "mean").astype("uint8")
        sizes = [buffer.nbytes for buffer in integers]
        for buffer, values in zip(integers, torch.from_numpy(received).split(sizes), strict=True):
            buffer.copy_(values.clone().view(buffer.dtype).view(buffer.shape))


def average_optimizer_state(net: NeuralNet, channel: Channel, weight: float) -> bool:
    """Average the floating state of all optimizers over the ranks, weighted.

    Returns
    -------
    bool
        False if there is state that the ranks do not share now: of another kind, or of the others
        where this rank has none.
    """
    uniform = True
    for name in net._optimizers:
        optimizer = getattr(net, name + "_")
        slots, rest = _state_slots(optimizer)
        uniform = uniform and not rest
        flat = FlatBuffer([like for _, _, like in slots], channel.allocate)
        # A rank without state takes part as well, in as many rounds: the others may have some.
        n_bytes = _agreed_bytes(channel, flat.array.nbytes if slots else 0)
        if not n_bytes:
            continue
        values = flat.array if slots else np.empty(n_bytes // 4, "float32")
        if slots and weight > 0:  # not before: all buffers may lie in the same memory
            held = [optimizer.state.get(p, {}).get(key) for p, key, _ in slots]
            flat.pack(held, 0.0, weight)
        combined = channel.push_pull(values, weight if slots else 0.0, "mean")
        if slots and combined.size:
            _write_state(optimizer, slots, flat.unpack(combined)[0])
        uniform = uniform and bool(slots or not combined.size)
    return uniform


def _agreed_bytes(channel: Channel, n_bytes: int) -> int:
    """How much those ranks bring that bring anything: each the same."""
    agreed = channel.push_pull(np.array([n_bytes], "float64"), 1.0 if n_bytes else 0.0, "mean")
    return int(agreed[0]) if agreed.size else 0


def _state_slots(optimizer: Any) -> tuple[list[tuple[Tensor, str, Tensor]], bool]:
    """Where an optimizer keeps floats: the parameter, the key and a tensor of that shape.

    A parameter that has no state on this rank may have it on another, so every parameter gets the
    keys that any parameter has.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    held = [(p, key, value) for p in parameters for key, value in optimizer.state.get(p, {}).items()]
    scalar: dict[str, bool] = {}
    rest = False
    for parameter, key, value in held:
        if not isinstance(value, Tensor) or not _is_floating(value):
            rest = rest or value is not None
        elif value.shape == parameter.shape or value.numel() == 1:
            scalar[key] = value.shape != parameter.shape
        else:
            rest = True
    examples = {key: value for _, key, value in held if key in scalar}
    return [
        (p, key, torch.zeros_like(examples[key] if scalar[key] else p))
        for p in parameters
        if p.requires_grad
        for key in sorted(scalar)
    ], rest


def _write_state(optimizer: Any, slots: list, means: list[Tensor | None]) -> None:
    for (parameter, key, _), mean in zip(slots, means, strict=True):
        if mean is None:
            continue
        held = optimizer.state[parameter].get(key)
        if held is None:
            optimizer.state[parameter][key] = mean.clone()
        else:
            held.copy_(mean)


def _drop_gradients(parameters: Sequence[Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = None


def _learnable(net: NeuralNet) -> list[Tensor]:
    return [parameter for _, parameter in net.get_all_learnable_params() if parameter.requires_grad]


def _buffers(net: NeuralNet) -> Iterator[Tensor]:
    for name in (*net._modules, *net._criteria):
        module = getattr(net, name + "_")
        if isinstance(module, torch.nn.Module):
            yield from module.buffers()


def _floating_buffers(net: NeuralNet) -> list[Tensor]:
    return [buffer for buffer in _buffers(net) if _is_floating(buffer)]


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _bytes_of(buffer: Tensor) -> np.ndarray:
    return buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
