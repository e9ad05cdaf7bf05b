"""Ranks of a run as threads of this process, around a real parameter server and without a cluster."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from daskps import _hooks, _replica, _state
from daskps._aggregators import combine
from daskps._server import ParameterServer
from daskps._spec import Contribution
from daskps._transport import Traffic

# Until a rank that waits for another one, which never comes, is an error.
PATIENCE = 2


class Hub:
    """Where the ranks' channels meet."""

    def __init__(self, world_size):
        self.server = ParameterServer("run", world_size)
        self._results = {}
        self._news = threading.Condition()

    def exchange(self, contribution):
        with self._news:
            complete = self.server.push(contribution)
            if complete is not None:
                self._results[contribution.round] = combine(complete)
                self._news.notify_all()
            self._news.wait_for(lambda: self._is_over(contribution.round), PATIENCE)
            if contribution.round in self._results:
                return self._results[contribution.round].copy()
            self.server.fail(TimeoutError(f"ranks {self.server.missing()} did not come"))
            raise self.server.error

    def fail(self, error):
        with self._news:
            self.server.fail(error)
            self._news.notify_all()

    def _is_over(self, round_):
        return round_ in self._results or self.server.error is not None


class MemoryChannel:
    """One rank's way to the hub."""

    def __init__(self, hub, rank):
        self.traffic = Traffic()
        self._hub = hub
        self._rank = rank

    def push_pull(self, buffer, weight, reduction):
        sent = np.array(buffer if weight > 0 else buffer[:0])
        message = Contribution("run", 0, self._rank, self.traffic.rounds, weight, reduction, sent)
        combined = self._hub.exchange(message)
        self.traffic.rounds += 1
        return combined

    def close(self):
        pass


def side_by_side(world_size, rank_does):
    """Call ``rank_does(rank, channel)`` on every rank at once; raise what went wrong first."""
    hub = Hub(world_size)

    def run(rank):
        try:
            return rank_does(rank, MemoryChannel(hub, rank))
        except BaseException as error:
            hub.fail(error)
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
    if hub.server.error is not None:
        raise hub.server.error
    return [future.result() for future in futures]


def replica_of(net):
    """A rank's copy of an initialised net, with the callbacks that run on ranks."""
    callbacks = _hooks.rank_side(net)
    dumped = _state.dump_callbacks(net, callbacks) if callbacks else b""
    return _replica.build(_replica.open_with(net, None, dumped))


def train_epoch(replica, sync, batches):
    """What a rank does in an epoch; a batch of None is a step without rows.

    Returns the loss of every step and whether all ranks hold the same state now.
    """
    replica.sync_ = sync
    sync.epoch_began()
    losses = []
    for step, batch in enumerate(batches):
        if batch is not None:
            losses.append(replica.train_step(batch)["loss"].item())
        elif sync.lockstep:
            losses.append(replica.idle_step())
        sync.stepped(step)
    return losses, sync.epoch_ended()


def train_ranks(net, make_sync, batches_by_rank, epochs=1):
    """Replicas of a net that were trained side by side, and their losses of the last epoch."""

    def rank_does(rank, channel):
        replica = replica_of(net)
        sync = make_sync(replica, channel, rank)
        for _ in range(epochs):
            replica.losses_, replica.uniform_ = train_epoch(replica, sync, batches_by_rank[rank])
        replica.n_rounds_ = channel.traffic.rounds
        return replica

    return side_by_side(len(batches_by_rank), rank_does)
