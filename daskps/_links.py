"""The server's ends of the ranks' data connections."""

from __future__ import annotations

import socket
from collections.abc import Iterable

import numpy as np

from daskps import _wire
from daskps._aggregators import CHUNK, Reader
from daskps._narrow import narrowed, widened
from daskps._sharedmemory import Segment
from daskps._spec import Contribution
from daskps._wire import Answer


class SocketLink:
    """A rank whose values travel through its socket.

    Parameters
    ----------
    sock : socket
    wire_dtype : {None, 'bfloat16', 'float16'}
        To what those values are rounded that a contribution lets be narrowed.
    """

    kind = "comm"

    def __init__(self, sock: socket.socket, wire_dtype: str | None = None) -> None:
        self.sock = sock
        self.wire_dtype = wire_dtype

    def receive(self) -> Contribution:
        """Read the header of a contribution.

        Raises
        ------
        EOFError
            If the rank is gone.
        InvalidMessageError
            If it is no header.
        """
        header = bytearray(_wire.PUSH_BYTES)
        receive_into(self.sock, memoryview(header))
        return _wire.unpack_push(bytes(header))

    def reader(self, contribution: Contribution) -> Reader:
        """What reads the values of the contribution, in order, chunk by chunk."""
        c, dtype = contribution, self.wire_dtype
        scratch = np.empty(min(CHUNK, c.size), c.dtype)
        scale = c.weight if c.reduction == "mean" else 1.0

        def read(start: int, stop: int) -> np.ndarray:
            values = scratch[: stop - start]
            exact = values
            if dtype is not None and start < c.narrow:
                bits = np.empty(min(stop, c.narrow) - start, np.uint16)
                receive_into(self.sock, bits.data.cast("B"))
                widened(bits, dtype, scale, values[: len(bits)])
                exact = values[len(bits) :]
            if len(exact):
                receive_into(self.sock, exact.data.cast("B"))
            return values

        return read

    def answer(self, answer: Answer, result: np.ndarray) -> None:
        """Send the result of a round."""
        self.sock.sendall(_wire.pack_answer(answer))
        if answer.narrow and self.wire_dtype is not None:
            bits = narrowed(result[: answer.narrow], self.wire_dtype)
            self.sock.sendall(bits.data.cast("B"))
            result = result[answer.narrow :]
        if len(result):
            self.sock.sendall(result.data.cast("B"))

    def refuse(self, error: BaseException) -> None:
        """Send an error instead of a result, if the rank is still there."""
        try:
            self.sock.settimeout(1.0)
            self.sock.sendall(_wire.pack_refusal(error))
        except OSError:
            return

    def hang_up(self) -> None:
        """Let both ends find the connection closed, also in the middle of a call; from any thread."""
        try:
            # Not the method of an SSLSocket, which another thread may be reading from.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Let go of the connection."""
        self.sock.close()


class SharedMemoryLink(SocketLink):
    """A rank that writes its values into shared memory; its socket carries the headers.

    Parameters
    ----------
    sock : socket
    memory : Segment
        Where the rank writes its contributions.
    """

    kind = "shared-memory"

    def __init__(self, sock: socket.socket, memory: Segment) -> None:
        super().__init__(sock)
        self._memory = memory

    def reader(self, contribution: Contribution) -> Reader:
        """What looks at the values of the contribution."""
        c = contribution
        values = self._memory.values(c.dtype, c.size, c.offset)
        return lambda start, stop: values[start:stop]

    def answer(self, answer: Answer, result: np.ndarray) -> None:
        """Tell the rank that the result lies in the memory of results."""
        self.sock.sendall(_wire.pack_answer(answer))


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill the view from a socket.

    Raises
    ------
    EOFError
        If the peer is gone.
    TimeoutError
        If it stops in the middle.
    """
    while len(view):
        received = sock.recv_into(view)
        if not received:
            raise EOFError("the connection was closed")
        view = view[received:]


def by_rank(links: dict[int, SocketLink]) -> Iterable[tuple[int, SocketLink]]:
    """The links in rank order."""
    return sorted(links.items())
