"""The parameter server alone, with the gradient of the CNN for 28x28 images as its load."""

from __future__ import annotations

import numpy as np

from daskps._aggregators import combine
from daskps._server import ParameterServer
from daskps._spec import Contribution

PARAMETERS = 421_642
RUN = "benchmark"


def contributions(world_size, round_=0):
    rng = np.random.default_rng(0)
    return [
        Contribution(
            run_id=RUN,
            generation=0,
            rank=rank,
            round=round_,
            weight=16.0,
            reduction="mean",
            buffer=rng.standard_normal(PARAMETERS, dtype=np.float32),
        )
        for rank in range(world_size)
    ]


class Combine:
    """The sum and the division: all the arithmetic of a round."""

    params = (2, 8)
    param_names = ("world_size",)

    def setup(self, world_size):
        self.contributions = contributions(world_size)

    def time_combine(self, world_size):
        combine(self.contributions)


class Round:
    """A round as the server sees it: contributions checked and collected, then combined."""

    params = (2, 8)
    param_names = ("world_size",)

    def setup(self, world_size):
        self.contributions = contributions(world_size)

    def time_first_round(self, world_size):
        server = ParameterServer(RUN, world_size)
        for contribution in self.contributions:
            complete = server.push(contribution)
        combine(complete)
