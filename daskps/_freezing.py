"""An initialised net as bytes, and back: for copies and pickles.

skorch's own pickle leaves a learning rate schedule tied to an optimizer of its own, and cannot be read
where the script that defined the module is not at hand.
"""

from __future__ import annotations

import copy

import cloudpickle
from sklearn.base import clone
from skorch import NeuralNet

from daskps import _hooks, _random, _state


def freeze(net: NeuralNet) -> bytes:
    """Everything of a net that training goes on from and prediction needs.

    Its parameters, and for an initialised one its weights, optimizers, history and callbacks.
    Modules of a script are written by value.
    """
    if not getattr(net, "initialized_", False):
        frozen = {"bare": clone(net)}
    else:
        frozen = {"bare": _hooks.without_callbacks(net)}
        frozen["state"] = _state.dump(net)
        frozen["settings"] = _state.dump_settings(net)
        frozen["callbacks"] = _state.dump_callbacks(net, [*net.callbacks_, ("callbacks", net.callbacks)])
        frozen["history"] = net.history
        frozen["classes"] = getattr(net, "classes_inferred_", None)
    return cloudpickle.dumps(frozen)


def thaw(data: bytes) -> NeuralNet:
    """The net again, on the CPU; no random number is drawn."""
    frozen = cloudpickle.loads(data)
    net = frozen["bare"]
    if "state" in frozen:
        with _random.LOCK, _random.seeded(0):
            net.initialize()
        _state.load(net, frozen["state"])
        _state.load_settings(net, frozen["settings"])
        *net.callbacks_, (_, net.callbacks) = _state.load_callbacks(net, frozen["callbacks"])
        net.history_ = frozen["history"]
        if frozen["classes"] is not None:
            net.classes_inferred_ = frozen["classes"]
    return net


def copied(net: NeuralNet) -> NeuralNet:
    """An independent copy."""
    new = thaw(freeze(net))
    if hasattr(new, "history_"):
        new.history_ = copy.deepcopy(new.history_)
    return new
