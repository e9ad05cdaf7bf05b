"""The parameter server alone: its decisions, its arithmetic, and rounds through sockets."""

from __future__ import annotations

import socket
import threading

import numpy as np

from daskps._aggregators import combine
from daskps._links import SocketLink
from daskps._rounds import RoundServer
from daskps._server import ParameterServer
from daskps._spec import Contribution, Ticket
from daskps._transport import SocketChannel

from .profile import PROFILE

RUN = "0" * 32


class StateMachine:
    """A round of contributions taken in and checked, without their values."""

    params = PROFILE.world_sizes
    param_names = ("world_size",)

    def setup(self, world_size):
        self.server = ParameterServer(RUN, world_size)
        self.server.capacity = 4 * 421_642

    def time_round(self, world_size):
        for rank in range(world_size):
            complete = self.server.push(
                Contribution(
                    run_id=RUN,
                    generation=0,
                    rank=rank,
                    round=self.server.round,
                    weight=16.0,
                    reduction="mean",
                    dtype="float32",
                    size=421_642,
                )
            )
        assert len(complete) == world_size


class Combine:
    """The sum and the division: all the arithmetic of a round."""

    params = (PROFILE.sizes, PROFILE.world_sizes)
    param_names = ("values", "world_size")

    def setup(self, values, world_size):
        rng = np.random.default_rng(0)
        held = [rng.standard_normal(values, dtype=np.float32) for _ in range(world_size)]
        self.readers = [lambda start, stop, mine=mine: mine[start:stop] for mine in held]
        self.out = np.empty(values, np.float32)

    def time_combine(self, values, world_size):
        combine(self.readers, 16.0 * world_size, self.out)


class Round:
    """A whole round through sockets, all ranks in threads of this process."""

    params = (PROFILE.sizes, PROFILE.world_sizes)
    param_names = ("values", "world_size")

    def setup(self, values, world_size):
        server = ParameterServer(RUN, world_size)
        self.rounds = RoundServer(server, 60.0, lambda: None)
        self.rounds.agree(4 * values)
        self.values = np.ones(values, np.float32)
        self.channels = [self._join(rank, world_size) for rank in range(world_size)]

    def _join(self, rank, world_size):
        ours, theirs = socket.socketpair()
        self.rounds.attach(rank, SocketLink(ours))
        return SocketChannel(theirs, Ticket(RUN, 0, rank, world_size), self.values.nbytes, 60.0)

    def teardown(self, values, world_size):
        for channel in self.channels:
            channel.close()

    def time_round(self, values, world_size):
        def push_pull(channel):
            channel.push_pull(self.values, 16.0, "mean")

        threads = [threading.Thread(target=push_pull, args=(c,)) for c in self.channels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
