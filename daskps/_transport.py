"""How a rank's values reach the parameter server and the result comes back.

The one face of this module is ``push_pull``. Behind it there are three roads, chosen for each rank when
it joins: memory shared with the scheduler's process; the socket of a connection that Dask opened; and
that connection as Dask itself reads and writes it.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from distributed import Worker
from distributed.comm import Comm, CommClosedError, connect
from distributed.protocol import Serialized

from daskps import _sharedmemory, _wire
from daskps._handover import can_be_taken, take_socket
from daskps._links import receive_into
from daskps._sharedmemory import Segment
from daskps._spec import JOIN, Contribution, Reduction, Rules, Ticket
from daskps._wire import Answer
from daskps.exceptions import RoundTimeoutError, RunAbortedError


@dataclass
class Traffic:
    """What a channel has done so far: bytes both ways, seconds of waiting and of moving data."""

    rounds: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    sync_seconds: float = 0.0

    def since(self, before: Traffic) -> Traffic:
        """What has been added to an earlier reading."""
        return Traffic(
            self.rounds - before.rounds,
            self.bytes - before.bytes,
            self.wait_seconds - before.wait_seconds,
            self.sync_seconds - before.sync_seconds,
        )


class Channel(Protocol):
    """A rank's way to the parameter server."""

    kind: str
    traffic: Traffic

    def allocate(self, size: int, dtype: str) -> np.ndarray:
        """Room for values that are to be pushed; all rooms of a channel may be the same memory."""

    def push_pull(self, values: np.ndarray, weight: float, reduction: Reduction) -> np.ndarray:
        """Contribute to a round and return its result; empty if no rank had any weight.

        The result is valid until the next call.
        """

    def close(self) -> None:
        """Hang up."""


class SocketChannel:
    """Values travel through a blocking socket.

    Parameters
    ----------
    sock : socket
    ticket : Ticket
    capacity : int
        Bytes of the largest contribution to one round; a longer one takes several rounds.
    patience : float
        Seconds to wait for an answer.
    """

    kind = "comm"

    def __init__(self, sock: socket.socket, ticket: Ticket, capacity: int, patience: float) -> None:
        sock.settimeout(patience)
        self.traffic = Traffic()
        self._sock = sock
        self._ticket = ticket
        self._capacity = capacity
        self._patience = patience
        self._incoming = np.empty(0, "uint8")

    def allocate(self, size: int, dtype: str) -> np.ndarray:
        return np.empty(size, dtype)

    def push_pull(self, values: np.ndarray, weight: float, reduction: Reduction) -> np.ndarray:
        most = self._capacity // values.itemsize
        if len(values) <= most:
            return self._round(values, weight, reduction)
        # All ranks cut alike, also those of weight 0, since their buffers have the same length.
        pieces = [values[start : start + most] for start in range(0, len(values), most)]
        return np.concatenate([self._round(piece, weight, reduction).copy() for piece in pieces])

    def close(self) -> None:
        self._sock.close()

    def _round(self, values: np.ndarray, weight: float, reduction: Reduction) -> np.ndarray:
        begun = perf_counter()
        sent = values if weight > 0 else values[:0]
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused: why is the answer
                self._push(self._announced(sent, weight, reduction), sent)
            answer = self._answer()
            result = self._result(answer)
        except TimeoutError:
            raise RoundTimeoutError(f"the scheduler did not answer for {self._patience:g} s") from None
        except (EOFError, OSError, CommClosedError) as error:
            raise RunAbortedError(f"the scheduler closed the connection: {error}") from error
        self._note(sent.nbytes + result.nbytes, perf_counter() - begun, self._waited(answer, begun))
        return result

    def _announced(self, sent: np.ndarray, weight: float, reduction: Reduction) -> bytes:
        ticket = self._ticket
        return _wire.pack_push(
            Contribution(
                ticket.run_id,
                ticket.generation,
                ticket.rank,
                self.traffic.rounds,
                weight,
                reduction,
                len(sent),
                str(sent.dtype),
            )
        )

    def _push(self, header: bytes, sent: np.ndarray) -> None:
        self._sock.sendall(header)
        if len(sent):
            self._sock.sendall(sent.data.cast("B"))

    def _answer(self) -> Answer:
        header = self._receive(_wire.ANSWER_BYTES)
        return _wire.unpack_answer(header, self._receive(_wire.text_bytes(header)))

    def _receive(self, n_bytes: int) -> bytes:
        data = bytearray(n_bytes)
        receive_into(self._sock, memoryview(data))
        return bytes(data)

    def _result(self, answer: Answer) -> np.ndarray:
        n_bytes = answer.size * np.dtype(answer.dtype).itemsize
        if len(self._incoming) < n_bytes:
            self._incoming = np.empty(n_bytes, "uint8")
        result = self._incoming[:n_bytes]
        receive_into(self._sock, result.data)
        return result.view(answer.dtype)

    def _waited(self, answer: Answer, begun: float) -> float:
        return answer.waited

    def _note(self, n_bytes: int, seconds: float, waited: float) -> None:
        waited = min(max(waited, 0.0), seconds)
        self.traffic.rounds += 1
        self.traffic.bytes += n_bytes
        self.traffic.wait_seconds += waited
        self.traffic.sync_seconds += seconds - waited


class SharedMemoryChannel(SocketChannel):
    """Values lie in memory that the scheduler's process maps too; the socket carries headers.

    Parameters
    ----------
    sock, ticket, capacity, patience
        As of `SocketChannel`.
    memory : Segment
        For this rank's contributions.
    results : Segment
        Two places for results, which take turns: a rank may read one while the server writes the other.
    """

    kind = "shared-memory"

    def __init__(
        self,
        sock: socket.socket,
        ticket: Ticket,
        capacity: int,
        patience: float,
        memory: Segment,
        results: Segment,
    ) -> None:
        super().__init__(sock, ticket, capacity, patience)
        self._memory = memory
        self._results = results

    def allocate(self, size: int, dtype: str) -> np.ndarray:
        if size * np.dtype(dtype).itemsize > self._capacity:
            return super().allocate(size, dtype)
        return self._memory.values(dtype, size)

    def _push(self, header: bytes, sent: np.ndarray) -> None:
        place = self._memory.values(str(sent.dtype), len(sent))
        if sent.size and not np.shares_memory(place, sent):
            np.copyto(place, sent)
        self._sock.sendall(header)

    def _result(self, answer: Answer) -> np.ndarray:
        turn = (self.traffic.rounds + 1) % 2
        return self._results.values(answer.dtype, answer.size, turn * self._capacity)

    def _waited(self, answer: Answer, begun: float) -> float:
        return answer.complete - begun  # one clock: that of the host


class CommChannel(SocketChannel):
    """Dask reads and writes the connection, on an event loop of its own in the rank's thread."""

    kind = "comm (messages)"

    def __init__(
        self, comm: Comm, loop: asyncio.AbstractEventLoop, ticket: Ticket, capacity: int, patience: float
    ) -> None:
        self.traffic = Traffic()
        self._comm = comm
        self._loop = loop
        self._ticket = ticket
        self._capacity = capacity
        self._patience = patience
        self._rest = b""

    def close(self) -> None:
        self._comm.abort()
        if not self._loop.is_running():
            self._loop.close()

    def _push(self, header: bytes, sent: np.ndarray) -> None:
        frames = [header, sent.data.cast("B")] if len(sent) else [header]
        self._loop.run_until_complete(self._comm.write({"data": Serialized({}, frames)}))

    def _answer(self) -> Answer:
        reading = asyncio.wait_for(self._comm.read(), self._patience)
        frames = [bytes(frame) for frame in self._loop.run_until_complete(reading)["data"].frames]
        data = b"".join(frames)
        header, rest = data[: _wire.ANSWER_BYTES], data[_wire.ANSWER_BYTES :]
        n_text = _wire.text_bytes(header)
        self._rest = rest[n_text:]
        return _wire.unpack_answer(header, rest[:n_text])

    def _result(self, answer: Answer) -> np.ndarray:
        return np.frombuffer(bytearray(self._rest), answer.dtype)


class NoChannel:
    """World size 1: nobody to exchange with."""

    kind = "none"

    def __init__(self) -> None:
        self.traffic = Traffic()

    def allocate(self, size: int, dtype: str) -> np.ndarray:
        return np.empty(size, dtype)

    def push_pull(self, values: np.ndarray, weight: float, reduction: Reduction) -> np.ndarray:
        return values

    def close(self) -> None:
        pass


def open_channel(worker: Worker, ticket: Ticket, capacity: int, rules: Rules) -> Channel:
    """Connect a rank to the parameter server of its run.

    Parameters
    ----------
    worker : distributed.Worker
    ticket : Ticket
    capacity : int
        Bytes of the largest contribution to one round; the same on all ranks.
    rules : Rules

    Raises
    ------
    StaleMessageError
        If the run is not open on the scheduler any more.
    RunAbortedError
        If the scheduler cannot be reached within ``daskps.timeouts.connect``.
    """
    loop = asyncio.new_event_loop()
    joining = _Joining(worker, ticket, capacity, rules)
    try:
        channel = loop.run_until_complete(asyncio.wait_for(joining.run(loop), 2 * rules.connect))
    except (TimeoutError, OSError) as error:
        loop.close()
        raise RunAbortedError(f"cannot join the run at the scheduler: {error!r}") from error
    except BaseException:
        loop.close()
        raise
    if not isinstance(channel, CommChannel):
        loop.close()
    return channel


class _Joining:
    """The rank's half of joining."""

    def __init__(self, worker: Worker, ticket: Ticket, capacity: int, rules: Rules) -> None:
        self._worker = worker
        self._ticket = ticket
        self._capacity = -(-capacity // 64) * 64  # the second result begins on a cache line
        self._rules = rules
        # The server's deadline is the same. Its answer, which names the ranks that are missing, must
        # have a chance to come first.
        self._patience = rules.round + rules.connect

    async def run(self, loop: asyncio.AbstractEventLoop) -> Channel:
        worker = self._worker
        comm = await connect(
            worker.scheduler.address, self._rules.connect, deserialize=False, **worker.connection_args
        )
        keep = False
        try:
            await comm.write(self._request())
            greeting = await comm.read()
            if greeting["status"] != "OK":
                raise _wire.error_of(greeting["kind"], greeting["reason"])
            if greeting["road"] == "none":
                return NoChannel()
            if greeting["road"] == "shared-memory":
                channel = self._map(greeting)
                await comm.write({"mapped": channel is not None})
                if channel is not None:
                    return channel
                await comm.read()  # the other road
            keep = True
            return await self._take(comm, loop)
        finally:
            if not keep:
                comm.abort()

    def _request(self) -> dict:
        ticket = self._ticket
        return {
            "op": JOIN,
            "run_id": ticket.run_id,
            "rank": ticket.rank,
            "generation": ticket.generation,
            "capacity": self._capacity,
            "shared_memory": self._rules.transport != "comm" and _sharedmemory.is_available(),
            "reply": False,
        }

    def _map(self, greeting: dict) -> SharedMemoryChannel | None:
        try:
            sock = _sharedmemory.connect(greeting["name"], self._rules.connect)
        except OSError:  # another host, network namespace or user
            return None
        try:
            sock.sendall(greeting["token"])
            memory, results = _sharedmemory.receive(sock, 2)
        except (OSError, ValueError):
            sock.close()
            return None
        return SharedMemoryChannel(sock, self._ticket, self._capacity, self._patience, memory, results)

    async def _take(self, comm: Comm, loop: asyncio.AbstractEventLoop) -> Channel:
        await comm.write({"can_be_taken": can_be_taken(comm)})
        answer: Any = await comm.read()
        if answer["hand_over"]:
            sock = await take_socket(comm)
            return SocketChannel(sock, self._ticket, self._capacity, self._patience)
        return CommChannel(comm, loop, self._ticket, self._capacity, self._patience)
