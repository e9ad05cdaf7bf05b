"""How a rank's values reach the parameter server and the result comes back.

The one face of this module is ``push_pull``. Behind it there are three roads, chosen for each rank when
it joins: memory shared with the scheduler's process; the socket of a connection that Dask opened; and
that connection as Dask itself reads and writes it.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from distributed.comm import Comm, CommClosedError
from distributed.protocol import Serialized

from daskps import _wire
from daskps._links import receive_into
from daskps._narrow import narrowed, widened
from daskps._sharedmemory import Segment
from daskps._spec import DTYPES, Contribution, Reduction, Ticket
from daskps._wire import Answer
from daskps.exceptions import RoundTimeoutError, RunAbortedError

# By their codes: numpy spells a name out anew each time.
_NAMES = {np.dtype(name).char: name for name in DTYPES}


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


class _Speaking:
    """Where a rank speaks to the scheduler: what goes wrong there is the end of its run.

    Not a generator: one is entered in every round.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, TimeoutError):
            raise RoundTimeoutError(f"the scheduler did not answer for {self._patience:g} s") from None
        if isinstance(error, EOFError | OSError | CommClosedError):
            raise RunAbortedError(f"the scheduler closed the connection: {error}") from error


class Channel(Protocol):
    """A rank's way to the parameter server."""

    kind: str
    traffic: Traffic
    n_not_finite: int
    """How many results had a value that is NaN or infinite."""

    def allocate(self, size: int, dtype: str) -> np.ndarray:
        """Room for values that are to be pushed; all rooms of a channel may be the same memory."""

    def push_pull(
        self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int = 0
    ) -> np.ndarray:
        """Contribute to a round and return its result; empty if no rank had any weight.

        The first ``narrow`` values may be rounded to the run's wire dtype. The result is valid until
        the next call.
        """

    def push(self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int = 0) -> None:
        """Contribute to a round without waiting for its result.

        The values lie in a room that stays as it is until the result was pulled. Their place in it is
        theirs alone until then.
        """

    def pull(self) -> np.ndarray:
        """The result of the oldest push that has not been pulled; valid until a push at its place."""

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
    wire_dtype : {None, 'bfloat16', 'float16'}
        To what those values are rounded on their way that may be.
    """

    kind = "comm"

    def __init__(
        self,
        sock: socket.socket,
        ticket: Ticket,
        capacity: int,
        patience: float,
        wire_dtype: str | None = None,
    ) -> None:
        sock.settimeout(patience)
        self._sock = sock
        self._prepare(ticket, capacity, patience, wire_dtype)

    def _prepare(self, ticket: Ticket, capacity: int, patience: float, wire_dtype: str | None) -> None:
        self.traffic = Traffic()
        self.n_not_finite = 0
        self._ticket = ticket
        self._capacity = capacity
        self._speaking = _Speaking(patience)
        self._patience = patience
        self._wire_dtype = wire_dtype
        self._n_rounds = 0
        self._room = np.empty(capacity, "uint8")
        self._known: np.ndarray | None = None
        self._known_offset: int | None = None
        self._incoming = np.empty(0, "uint8")
        # A push must not block, and where both ends send at once neither would read: a thread of its
        # own exchanges, one round after the other.
        self._exchanging: ThreadPoolExecutor | None = None
        self._pushed: deque[Future] = deque()

    def allocate(self, size: int, dtype: str) -> np.ndarray:
        n_bytes = size * np.dtype(dtype).itemsize
        if n_bytes > self._capacity:
            return np.empty(size, dtype)
        return self._room[:n_bytes].view(dtype)

    def push_pull(
        self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int = 0
    ) -> np.ndarray:
        most = self._capacity // values.itemsize
        if len(values) <= most:
            begun = perf_counter()
            result, waited = self._round(values, weight, reduction, narrow)
            self._note(perf_counter() - begun, waited)
            return result
        # All ranks cut alike, also those of weight 0, since their buffers have the same length.
        pieces = [values[start : start + most] for start in range(0, len(values), most)]
        return np.concatenate([self.push_pull(piece, weight, reduction).copy() for piece in pieces])

    def push(self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int = 0) -> None:
        if self._exchanging is None:
            self._exchanging = ThreadPoolExecutor(1, thread_name_prefix="daskps-exchange")
        self._pushed.append(self._exchanging.submit(self._round, values, weight, reduction, narrow))

    def pull(self) -> np.ndarray:
        begun = perf_counter()
        result, waited = self._pushed.popleft().result()
        self._note(perf_counter() - begun, waited)
        return result

    def close(self) -> None:
        self._hang_up()
        if self._exchanging is not None:
            self._exchanging.shutdown(wait=False, cancel_futures=True)

    def _hang_up(self) -> None:
        # Also for a thread that waits for an answer; not the method of an SSLSocket, which it may use.
        with suppress(OSError):
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        self._sock.close()

    def _round(
        self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int
    ) -> tuple[np.ndarray, float]:
        """The result of a round, and how many seconds it waited for other ranks."""
        with self._speaking:
            begun = perf_counter()
            offset = self._announce(values, weight, reduction, narrow)
            answer = self._next_answer()
            return self._result(answer, offset), self._waited(answer, begun)

    def _announce(self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int) -> int:
        """Say what is contributed, and send it; returns its place."""
        offset = self._offset(values) or 0
        sent, narrow = (values, narrow) if weight > 0 else (values[:0], 0)
        header = self._header(sent, weight, reduction, narrow, offset)
        parts = self._parts(sent, narrow, weight if reduction == "mean" else 1.0)
        with suppress(BrokenPipeError, ConnectionResetError):  # refused: why is the answer
            self._push(header, parts)
        self.traffic.bytes += sum(part.nbytes for part in parts)
        return offset

    def _offset(self, values: np.ndarray) -> int | None:
        """At which byte of the room values lie; None if they lie elsewhere."""
        if values is not self._known:  # it is the same array in every step
            offset = _address(values) - _address(self._room)
            self._known, self._known_offset = values, offset if 0 <= offset < self._room.nbytes else None
        return self._known_offset

    def _header(
        self, sent: np.ndarray, weight: float, reduction: Reduction, narrow: int, offset: int
    ) -> bytes:
        ticket, round_ = self._ticket, self._n_rounds
        self._n_rounds += 1
        return _wire.pack_push(
            Contribution(
                ticket.run_id,
                ticket.generation,
                ticket.rank,
                round_,
                weight,
                reduction,
                len(sent),
                _NAMES[sent.dtype.char],
                offset,
                narrow,
            )
        )

    def _parts(self, sent: np.ndarray, narrow: int, scale: float) -> list[np.ndarray]:
        """What travels. The weight comes in again where it cannot leave the range of a narrow dtype."""
        if not narrow or self._wire_dtype is None:
            return [sent] if len(sent) else []
        bits = narrowed(sent[:narrow] / np.float32(scale), self._wire_dtype)
        return [bits, sent[narrow:]]

    def _push(self, header: bytes, parts: list[np.ndarray]) -> None:
        self._sock.sendall(header)
        for part in parts:
            self._sock.sendall(part.data.cast("B"))

    def _next_answer(self) -> Answer:
        answer = self._answer()
        self.n_not_finite += not answer.finite
        return answer

    def _answer(self) -> Answer:
        return _wire.unpack_answer(self._receive(_wire.ANSWER_BYTES), self._receive)

    def _receive(self, n_bytes: int) -> bytes:
        data = bytearray(n_bytes)
        receive_into(self._sock, memoryview(data))
        return bytes(data)

    def _result(self, answer: Answer, offset: int) -> np.ndarray:
        result = self._place(answer, offset)
        if answer.narrow and self._wire_dtype is not None:
            bits = np.empty(answer.narrow, np.uint16)
            self._fill(bits)
            widened(bits, self._wire_dtype, out=result[: answer.narrow])
        self._fill(result[answer.narrow :])
        self.traffic.bytes += _wire.sent_bytes(answer.size, answer.dtype, answer.narrow)
        return result

    def _place(self, answer: Answer, offset: int) -> np.ndarray:
        n_bytes = answer.size * np.dtype(answer.dtype).itemsize
        if len(self._incoming) < offset + n_bytes:
            self._incoming = np.empty(max(offset + n_bytes, self._capacity), "uint8")
        return self._incoming[offset : offset + n_bytes].view(answer.dtype)

    def _fill(self, values: np.ndarray) -> None:
        if len(values):
            receive_into(self._sock, values.data.cast("B"))

    def _waited(self, answer: Answer, begun: float) -> float:
        return answer.waited

    def _note(self, seconds: float, waited: float) -> None:
        waited = min(max(waited, 0.0), seconds)
        self.traffic.rounds += 1
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
        Where the server writes the results, for all ranks.
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
        self._room = memory.values("uint8", capacity)
        self._places: deque[int] = deque()

    def push(self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int = 0) -> None:
        # A header is so short that sending it does not block.
        begun = perf_counter()
        with self._speaking:
            self._places.append(self._announce(values, weight, reduction, narrow))
        self.traffic.sync_seconds += perf_counter() - begun

    def pull(self) -> np.ndarray:
        begun = perf_counter()
        with self._speaking:
            answer = self._next_answer()
            result = self._result(answer, self._places.popleft())
        self._note(perf_counter() - begun, self._waited(answer, begun))
        return result

    def _parts(self, sent: np.ndarray, narrow: int, scale: float) -> list[np.ndarray]:
        return [sent] if len(sent) else []

    def _push(self, header: bytes, parts: list[np.ndarray]) -> None:
        for part in parts:
            if self._offset(part) is None:
                np.copyto(self._memory.values(str(part.dtype), len(part)), part)
        self._sock.sendall(header)

    def _result(self, answer: Answer, offset: int) -> np.ndarray:
        result = self._results.values(answer.dtype, answer.size, offset)
        self.traffic.bytes += result.nbytes
        return result

    def _waited(self, answer: Answer, begun: float) -> float:
        return answer.complete - begun  # one clock: that of the host


class CommChannel(SocketChannel):
    """Dask reads and writes the connection, on an event loop of its own in the rank's thread."""

    kind = "comm (messages)"

    def __init__(
        self,
        comm: Comm,
        loop: asyncio.AbstractEventLoop,
        ticket: Ticket,
        capacity: int,
        patience: float,
        wire_dtype: str | None = None,
    ) -> None:
        self._comm = comm
        self._loop = loop
        self._rest = memoryview(b"")
        self._prepare(ticket, capacity, patience, wire_dtype)

    def _hang_up(self) -> None:
        self._comm.abort()
        if not self._loop.is_running():
            self._loop.close()

    def _push(self, header: bytes, parts: list[np.ndarray]) -> None:
        frames = [header, *(part.data.cast("B") for part in parts if len(part))]
        self._loop.run_until_complete(self._comm.write({"data": Serialized({}, frames)}))

    def _answer(self) -> Answer:
        reading = asyncio.wait_for(self._comm.read(), self._patience)
        frames = [bytes(frame) for frame in self._loop.run_until_complete(reading)["data"].frames]
        data = b"".join(frames)
        header, rest = data[: _wire.ANSWER_BYTES], data[_wire.ANSWER_BYTES :]
        self._rest = memoryview(rest)
        return _wire.unpack_answer(header, lambda n_text: rest[:n_text])

    def _fill(self, values: np.ndarray) -> None:
        if not len(values):
            return
        view = values.data.cast("B")
        view[:], self._rest = self._rest[: len(view)], self._rest[len(view) :]


def _address(values: np.ndarray) -> int:
    return int(values.__array_interface__["data"][0])


class NoChannel:
    """World size 1: nobody to exchange with."""

    kind = "none"
    n_not_finite = 0  # what is its own, a rank can look at itself

    def __init__(self) -> None:
        self.traffic = Traffic()

    def allocate(self, size: int, dtype: str) -> np.ndarray:
        return np.empty(size, dtype)

    def push_pull(
        self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int = 0
    ) -> np.ndarray:
        return values

    def push(self, values: np.ndarray, weight: float, reduction: Reduction, narrow: int = 0) -> None:
        self._values = values

    def pull(self) -> np.ndarray:
        return self._values

    def close(self) -> None:
        pass
