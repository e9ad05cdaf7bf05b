"""A net's state as bytes: parameters, buffers and optimizers, on the CPU.

Bytes, since Dask cannot size, spill or move tensors as they are, and a pickle of a whole fitted net
comes back with its learning rate schedule bound to another optimizer.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import cloudpickle
import numpy as np
import torch
from skorch import NeuralNet


def dump(net: NeuralNet) -> bytes:
    """Everything that a step changes."""
    return to_bytes(
        {
            "modules": {name: module.state_dict() for name, module in _modules(net)},
            "optimizers": {n: getattr(net, n + "_").state_dict() for n in net._optimizers},
        }
    )


def load(net: NeuralNet, state: bytes) -> None:
    """Put a dumped state into an initialised net of the same kind."""
    values = from_bytes(state)
    for name, module in _modules(net):
        module.load_state_dict(values["modules"][name])
    for name, held in values["optimizers"].items():
        getattr(net, name + "_").load_state_dict(held)


def norms(net: NeuralNet) -> np.ndarray:
    """The norms of all floating parameters and buffers."""
    values = [value for _, module in _modules(net) for value in module.state_dict().values()]
    floating = [value.detach() for value in values if value.is_floating_point()]
    return np.array([torch.linalg.vector_norm(value, dtype=torch.float64).item() for value in floating])


def dump_settings(net: NeuralNet) -> bytes:
    """What callbacks on the client may set between epochs: which parameters learn, and how fast."""
    return to_bytes(
        {
            "requires_grad": {
                name: [p.requires_grad for p in module.parameters()] for name, module in _modules(net)
            },
            "param_groups": {
                name: [_without_params(g) for g in getattr(net, name + "_").param_groups]
                for name in net._optimizers
            },
        }
    )


def load_settings(net: NeuralNet, settings: bytes) -> None:
    """Put dumped settings into an initialised net of the same kind."""
    values = from_bytes(settings)
    for name, module in _modules(net):
        learns = values["requires_grad"][name]
        for parameter, flag in zip(module.parameters(), learns, strict=True):
            parameter.requires_grad_(flag)
    for name, groups in values["param_groups"].items():
        held = getattr(net, name + "_").param_groups
        for group, new in zip(held, groups, strict=True):
            group.update(new)


def dump_callbacks(net: NeuralNet, callbacks: list) -> bytes:
    """Callbacks with their state, but without the net, the modules and optimizers that they refer to.

    Raises
    ------
    TypeError
        If one of them cannot be pickled.
    """
    try:
        return _dumped(net, callbacks)
    except Exception:
        for name, callback in callbacks:
            try:
                _dumped(net, callback)
            except Exception as error:
                raise TypeError(f"The callback {name!r} cannot be copied or pickled: {error}") from error
        raise


def _dumped(net: NeuralNet, value: Any) -> bytes:
    stream = io.BytesIO()
    _CallbackPickler(stream, net).dump(value)
    return stream.getvalue()


def load_callbacks(net: NeuralNet, data: bytes) -> list:
    """Dumped callbacks, tied to the parts of this net."""
    return _CallbackUnpickler(io.BytesIO(data), net).load()


class _CallbackPickler(cloudpickle.Pickler):
    """Writes a part of the net as its name.

    A schedule that came with an optimizer of its own would change rates that nobody uses.
    """

    def __init__(self, stream: io.BytesIO, net: NeuralNet) -> None:
        super().__init__(stream)
        self._names = {id(part): name for name, part in _parts(net).items()}

    def persistent_id(self, obj: Any) -> str | None:
        return self._names.get(id(obj))


class _CallbackUnpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, net: NeuralNet) -> None:
        super().__init__(stream)
        self._parts = _parts(net)

    def persistent_load(self, name: str) -> Any:
        return self._parts[name]


def _parts(net: NeuralNet) -> dict[str, Any]:
    names = [name + "_" for name in (*net._modules, *net._criteria, *net._optimizers)]
    return {"net": net, **{name: getattr(net, name) for name in names}}


def to_bytes(value: Any) -> bytes:
    """Any value that holds tensors of any dtype."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def from_bytes(data: bytes) -> Any:
    """The value, its tensors on the CPU and shared with nobody."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _modules(net: NeuralNet) -> list[tuple[str, torch.nn.Module]]:
    held = [(name, getattr(net, name + "_")) for name in (*net._modules, *net._criteria)]
    return [(name, module) for name, module in held if isinstance(module, torch.nn.Module)]


def _without_params(group: dict) -> dict:
    return {key: value for key, value in group.items() if key != "params"}
