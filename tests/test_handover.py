"""Taking the socket of a connection of Dask off the event loop, on real connections."""

import asyncio
import contextlib
import gc
import socket
import ssl

import pytest
from distributed.comm import CommClosedError, connect, listen
from distributed.security import Security
from ranks import dask_leaves_nothing

from daskps._handover import can_be_taken, take_socket
from daskps._links import receive_into

# What nobody closed says so when it is collected.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

MEGABYTES = 4 << 20


@pytest.fixture(scope="module")
def security():
    pytest.importorskip("cryptography")
    return Security.temporary()


@pytest.fixture(params=["tcp", "tls"])
def options(request):
    """How to listen and how to connect."""
    if request.param == "tcp":
        return "tcp://127.0.0.1:0", {}, {}
    given = request.getfixturevalue("security")
    return "tls://127.0.0.1:0", given.get_listen_args("scheduler"), given.get_connection_args("worker")


@pytest.fixture(autouse=True)
def nothing_is_left(caplog):
    with dask_leaves_nothing(caplog):
        yield
        gc.collect()


@contextlib.asynccontextmanager
async def comms(options):
    """The two ends of a connection of Dask, after its handshake."""
    address, listening, connecting = options
    accepted, over = asyncio.Queue(), asyncio.Event()

    async def keep(comm):
        accepted.put_nowait(comm)
        await over.wait()

    async with listen(address, keep, deserialize=False, **listening) as listener:
        ours = await connect(listener.contact_address, deserialize=False, **connecting)
        theirs = await accepted.get()
        try:
            yield ours, theirs
        finally:
            over.set()
            ours.abort()
            theirs.abort()


def receive(sock, n_bytes):
    data = bytearray(n_bytes)
    receive_into(sock, memoryview(data))
    return bytes(data)


async def in_threads(*calls):
    """What calls return that block, all at once."""
    return await asyncio.wait_for(asyncio.gather(*(asyncio.to_thread(*call) for call in calls)), 60)


async def assert_bytes_flow(first, second):
    """In one direction and then in the other, more than any buffer holds."""
    for sender, receiver in ((first, second), (second, first)):
        data = bytes(range(256)) * (MEGABYTES // 256)
        _, received = await in_threads((sender.sendall, data), (receive, receiver, len(data)))
        assert received == data


class TestTakeSocket:
    def test_gives_blocking_sockets_that_are_connected_with_each_other(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                assert can_be_taken(ours)
                assert can_be_taken(theirs)
                with await take_socket(ours) as first, await take_socket(theirs) as second:
                    assert (first.getblocking(), second.getblocking()) == (True, True)
                    assert first.getpeername() == second.getsockname()
                    await assert_bytes_flow(first, second)

        asyncio.run(scenario())

    def test_after_messages_went_both_ways_loses_none_of_them(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                for number in range(20):
                    await ours.write({"number": number, "data": b"x" * 100_000})
                    assert (await theirs.read())["number"] == number
                    await theirs.write({"number": -number})
                    assert (await ours.read())["number"] == -number
                with await take_socket(ours) as first, await take_socket(theirs) as second:
                    await assert_bytes_flow(first, second)

        asyncio.run(scenario())

    def test_waits_until_the_last_message_is_on_its_way(self, options):
        """The message is larger than the buffers, and the peer has not begun to read."""

        async def scenario():
            async with comms(options) as (ours, theirs):
                await ours.write({"data": b"x" * MEGABYTES})
                taking = asyncio.create_task(take_socket(ours))
                message = await theirs.read()
                assert len(message["data"]) == MEGABYTES
                with await asyncio.wait_for(taking, 60) as first, await take_socket(theirs) as second:
                    await assert_bytes_flow(first, second)

        asyncio.run(scenario())

    def test_what_the_peer_sends_as_soon_as_it_may_is_not_lost(self, options):
        """As in joining: this end says ok and takes its socket; the other is faster."""

        async def scenario():
            async with comms(options) as (ours, theirs):
                await theirs.write("ok")
                second = await take_socket(theirs)
                assert await ours.read() == "ok"
                with second, await take_socket(ours) as first:
                    first.sendall(b"at once")
                    assert await in_threads((receive, second, 7)) == [b"at once"]

        asyncio.run(scenario())

    def test_comm_counts_as_closed_and_does_nothing_any_more(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                with await take_socket(ours) as first, await take_socket(theirs) as second:
                    for comm in (ours, theirs):
                        assert comm.closed()
                        with pytest.raises(CommClosedError):
                            await comm.write("text")
                        with pytest.raises(CommClosedError):
                            await comm.read()
                        assert not can_be_taken(comm)
                        comm.abort()
                        await comm.close()
                        repr(comm)
                    del ours, theirs
                    gc.collect()
                    await assert_bytes_flow(first, second)

        asyncio.run(scenario())

    def test_event_loop_does_not_look_at_it_any_more(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                with await take_socket(ours) as first, await take_socket(theirs) as second:
                    watched = {key.fileobj for key in selector().get_map().values()}
                    assert not {first.fileno(), second.fileno()} & watched

        def selector():
            return asyncio.get_running_loop()._selector

        asyncio.run(scenario())

    def test_works_after_the_loop_it_came_from_is_closed(self, options):
        """A rank's loop lives for the length of joining."""

        async def scenario():
            async with comms(options) as (ours, theirs):
                return await take_socket(ours), await take_socket(theirs)

        first, second = asyncio.run(scenario())
        with first, second:
            asyncio.run(assert_bytes_flow(first, second))

    def test_end_of_one_is_seen_by_the_other(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                with await take_socket(ours) as first, await take_socket(theirs) as second:
                    # As `hang_up` does it, from another thread than the one that reads.
                    reading = asyncio.create_task(in_threads((outcome, receive, second, 1)))
                    socket.socket.shutdown(first, socket.SHUT_RDWR)
                    (error,) = await reading
                    assert isinstance(error, (EOFError, OSError))

        asyncio.run(scenario())

    def test_deadline_of_the_socket_holds(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                with await take_socket(ours) as first, await take_socket(theirs):
                    first.settimeout(0.05)
                    (error,) = await in_threads((outcome, receive, first, 1))
                    assert isinstance(error, TimeoutError)

        asyncio.run(scenario())


def outcome(of, *arguments):
    try:
        return of(*arguments)
    except Exception as error:
        return error


def test_tls_stays_tls_and_knows_its_peer(security):
    options = (
        "tls://127.0.0.1:0",
        security.get_listen_args("scheduler"),
        security.get_connection_args("worker"),
    )

    async def scenario():
        async with comms(options) as (ours, theirs):
            with await take_socket(ours) as first, await take_socket(theirs) as second:
                for sock in (first, second):
                    assert isinstance(sock, ssl.SSLSocket)
                    assert sock.cipher() is not None
                    assert sock.getpeercert(binary_form=True)

    asyncio.run(scenario())


class TestCanBeTaken:
    def test_is_false_where_there_is_no_socket(self):
        async def scenario():
            async with comms(("inproc://", {}, {})) as (ours, theirs):
                assert not can_be_taken(ours)
                assert not can_be_taken(theirs)

        asyncio.run(scenario())

    def test_is_false_after_either_end_has_closed(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                await ours.close()
                assert not can_be_taken(ours)
                with pytest.raises(CommClosedError):
                    await theirs.read()
                assert not can_be_taken(theirs)

        asyncio.run(scenario())

    def test_is_false_while_somebody_reads(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                reading = asyncio.create_task(ours.read())
                await asyncio.sleep(0)
                assert not can_be_taken(ours)
                await theirs.write("text")
                assert await reading == "text"
                assert can_be_taken(ours)

        asyncio.run(scenario())

    def test_is_false_while_something_is_there_that_was_not_read(self, options):
        async def scenario():
            async with comms(options) as (ours, theirs):
                await theirs.write("first")
                await theirs.write("second")
                assert await ours.read() == "first"
                for _ in range(1000):  # tornado looks at an idle connection, to see its end
                    if ours.stream._read_buffer_size:
                        break
                    await asyncio.sleep(0.01)
                assert not can_be_taken(ours)
                assert await ours.read() == "second"
                assert can_be_taken(ours)

        asyncio.run(scenario())

    @pytest.mark.parametrize("part", ["io_loop", "socket", "_read_buffer_size", "_closed"])
    def test_is_false_for_a_tornado_that_we_do_not_know(self, part):
        class Stream:
            io_loop = _closed = None
            socket = socket.socket
            _read_buffer_size = 0

            def set_close_callback(self, callback):
                pass

            def reading(self):
                return False

            closed = reading

        class Comm:
            stream = Stream()

        delattr(Stream, part)
        assert not can_be_taken(Comm())
