"""Rounds between real ranks: milliseconds of waiting and moving data, by transport, size and world size.

The ranks compute next to nothing, so this is the least that a round costs. It is measured by what
every fit reports, and so stays comparable when the transport is written anew.
"""

import sys

import cloudpickle
import dask
import numpy as np
import torch
from skorch import NeuralNetClassifier

from daskps import DistributedCNNClassifier

from .clusters import cluster
from .profile import PROFILE

STEPS = 50


class Hollow(torch.nn.Module):
    """So many parameters, of which one step uses little and moves all."""

    def __init__(self, n_values):
        super().__init__()
        self.values = torch.nn.Parameter(torch.zeros(n_values))

    def forward(self, X):
        # Two columns from one sum: the gradient of every value is there, without a large product.
        score = self.values.sum().expand(len(X))
        return torch.stack([score, -score], dim=1)


def milliseconds(client, n_values, world_size):
    """The median epoch of a fit that exchanges at every step."""
    net = NeuralNetClassifier(
        Hollow,
        module__n_values=n_values,
        criterion=torch.nn.CrossEntropyLoss,
        batch_size=2 * world_size,
        max_epochs=3,
        train_split=None,
        verbose=0,
    )
    X = np.zeros((2 * world_size * STEPS, 1), "float32")
    y = np.arange(len(X)) % 2
    clf = DistributedCNNClassifier(net, n_workers=world_size, client=client, random_state=0).fit(X, y)
    frame = clf.report_.to_frame().query("epoch > 0")
    return 1000 * float(((frame.wait_seconds + frame.sync_seconds) / frame.rounds).median())


class Rounds:
    params = (("shared-memory", "comm"), PROFILE.sizes, PROFILE.world_sizes)
    param_names = ("transport", "values", "world_size")
    timeout = 3600

    def setup_cache(self):
        cloudpickle.register_pickle_by_value(sys.modules[Hollow.__module__])
        with cluster(max(PROFILE.world_sizes)) as (client, _):
            return {
                (transport, values, world_size): self.measure(client, transport, values, world_size)
                for transport in self.params[0]
                for values in PROFILE.sizes
                for world_size in PROFILE.world_sizes
            }

    setup_cache.timeout = 3600

    def measure(self, client, transport, values, world_size):
        with dask.config.set({"daskps.transport": transport, "daskps.min-rows-per-rank": 1}):
            return min(milliseconds(client, values, world_size) for _ in range(PROFILE.turns))

    def track_round(self, results, transport, values, world_size):
        return results[transport, values, world_size]

    track_round.unit = "ms"
