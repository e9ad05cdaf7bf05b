"""Taking the socket of a connection that Dask opened off Dask's event loop."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from distributed.comm import Comm


def can_be_taken(comm: Comm) -> bool:
    """Whether a comm has a tornado stream in the state, and with the parts, that we know.

    ``inproc://`` and ``ws://`` have none.
    """
    stream: Any = getattr(comm, "stream", None)
    parts = ("io_loop", "socket", "_read_buffer_size", "_closed", "set_close_callback")
    if stream is None or not all(hasattr(stream, part) for part in parts):
        return False
    idle = not stream.reading() and not stream._read_buffer_size and not stream.closed()
    return idle and isinstance(stream.socket, socket.socket)


async def take_socket(comm: Comm) -> socket.socket:
    """Take over the socket under a comm; the comm counts as closed afterwards.

    Dask has chosen the port, authenticated the peer and, on a TLS cluster, set up the encryption: the
    socket is an ``ssl.SSLSocket`` there. tornado has no public way to let go of a socket, so this
    does what its own ``start_tls`` does inside.

    Parameters
    ----------
    comm : Comm
        One that can be taken. This end has read all that the other has sent.

    Returns
    -------
    socket.socket
        Blocking.
    """
    held: Any = comm
    stream = held.stream
    while stream.writing():  # the last message may still be on its way out
        await asyncio.sleep(0)
    stream.io_loop.remove_handler(stream.fileno())
    taken, stream.socket = stream.socket, None
    stream.set_close_callback(None)
    stream._closed = True
    held._finalizer.detach()
    held.stream = None
    held._closed = True
    taken.setblocking(True)
    return taken
