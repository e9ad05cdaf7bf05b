"""The scheduler's half of how a rank joins: which road its values take.

Whether a rank shares the scheduler's host is found out by connecting, never by comparing names. Where
that fails, the connection on which the rank asked is taken off both event loops; where it cannot be,
Dask goes on reading and writing it.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
from typing import Any

from distributed.comm import Comm
from distributed.protocol import Serialized

from daskps import _sharedmemory, _wire
from daskps._handover import can_be_taken, take_socket
from daskps._links import SharedMemoryLink, SocketLink
from daskps._rounds import RoundServer
from daskps._sharedmemory import Segment

TOKEN_BYTES = 32


def refusal(error: BaseException) -> dict:
    """What a rank reads that may not join."""
    return {"status": "refused", "kind": type(error).__name__, "reason": str(error)}


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
    """
    if shared_memory and _sharedmemory.is_available():
        link = await _share_memory(comm, rounds, timeout)
        if link is not None:
            rounds.attach(rank, link)
            return None
    await comm.write({"status": "OK", "road": "socket"})
    theirs = await asyncio.wait_for(comm.read(), timeout)
    hand_over = bool(theirs["can_be_taken"]) and can_be_taken(comm)
    await comm.write({"status": "OK", "hand_over": hand_over})
    if hand_over:
        rounds.attach(rank, SocketLink(await take_socket(comm)))
        return None
    ours, other = socket.socketpair()
    ours.setblocking(False)
    rounds.attach(rank, SocketLink(other))
    return asyncio.create_task(_carry_messages(comm, ours))


async def _share_memory(comm: Comm, rounds: RoundServer, timeout: float) -> SharedMemoryLink | None:
    listener, name = _sharedmemory.listen()
    token = secrets.token_bytes(TOKEN_BYTES)
    passing = asyncio.create_task(_pass_memory(listener, token, rounds))
    try:
        await comm.write({"status": "OK", "road": "shared-memory", "name": name, "token": token})
        verdict = await asyncio.wait_for(comm.read(), timeout)
        if verdict["mapped"]:
            return await asyncio.wait_for(passing, timeout)
        return None
    finally:
        passing.cancel()
        listener.close()


async def _pass_memory(
    listener: socket.socket, token: bytes, rounds: RoundServer
) -> SharedMemoryLink | None:
    """Wait for the rank to connect, and pass it the memory if it is the rank."""
    loop = asyncio.get_running_loop()
    sock, _ = await loop.sock_accept(listener)
    try:
        sock.setblocking(False)
        shown = await loop.sock_recv(sock, TOKEN_BYTES)
        if not (hmac.compare_digest(shown, token) and _sharedmemory.is_same_user(sock)):
            raise ConnectionError("a stranger asked for shared memory")
        memory = Segment(_sharedmemory.reserve(rounds.server.capacity))
        sock.setblocking(True)
        _sharedmemory.send(sock, [memory, rounds.results()])
        memory.close_fd()
        return SharedMemoryLink(sock, memory)
    except OSError:  # no memory, or a stranger: the rank finds the connection closed
        sock.close()
        return None


async def _carry_messages(comm: Comm, sock: socket.socket) -> None:
    """Carry a rank's messages between its comm and the thread that serves the rounds."""
    loop = asyncio.get_running_loop()
    try:
        while True:
            message = await comm.read()
            for frame in message["data"].frames:
                await loop.sock_sendall(sock, frame)
            await comm.write({"data": Serialized({}, await _answer(loop, sock))})
    finally:
        sock.close()


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
