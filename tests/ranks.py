"""Ranks of a run as threads of this process, around a real server of rounds and without a cluster."""

import contextlib
import gc
import logging
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from probes import wait_until

from daskps import _hooks, _replica, _sharedmemory, _state
from daskps._links import SharedMemoryLink, SocketLink
from daskps._rounds import RoundServer
from daskps._server import ParameterServer
from daskps._sharedmemory import Segment
from daskps._spec import Rules, Ticket
from daskps._sync import capacity
from daskps._transport import SharedMemoryChannel, SocketChannel
from daskps.exceptions import RunAbortedError

RUN_ID = "0123456789abcdef" * 2

# Until something that never comes is an error. Only a test that fails waits for it.
PATIENCE = 60

RULES = Rules(
    workers=PATIENCE,
    connect=PATIENCE,
    start=PATIENCE,
    round=PATIENCE,
    silence=PATIENCE,
    close=PATIENCE,
    report_interval=0.5,
    transport="auto",
    bucket_bytes=1 << 20,
    wire_dtype=None,
    on_divergence="warn",
)


def tcp_pair():
    """Two ends of a connection through the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for sock in (ours, theirs):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


PAIRS = {"unix": socket.socketpair, "tcp": tcp_pair}

# The kinds of channel of the ranks of one run.
MIXED = ("unix", "shared")


class Hub:
    """The rounds of one run, and the ranks' ways to them.

    Parameters
    ----------
    world_size : int
    n_bytes : int
        Of the largest contribution to one round.
    patience : float
        Seconds for a round.
    """

    def __init__(self, world_size, n_bytes=1 << 20, patience=PATIENCE, wire_dtype=None):
        self.server = ParameterServer(RUN_ID, world_size)
        self.ended = threading.Event()
        self.rounds = RoundServer(self.server, patience, self.ended.set, wire_dtype)
        self.rounds.agree(n_bytes)
        self._ours = contextlib.ExitStack()

    def ticket(self, rank):
        return Ticket(RUN_ID, 0, rank, self.server.world_size)

    def sock(self, rank, pair="unix"):
        """A rank's end of a connection on which it may say what it likes."""
        ours, theirs = PAIRS[pair]()
        self._ours.callback(ours.close)
        self.rounds.attach(rank, SocketLink(theirs, self.rounds.wire_dtype))
        ours.settimeout(PATIENCE)
        return ours

    def channel(self, rank, kind="unix"):
        """A rank's channel through a socket of this kind, or through shared memory."""
        if kind == "shared":
            return self._shared(rank)
        capacity, wire_dtype = self.server.capacity, self.rounds.wire_dtype
        return SocketChannel(self.sock(rank, kind), self.ticket(rank), capacity, PATIENCE, wire_dtype)

    def _shared(self, rank):
        ours, theirs = socket.socketpair()
        self._ours.callback(ours.close)
        memory = Segment(_sharedmemory.reserve(self.server.capacity))
        _sharedmemory.send(theirs, [memory, self.rounds.results()])
        memory.close_fd()
        self.rounds.attach(rank, SharedMemoryLink(theirs, memory))
        segments = _sharedmemory.receive(ours, 2)
        return SharedMemoryChannel(ours, self.ticket(rank), self.server.capacity, PATIENCE, *segments)

    def end(self):
        """End the rounds; afterwards the thread has left."""
        self.rounds.close(RunAbortedError("the test is over"))
        self.join()

    def close(self):
        """End the rounds, and close the ranks' ends of their connections."""
        with self._ours:
            self.end()

    def join(self):
        """Wait until the thread has left."""
        self.rounds._thread.join(PATIENCE)
        assert not self.rounds._thread.is_alive()
        assert self.ended.is_set()


@contextlib.contextmanager
def hub(*args, **kwargs):
    """A hub for the length of the block."""
    opened = Hub(*args, **kwargs)
    try:
        yield opened
    finally:
        opened.close()


def fds():
    """The file descriptors of this process, and what they are."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def new_fds(before):
    """What is there and was not before."""
    return set(fds().items()) - set(before.items())


def no_new_fds(before):
    """Wait until nothing new is there. Errors that a test has caught hold what their frames held."""

    def is_true():
        if new_fds(before):
            gc.collect()
        return not new_fds(before)

    wait_until(is_true, what=lambda: f"left: {new_fds(before)}")


@contextlib.contextmanager
def dask_leaves_nothing(caplog):
    """No descriptor, and no word of Dask that it found something dangling."""
    before = fds()
    logger = logging.getLogger("distributed")
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)
    no_new_fds(before)
    records = [record for phase in ("call", "teardown") for record in caplog.get_records(phase)]
    assert [record.getMessage() for record in records if record.levelno >= logging.WARNING] == []


def round_threads():
    """The threads that serve rounds."""
    return [thread for thread in threading.enumerate() if thread.name == "daskps-rounds"]


def side_by_side(world_size, rank_does, n_bytes=1 << 20, kinds=MIXED, wire_dtype=None):
    """Call ``rank_does(rank, channel)`` on every rank at once; raise what went wrong first.

    A rank's channel is of the kind that stands at its place in ``kinds``, which is repeated.
    """
    errors = []

    def run(rank, channel):
        try:
            return rank_does(rank, channel)
        except BaseException as error:
            errors.append(error)
            opened.rounds.close(RunAbortedError(f"rank {rank} failed"))
            raise

    with hub(world_size, n_bytes, wire_dtype=wire_dtype) as opened, ThreadPoolExecutor(world_size) as pool:
        channels = [opened.channel(rank, kinds[rank % len(kinds)]) for rank in range(world_size)]
        futures = [pool.submit(run, rank, channel) for rank, channel in enumerate(channels)]
        pool.shutdown()
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


def combined(*contributions, kinds=MIXED):
    """What every rank gets from one round in which each contributed its (values, weight, reduction)."""

    def rank_does(rank, channel):
        return channel.push_pull(*contributions[rank]).copy()

    results = side_by_side(len(contributions), rank_does, kinds=kinds)
    assert len({(result.dtype, result.tobytes()) for result in results}) == 1
    return results[0]


def filled(channel, values, dtype="float64"):
    """Values in the room that the channel has for them."""
    room = channel.allocate(len(values), dtype)
    np.copyto(room, values)
    return room


def replica_of(net):
    """A rank's copy of an initialised net, with the callbacks that run on ranks."""
    callbacks = _hooks.rank_side(net)
    dumped = _state.dump_callbacks(net, callbacks) if callbacks else b""
    return _replica.build(_replica.open_with(net, None, dumped, RULES))


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

    n_bytes = -(-capacity(net) // 64) * 64  # as a rank says when it joins
    return side_by_side(len(batches_by_rank), rank_does, n_bytes)
