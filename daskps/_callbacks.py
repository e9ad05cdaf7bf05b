"""The client's side of skorch: its hooks, its history and its batches, around what the ranks did.

A callback runs on the client with all its hooks. Hooks of training batches are called in serial order
while the epoch runs, with the loss of all ranks together, but with the net as it was when the epoch
began.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from skorch import NeuralNet

from daskps import _state
from daskps._answers import RECORDED, Records, Result
from daskps._partitions import Cut, step_rows
from daskps._sources import Source
from daskps._spec import Order
from daskps.exceptions import DaskpsError


class Snapshot:
    """The values that a net's steps change, as they were at one moment."""

    def __init__(self, net: NeuralNet) -> None:
        self._values = [value.detach().clone() for value in _values(net)]

    def holds(self, net: NeuralNet) -> bool:
        """Whether the net still has exactly these values."""
        now = _values(net)
        return len(now) == len(self._values) and all(map(_same, now, self._values))


class EpochStart:
    """The history's row of an epoch as it was when the epoch began, to begin it again."""

    def __init__(self, net: NeuralNet) -> None:
        self._net = net
        self._row = copy.deepcopy(net.history[-1])

    def restore(self) -> None:
        """Take back what the replay of an epoch that was given up has recorded."""
        row = self._net.history[-1]
        row.clear()
        row.update(copy.deepcopy(self._row))


class EpochReplay:
    """Calls the batch hooks of one epoch as the steps of all ranks become known.

    Parameters
    ----------
    net : NeuralNet
        The client's net, in the state in which the epoch began.
    source : Source
    cut : Cut
    order : Order
        Of any rank.
    """

    def __init__(self, net: NeuralNet, source: Source, cut: Cut, order: Order) -> None:
        self._net = net
        self._source = source
        self._cut = cut
        self._epoch = order.epoch
        self._before = Snapshot(net)
        self._settings = _settings(net)
        self._wait_for_predictions = order.predictions
        self._predictions: list[list] = []
        self._rows = step_rows(cut.training, order.seed, order.epoch, order.shuffle)
        self._losses: list[list[float]] = [[] for _ in range(cut.world_size)]
        self._weights: list[list[float]] = [[] for _ in range(cut.world_size)]
        self._next = 0

    def advance(self, report: dict) -> None:
        """Take in a rank's report of finished steps."""
        if report["epoch"] != self._epoch or self._wait_for_predictions:
            return
        self._losses[report["rank"]] += report["losses"]
        self._weights[report["rank"]] += report["weights"]
        self._catch_up()

    def finish(self, results: Sequence[Result]) -> None:
        """Replay what is left of the training batches.

        Raises
        ------
        DaskpsError
            If a callback changed the net in a batch hook, which no rank would know of.
        """
        self._losses = [result.losses.tolist() for result in results]
        self._weights = [result.weights.tolist() for result in results]
        if self._wait_for_predictions:
            self._predictions = [_state.from_bytes(result.predictions) for result in results]
        self._catch_up()
        self._net.history.record("train_batch_count", self._next)
        if results[0].records is not None:
            self._take_records(results[0].records)
        if not self._before.holds(self._net) or _settings(self._net) != self._settings:
            raise DaskpsError(
                "A callback changed the net's parameters or optimizer in on_batch_begin or"
                " on_batch_end. These hooks run on the client while the ranks train, so the change"
                " would be lost: wrap the callback in daskps.on_ranks, or make the change in"
                " on_epoch_begin or on_epoch_end."
            )

    def validate(self, results: Sequence[Result]) -> None:
        """Replay the validation batches, with the net in the state that the epoch ended with."""
        steps = [iter(_state.from_bytes(result.validation)) for result in results]
        for rank, rows in self._cut.validation:
            step = next(steps[rank])
            recorded = step.pop(RECORDED, {})
            self._batch(rows, step, training=False)
            self._net.history[-1]["batches"][-1].update(recorded)
        if self._source.dataset_valid is not None:
            self._net.history.record("valid_batch_count", len(self._cut.validation))

    def _catch_up(self) -> None:
        n_known = min(len(losses) for losses in self._losses)
        while self._next < n_known:
            loss = torch.tensor(self._combined_loss(self._next), dtype=torch.float64)
            outcome = {"loss": loss, "y_pred": self._predicted(self._next)}
            self._batch(self._rows[self._next], outcome, training=True)
            self._next += 1

    def _predicted(self, step: int) -> Any:
        parts = [predictions[step] for predictions in self._predictions]
        parts = [part for part in parts if part is not None]
        if not parts:
            return None
        if isinstance(parts[0], tuple):
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))
        return torch.cat(parts)

    def _take_records(self, records: Records) -> None:
        """What callbacks recorded on rank 0 goes into the client's history."""
        rows = self._net.history[-1]["batches"]
        for row, extra in zip(rows, records.batches, strict=False):
            row.update(extra)
        for key, value in records.epoch.items():
            self._net.history.record(key, value)

    def _combined_loss(self, step: int) -> float:
        # Not with numpy: for so few numbers it takes longer, a core that ranks may need.
        weights = [weights[step] for weights in self._weights]
        losses = [losses[step] for losses in self._losses]
        parts = [w * loss for w, loss in zip(weights, losses, strict=True) if w > 0]
        return sum(parts) / sum(w for w in weights if w > 0) if parts else losses[0]

    def _batch(self, rows: np.ndarray, step: dict, training: bool) -> None:
        net, prefix = self._net, "train" if training else "valid"
        batch = self._source.batch(rows, training)
        net.notify("on_batch_begin", batch=batch, training=training)
        net.history.record_batch(prefix + "_loss", step["loss"].item())
        net.history.record_batch(prefix + "_batch_size", len(rows))
        net.notify("on_batch_end", batch=batch, training=training, **step)


def step_without_gradients(net: NeuralNet) -> None:
    """Let the client's optimizers make an empty step.

    They never make another, and a learning rate schedule warns of an optimizer that makes none.
    """
    for name in net._optimizers:
        optimizer = getattr(net, name + "_")
        optimizer.zero_grad(set_to_none=True)
        optimizer.step(lambda: torch.zeros(()))


def forget_epoch(net: NeuralNet) -> None:
    """Take back the history row of an epoch that did not end."""
    if len(net.history) and "train_batch_count" not in net.history[-1]:
        del net.history[-1]


def _settings(net: NeuralNet) -> list:
    """Learning rates and the like, and which parameters learn."""
    groups = [group for name in net._optimizers for group in getattr(net, name + "_").param_groups]
    learns = [parameter.requires_grad for _, parameter in net.get_all_learnable_params()]
    return [{k: v for k, v in group.items() if k != "params"} for group in groups] + learns


def _values(net: NeuralNet) -> list[torch.Tensor]:
    modules = [getattr(net, name + "_") for name in (*net._modules, *net._criteria)]
    values = [
        value
        for module in modules
        if isinstance(module, torch.nn.Module)
        for value in module.state_dict().values()
    ]
    for name in net._optimizers:
        for held in getattr(net, name + "_").state.values():
            values += [value for value in held.values() if isinstance(value, torch.Tensor)]
    return values


def _same(a: Any, b: Any) -> bool:
    """Bit for bit, since a NaN does not equal itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
