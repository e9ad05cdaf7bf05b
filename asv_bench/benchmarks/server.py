"""The parameter server alone, with the gradient of the CNN for 28x28 images as its load."""

from __future__ import annotations

import socket
import threading

import numpy as np

from daskps._aggregators import combine
from daskps._links import SocketLink
from daskps._rounds import RoundServer
from daskps._server import ParameterServer
from daskps._spec import Ticket
from daskps._transport import SocketChannel

PARAMETERS = 421_642
RUN = "0" * 32


class Combine:
    """The sum and the division: all the arithmetic of a round."""

    params = (2, 8)
    param_names = ("world_size",)

    def setup(self, world_size):
        rng = np.random.default_rng(0)
        values = [rng.standard_normal(PARAMETERS, dtype=np.float32) for _ in range(world_size)]
        self.readers = [lambda start, stop, held=held: held[start:stop] for held in values]
        self.out = np.empty(PARAMETERS, np.float32)

    def time_combine(self, world_size):
        combine(self.readers, 16.0 * world_size, self.out)


class Round:
    """A whole round through sockets, all ranks in threads of this process."""

    params = (2, 8)
    param_names = ("world_size",)

    def setup(self, world_size):
        server = ParameterServer(RUN, world_size)
        self.rounds = RoundServer(server, 60.0, lambda: None)
        self.rounds.agree(4 * PARAMETERS)
        self.channels = [self._join(rank, world_size) for rank in range(world_size)]
        self.values = np.ones(PARAMETERS, np.float32)

    def _join(self, rank, world_size):
        ours, theirs = socket.socketpair()
        self.rounds.attach(rank, SocketLink(ours))
        return SocketChannel(theirs, Ticket(RUN, 0, rank, world_size), 4 * PARAMETERS, 60.0)

    def teardown(self, world_size):
        for channel in self.channels:
            channel.close()

    def time_round(self, world_size):
        def push_pull(channel):
            channel.push_pull(self.values, 16.0, "mean")

        threads = [threading.Thread(target=push_pull, args=(c,)) for c in self.channels]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
