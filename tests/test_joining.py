"""How a rank and the scheduler agree on a road: both halves, on real connections, without a cluster."""

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from distributed.comm import connect, listen
from distributed.protocol import to_serialize
from distributed.security import Security
from probes import wait_until
from ranks import RULES, RUN_ID, dask_leaves_nothing, round_threads

from daskps import _connecting, _joining, _sharedmemory
from daskps._connecting import open_channel
from daskps._generation import Generation, Terms
from daskps._leases import Request
from daskps._scheduler_plugin import DaskpsSchedulerPlugin
from daskps._spec import Ticket
from daskps._transport import CommChannel, SharedMemoryChannel, SocketChannel
from daskps.exceptions import (
    DaskpsError,
    InvalidMessageError,
    RoundTimeoutError,
    RunAbortedError,
    StaleMessageError,
    WorkerLostError,
)

# What nobody closed says so when it is collected.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

AUTO, COMM = RULES._replace(transport="auto"), RULES._replace(transport="comm")
CAPACITY = 1 << 20


class Worker:
    """Knows where the scheduler is, and how to connect."""

    def __init__(self, address, connection_args):
        self.scheduler = self
        self.address = address
        self.connection_args = connection_args


class Scheduler:
    """The plugin's handler, on an event loop in a thread, behind a listener of Dask."""

    def __init__(self, world_size, address="tcp://127.0.0.1:0", listening=None, connecting=None):
        self._world_size = world_size
        self._where = address, listening or {}
        self._connecting = connecting or {}
        self.handled = []

    def __enter__(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        assert ready.wait(60)
        return self

    def __exit__(self, *error):
        self.call(self.over.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _serve(self, ready):
        self.loop, self.over = asyncio.get_running_loop(), asyncio.Event()
        self.plugin = DaskpsSchedulerPlugin()
        self.plugin.runs = {}
        terms = Terms("client", Request(RUN_ID, None, 100), None, {}, RULES)
        self.run = Generation(RUN_ID, terms, ["address"] * self._world_size)
        self.run.serve(lambda: None)
        self.plugin.runs[RUN_ID] = self.run
        address, listening = self._where
        async with listen(address, self._handle, deserialize=False, **listening) as listener:
            self.worker = Worker(listener.contact_address, self._connecting)
            ready.set()
            await self.over.wait()
            self.run.close(RunAbortedError("the test is over"))
            await asyncio.wait_for(asyncio.gather(*self.handled), 60)
        if self.run.rounds is not None:
            await asyncio.to_thread(self.run.rounds._thread.join, 60)

    async def _handle(self, comm):
        self.handled.append(asyncio.current_task())
        message = await comm.read()
        assert message.pop("op").startswith("daskps_join")
        assert message.pop("reply") is False
        await self.plugin.join_with(comm, **message)
        assert comm.closed()

    def call(self, function, *arguments):
        """Call something on the event loop, as Dask does."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def join(self, rank, rules=AUTO, capacity=CAPACITY, run_id=RUN_ID, generation=0):
        ticket = Ticket(run_id, generation, rank, self._world_size)
        return open_channel(self.worker, ticket, capacity, rules)


@pytest.fixture(autouse=True)
def nothing_is_left(caplog):
    threads = round_threads()
    with dask_leaves_nothing(caplog):
        yield
        assert round_threads() == threads


@pytest.fixture(scope="module")
def security():
    pytest.importorskip("cryptography")
    return Security.temporary()


@pytest.fixture
def tls(security):
    return {
        "address": "tls://127.0.0.1:0",
        "listening": security.get_listen_args("scheduler"),
        "connecting": security.get_connection_args("worker"),
    }


def no_neighbour(name, timeout):
    raise ConnectionRefusedError("there is no listener of this name here")


def no_memory(n_bytes):
    raise OSError("there is no memory")


def cannot_be_taken(comm):
    return False


# What is changed, and which channel a rank gets then.
ROADS = {
    "shared memory": ({}, AUTO, SharedMemoryChannel),
    "as told": ({}, COMM, SocketChannel),
    "another host": ({"_sharedmemory.connect": no_neighbour}, AUTO, SocketChannel),
    "no memory": ({"_sharedmemory.reserve": no_memory}, AUTO, SocketChannel),
    "no memfd": ({"_sharedmemory.is_available": lambda: False}, AUTO, SocketChannel),
    "scheduler keeps its socket": ({"_joining.can_be_taken": cannot_be_taken}, COMM, CommChannel),
    "rank keeps its socket": ({"_connecting.can_be_taken": cannot_be_taken}, COMM, CommChannel),
    "another host, messages": (
        {"_sharedmemory.connect": no_neighbour, "_joining.can_be_taken": cannot_be_taken},
        AUTO,
        CommChannel,
    ),
}


@pytest.fixture(params=ROADS)
def road(request, monkeypatch):
    changes, rules, kind = ROADS[request.param]
    for name, value in changes.items():
        monkeypatch.setattr(f"daskps.{name}", value)
    return rules, kind


def use(channels, rank_does):
    """What all ranks return at once; every channel is closed afterwards."""

    def run(rank, channel):
        try:
            return rank_does(rank, channel)
        except Exception as error:
            return error
        finally:
            channel.close()

    with ThreadPoolExecutor(len(channels)) as pool:
        return list(pool.map(run, range(len(channels)), channels))


VALUES = [np.random.default_rng(rank).normal(size=100_000).astype("float32") for rank in range(3)]
SUM = VALUES[0] + VALUES[1] + VALUES[2]


def add_ones(rank, channel):
    return channel.push_pull(np.ones(1), 1.0, "sum").tolist()


def meet(rank, channel):
    """Several rounds of several kinds, and the bits of the largest."""
    assert channel.push_pull(np.array([rank], "float64"), 0.0, "mean").size == 0
    assert channel.push_pull(np.array([rank, np.nan]), float(rank == 1), "sum").tolist()[0] == 1.0
    room = channel.allocate(100_000, "float32")
    np.copyto(room, VALUES[rank])
    for _ in range(2):
        result = channel.push_pull(room, 1.0, "sum").tobytes()
    assert channel.push_pull(np.ones(300_000), 1.0, "sum").tolist() == [3.0] * 300_000
    assert channel.traffic.rounds == 4 + 3
    return result


class TestRoads:
    def test_lead_to_the_same_bits(self, road):
        rules, kind = road
        with Scheduler(3) as scheduler:
            channels = [scheduler.join(rank, rules) for rank in range(3)]
            assert [type(channel) for channel in channels] == [kind] * 3
            assert use(channels, meet) == [SUM.tobytes()] * 3

    def test_lead_to_the_same_bits_on_tls(self, road, tls):
        rules, kind = road
        with Scheduler(3, **tls) as scheduler:
            channels = [scheduler.join(rank, rules) for rank in range(3)]
            assert [type(channel) for channel in channels] == [kind] * 3
            assert use(channels, meet) == [SUM.tobytes()] * 3

    def test_may_be_mixed_in_one_run(self, monkeypatch):
        with Scheduler(3) as scheduler:
            channels = [scheduler.join(0, AUTO), scheduler.join(1, COMM)]
            monkeypatch.setattr(_joining, "can_be_taken", cannot_be_taken)
            channels.append(scheduler.join(2, COMM))
            kinds = [SharedMemoryChannel, SocketChannel, CommChannel]
            assert [type(channel) for channel in channels] == kinds
            assert use(channels, meet) == [SUM.tobytes()] * 3

    @pytest.mark.parametrize("rules", [AUTO, COMM], ids=["auto", "comm"])
    def test_within_one_process(self, rules):
        """An inproc connection has no socket; what the ranks share is memory, or messages."""

        async def scenario():
            with Scheduler(3, "inproc://") as scheduler:
                joining = (asyncio.to_thread(scheduler.join, rank, rules) for rank in range(3))
                channels = await asyncio.gather(*joining)
                return [type(channel) for channel in channels], await asyncio.to_thread(use, channels, meet)

        kind = SharedMemoryChannel if rules is AUTO else CommChannel
        assert asyncio.run(scenario()) == ([kind] * 3, [SUM.tobytes()] * 3)

    def test_say_what_they_are(self, road):
        rules, kind = road
        names = ["shared-memory", "comm", "comm (messages)"]
        with Scheduler(2) as scheduler:
            channel = scheduler.join(1, rules)
            assert channel.kind == names[[SharedMemoryChannel, SocketChannel, CommChannel].index(kind)]
            channel.close()

    def test_a_world_of_one_needs_none(self):
        with Scheduler(1) as scheduler:
            channel = scheduler.join(0)
            assert channel.kind == "none"
            values = np.ones(3)
            assert channel.push_pull(values, 2.0, "mean") is values
            channel.close()

    def test_capacity_is_rounded_up_to_a_cache_line(self):
        with Scheduler(2) as scheduler:
            channels = [scheduler.join(rank, capacity=n_bytes) for rank, n_bytes in enumerate([65, 120])]
            assert scheduler.run.server.capacity == 128
            for channel in channels:
                channel.close()


class TestRefused:
    @pytest.mark.parametrize("wrong", [{"run_id": "f" * 32}, {"generation": 1}])
    def test_is_who_comes_too_late(self, wrong):
        with Scheduler(2) as scheduler, pytest.raises(StaleMessageError, match="is not open"):
            scheduler.join(0, **wrong)

    def test_is_who_comes_to_a_world_of_one_too_late(self):
        with Scheduler(1) as scheduler, pytest.raises(StaleMessageError, match="is not open"):
            scheduler.join(0, run_id="f" * 32)

    def test_is_who_has_another_net_than_the_others(self):
        with Scheduler(2) as scheduler:
            first = scheduler.join(0)
            with pytest.raises(InvalidMessageError, match="128 bytes, others have 1048576"):
                scheduler.join(1, capacity=100)
            first.close()

    @pytest.mark.parametrize("rules", [AUTO, COMM], ids=["auto", "comm"])
    @pytest.mark.parametrize("rank", [0, 3])
    def test_is_a_rank_that_is_there_or_none(self, rank, rules):
        with Scheduler(3) as scheduler:
            channels = [scheduler.join(rank, rules) for rank in range(2)]
            # A rank knows that it has joined a moment before the server does.
            wait_until(lambda: len(scheduler.run.rounds.kinds()) == 2)
            with pytest.raises(InvalidMessageError, match=f"rank {rank} of run .* is none, or there"):
                scheduler.join(rank, rules)
            channels.append(scheduler.join(2, rules))
            assert use(channels, meet) == [SUM.tobytes()] * 3


def two_of_three(road, event):
    """What two ranks get that wait in a round for the third, which lets something happen and goes."""
    rules, _ = road
    with Scheduler(3) as scheduler:
        channels = [scheduler.join(rank, rules) for rank in range(3)]

        def rank_does(rank, channel):
            if rank < 2:
                return channel.push_pull(np.ones(3), 1.0, "mean")
            wait_until(lambda: scheduler.run.server.missing() == [2])
            return event(scheduler)  # and its channel is closed

        return use(channels, rank_does)[:2]


class TestFailure:
    def test_reaches_all_that_wait_on_every_road(self, road):
        def fail(scheduler):
            scheduler.call(scheduler.run.rounds.fail, WorkerLostError("worker 2 left"))
            scheduler.run.rounds._thread.join(60)

        for error in two_of_three(road, fail):
            assert type(error) is WorkerLostError
            assert str(error) == "worker 2 left"

    def test_of_a_contribution_reaches_all_on_every_road(self, road):
        rules, _ = road
        with Scheduler(2) as scheduler:
            channels = [scheduler.join(rank, rules) for rank in range(2)]
            errors = use(channels, lambda rank, channel: channel.push_pull(np.ones(rank + 1), 1.0, "mean"))
        assert [type(error) for error in errors] == [InvalidMessageError] * 2

    def test_of_a_rank_that_closes_ends_the_run_on_every_road(self, road):
        errors = two_of_three(road, lambda scheduler: None)
        assert [type(error) for error in errors] == [RunAbortedError] * 2

    def test_end_of_the_run_is_seen_on_every_road(self, road):
        rules, _ = road
        with Scheduler(2) as scheduler:
            channels = [scheduler.join(rank, rules) for rank in range(2)]

            def rank_does(rank, channel):
                if rank == 0:
                    return channel.push_pull(np.ones(3), 1.0, "mean")
                wait_until(lambda: scheduler.run.server.missing() == [1])
                scheduler.call(scheduler.run.close, RunAbortedError("the client closed the run"))
                scheduler.run.rounds._thread.join(60)
                return channel.push_pull(np.ones(3), 1.0, "mean")

            errors = use(channels, rank_does)
        assert [type(error) for error in errors] == [RunAbortedError] * 2

    def test_deadline_is_told_on_every_road(self, road):
        rules, _ = road
        with Scheduler(2) as scheduler:
            channels = [scheduler.join(rank, rules) for rank in range(2)]
            scheduler.run.rounds._timeout = 0.2  # not for joining, which is slower
            errors = use(channels[:1], lambda rank, channel: channel.push_pull(np.ones(3), 1.0, "mean"))
            assert type(errors[0]) is RoundTimeoutError
            assert "daskps.timeouts.round" in str(errors[0])
            channels[1].close()


# Whoever unpickles it is found out.


UNPICKLED = []


class Trap:
    def __reduce__(self):
        return UNPICKLED.append, ("x" * 1000,)


class TestMessages:
    """Where Dask reads and writes the connection, a rank can send any message that Dask can."""

    @pytest.fixture(autouse=True)
    def messages(self, monkeypatch):
        monkeypatch.setattr(_joining, "can_be_taken", cannot_be_taken)

    @pytest.mark.parametrize(
        "odd",
        [
            {"data": to_serialize(Trap())},
            {"data": [1]},
            {"x": 1},
            [],
            "x",
            {"data": to_serialize(b"x" * 99)},
        ],
        ids=["pickle", "list", "other", "no dict", "text", "bytes"],
    )
    def test_that_are_odd_are_refused_to_all_and_nothing_is_unpickled(self, odd):
        assert pickle.dumps(Trap())
        with Scheduler(2) as scheduler:
            channels = [scheduler.join(rank, COMM) for rank in range(2)]
            assert [type(channel) for channel in channels] == [CommChannel] * 2

            def rank_does(rank, channel):
                if rank == 0:
                    return channel.push_pull(np.ones(3), 1.0, "mean")
                wait_until(lambda: scheduler.run.server.missing() == [1])
                channel._loop.run_until_complete(channel._comm.write(odd))
                return channel._answer()

            errors = use(channels, rank_does)
        assert {type(error) for error in errors} <= {InvalidMessageError, StaleMessageError}, errors
        assert UNPICKLED == []


class TestUnreachable:
    HASTY = AUTO._replace(connect=1.0)

    def test_scheduler_is_an_error_that_says_so(self):
        async def free_address():
            async with listen("tcp://127.0.0.1:0", lambda comm: None) as listener:
                return listener.contact_address

        worker = Worker(asyncio.run(free_address()), {})
        with pytest.raises(DaskpsError, match=r"cannot be reached.*timeouts\.connect") as raised:
            open_channel(worker, Ticket(RUN_ID, 0, 0, 2), CAPACITY, self.HASTY)
        assert raised.type is DaskpsError  # a cause: for a consequence the client looks for the cause

    def test_scheduler_that_says_nothing_is_an_error_after_a_while(self, monkeypatch):
        async def silent(self, comm, **message):
            await self.runs[RUN_ID].over.wait()
            comm.abort()

        monkeypatch.setattr(DaskpsSchedulerPlugin, "join", silent)
        with Scheduler(2) as scheduler, pytest.raises(DaskpsError, match=r"answer.*timeouts\.connect"):
            scheduler.join(0, self.HASTY)

    def test_scheduler_that_hangs_up_is_an_error(self, monkeypatch):
        async def hang_up(self, comm, **message):
            comm.abort()

        monkeypatch.setattr(DaskpsSchedulerPlugin, "join", hang_up)
        with Scheduler(2) as scheduler, pytest.raises(RunAbortedError, match="hung up"):
            scheduler.join(0, AUTO)

    @pytest.mark.parametrize("said", [0, 1, 2])
    def test_rank_leaves_nothing_at_the_scheduler(self, said):
        """It asks to join and goes, at one point or another."""

        async def rank(worker):
            comm = await connect(worker.address, deserialize=False)
            if said > 0:
                joining = _connecting._Joining(worker, Ticket(RUN_ID, 0, 0, 2), CAPACITY, AUTO)
                await comm.write(joining._request())
            if said > 1:
                assert (await comm.read())["road"] == "shared-memory"
                await comm.write({"mapped": False})
                assert (await comm.read())["road"] == "socket"
            comm.abort()

        with Scheduler(2) as scheduler:
            if said:
                asyncio.run(rank(scheduler.worker))
                wait_until(lambda: scheduler.handled and scheduler.handled[0].done())
                assert scheduler.handled[0].exception() is None
            assert scheduler.run.rounds.kinds() == []
            channels = [scheduler.join(rank) for rank in range(2)]
            assert (
                use(channels, lambda rank, channel: channel.push_pull(np.ones(1), 1.0, "sum")[0])
                == [2.0] * 2
            )


def test_memory_of_a_rank_that_could_not_map_it_is_given_back(monkeypatch):
    """The rank has connected and got descriptors, and finds that it cannot use them."""
    received = []

    def receive(sock, count):
        received.append(original(sock, count))
        raise ValueError("cannot mmap")

    original = _sharedmemory.receive
    monkeypatch.setattr(_sharedmemory, "receive", receive)
    with Scheduler(2) as scheduler:
        channels = [scheduler.join(rank) for rank in range(2)]
        assert [type(channel) for channel in channels] == [SocketChannel] * 2
        assert len(received) == 2
        received.clear()
        assert use(channels, add_ones) == [[2.0]] * 2


def test_refusal_names_the_error():
    assert _joining.refusal(DaskpsError("why")) == {
        "status": "refused",
        "kind": "DaskpsError",
        "reason": "why",
    }
