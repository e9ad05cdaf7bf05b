"""The scheduler's half of how a rank joins: which road its values take.

Whether a rank shares the scheduler's host is found out by connecting, never by comparing names. Where
that fails, the connection on which the rank asked is taken off both event loops; where it cannot be,
Dask goes on reading and writing it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from contextlib import suppress
from typing import Any

from distributed.comm import Comm
from distributed.protocol import Serialized
from distributed.system import MEMORY_LIMIT

from daskps import _sharedmemory, _wire
from daskps._handover import can_be_taken, take_socket
from daskps._links import SharedMemoryLink, SocketLink
from daskps._rounds import RoundServer
from daskps._sharedmemory import Segment
from daskps.exceptions import InvalidMessageError

TOKEN_BYTES = 32

logger = logging.getLogger("daskps")


def refusal(error: BaseException) -> dict:
    """What a rank reads that may not join."""
    return {"status": "refused", "kind": type(error).__name__, "reason": str(error)}


def refuse_impossible(rounds: RoundServer, rank: int, capacity: int) -> None:
    """Refuse a rank that nobody waits for, and contributions that could not be added up here.

    Raises
    ------
    InvalidMessageError
        If it is one of these.
    """
    if not rounds.expects(rank):
        raise InvalidMessageError(f"rank {rank} of run {rounds.server.run_id} is none, or there already")
    if capacity > MEMORY_LIMIT:
        raise InvalidMessageError(
            f"contributions of {capacity} bytes are larger than the scheduler's memory of {MEMORY_LIMIT}"
        )


async def join(
    comm: Comm, rounds: RoundServer, rank: int, shared_memory: bool, timeout: float
) -> asyncio.Task | None:
    """Agree with a rank on a road and attach it to the rounds of its run.

    Returns
    -------
    Task or None
        What moves the rank's messages where nothing else can.

    Raises
    ------
    OSError, CommClosedError
        If the rank is gone.
    InvalidMessageError
        If it says something else than a rank would.
    """
    if shared_memory and _sharedmemory.is_available():
        link = await _share_memory(comm, rounds, timeout)
        if link is not None:
            rounds.attach(rank, link)
            return None
    await comm.write({"status": "OK", "road": "socket"})
    hand_over = await _says(comm, "can_be_taken", timeout) and can_be_taken(comm)
    await comm.write({"status": "OK", "hand_over": hand_over})
    if hand_over:
        rounds.attach(rank, SocketLink(await take_socket(comm), rounds.wire_dtype))
        return None
    ours, other = socket.socketpair()
    ours.setblocking(False)
    rounds.attach(rank, SocketLink(other, rounds.wire_dtype))
    return asyncio.create_task(_carry_messages(comm, ours))


async def _says(comm: Comm, what: str, timeout: float) -> bool:
    message = await asyncio.wait_for(comm.read(), timeout)
    if not isinstance(message, dict) or not isinstance(message.get(what), bool):
        raise InvalidMessageError(f"a rank that joins has to say whether {what!r}, it said something else")
    return bool(message[what])


async def _share_memory(comm: Comm, rounds: RoundServer, timeout: float) -> SharedMemoryLink | None:
    listener, name = _sharedmemory.listen()
    token = secrets.token_bytes(TOKEN_BYTES)
    passing = asyncio.create_task(_pass_memory(listener, token, rounds))
    link = None
    try:
        await comm.write({"status": "OK", "road": "shared-memory", "name": name, "token": token})
        if await _says(comm, "mapped", timeout):
            link = await asyncio.wait_for(passing, timeout)
        return link
    finally:
        passing.cancel()
        await asyncio.wait([passing])  # it still looks at the listener
        listener.close()
        if link is None and not passing.cancelled() and passing.exception() is None:
            passing.result().close()  # the rank could not map what it got, or is gone


async def _pass_memory(listener: socket.socket, token: bytes, rounds: RoundServer) -> SharedMemoryLink:
    """Wait for the rank to connect, and pass it the memory.

    A stranger, whom the name of the listener does not stop, finds the connection closed; and so does
    the rank if there is no memory.
    """
    loop = asyncio.get_running_loop()
    while True:
        sock, _ = await loop.sock_accept(listener)
        try:
            if _sharedmemory.is_same_user(sock) and await _shows(sock, token):
                # In a thread: the kernel clears what it gives, and much of it takes a while.
                memory = await asyncio.to_thread(_passed, sock, rounds)
                return SharedMemoryLink(sock, memory)
        except OSError as error:
            logger.debug("no shared memory for a rank of run %s: %r", rounds.server.run_id, error)
        except BaseException:
            sock.close()
            raise
        sock.close()


async def _shows(sock: socket.socket, token: bytes) -> bool:
    sock.setblocking(False)
    shown = await asyncio.get_running_loop().sock_recv(sock, TOKEN_BYTES)
    return hmac.compare_digest(shown, token)


def _passed(sock: socket.socket, rounds: RoundServer) -> Segment:
    """Memory for a rank's contributions, after it was passed to the rank with that of the results."""
    memory = Segment(_sharedmemory.reserve(rounds.server.capacity))
    try:
        sock.setblocking(True)
        _sharedmemory.send(sock, [memory, rounds.results()])
    finally:
        memory.close_fd()
    return memory


async def _carry_messages(comm: Comm, sock: socket.socket) -> None:
    """Carry a rank's messages between its comm and the thread that serves the rounds."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            message = await comm.read()
            with suppress(BrokenPipeError, ConnectionResetError):  # refused: why is the answer
                for frame in _frames(message):
                    await loop.sock_sendall(sock, frame)
            await comm.write({"data": Serialized({}, await _answer(loop, sock))})
    finally:
        sock.close()


def _frames(message: Any) -> list[Any]:
    """The bytes of a message; of one that has none, bytes that the server of the rounds refuses."""
    try:
        return list(message["data"].frames)
    except (KeyError, TypeError, AttributeError):
        return [bytes(_wire.PUSH_BYTES)]


async def _answer(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> list[Any]:
    header = await _receive(loop, sock, _wire.ANSWER_BYTES)
    rest = await _receive(loop, sock, _wire.following_bytes(header))
    return [header, rest] if rest else [header]


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, n_bytes: int) -> bytes:
    data = bytearray(n_bytes)
    view = memoryview(data)
    while len(view):
        received = await loop.sock_recv_into(sock, view)
        if not received:
            raise EOFError("the rounds ended")
        view = view[received:]
    return bytes(data)
