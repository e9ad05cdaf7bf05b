"""How a rank's buffer reaches the parameter server and its result comes back.

The one face of this module is ``push_pull``. Today there is one road behind it, a connection of
Dask's own kind, opened for this rank alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import numpy as np
from distributed import Worker
from distributed.comm import Comm, CommClosedError, connect

from daskps import _wire, config
from daskps._spec import JOIN, Reduction, Ticket
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

    traffic: Traffic

    def push_pull(self, buffer: np.ndarray, weight: float, reduction: Reduction) -> np.ndarray:
        """Contribute to the open round and return its result; empty if no rank had any weight."""

    def close(self) -> None:
        """Hang up; a rank that waits in ``push_pull`` gets a RunAbortedError."""


class CommChannel:
    """Rounds over a connection that Dask opened, authenticated and, on a TLS cluster, encrypted.

    The connection has an event loop of its own in the rank's thread, so a round never waits for the
    worker's.
    """

    def __init__(self, comm: Comm, loop: asyncio.AbstractEventLoop, ticket: Ticket) -> None:
        self.traffic = Traffic()
        self._comm = comm
        self._loop = loop
        self._ticket = ticket

    def push_pull(self, buffer: np.ndarray, weight: float, reduction: Reduction) -> np.ndarray:
        begun = perf_counter()
        sent = buffer if weight > 0 else buffer[:0]
        message = _wire.push(self._ticket, self.traffic.rounds, weight, reduction, sent)
        combined, waited = _wire.result(self._loop.run_until_complete(self._round(message)))
        self._note(sent.nbytes + combined.nbytes, perf_counter() - begun, waited)
        return combined

    def close(self) -> None:
        self._comm.abort()
        if not self._loop.is_running():
            self._loop.close()

    async def _round(self, message: dict) -> Any:
        # The server's own deadline is the same: its answer, which names the ranks that are missing,
        # must have a chance to come first.
        patience = config.seconds("timeouts.round") + config.seconds("timeouts.connect")
        try:
            return await asyncio.wait_for(self._exchange(message), patience)
        except TimeoutError:
            raise RoundTimeoutError(f"the scheduler did not answer for {patience:g} s") from None
        except (CommClosedError, OSError) as error:
            raise RunAbortedError(f"the scheduler closed the connection: {error}") from error

    async def _exchange(self, message: dict) -> Any:
        await self._comm.write(message)
        return await self._comm.read()

    def _note(self, n_bytes: int, seconds: float, waited: float) -> None:
        self.traffic.rounds += 1
        self.traffic.bytes += n_bytes
        self.traffic.wait_seconds += min(waited, seconds)
        self.traffic.sync_seconds += max(seconds - waited, 0.0)


def open_channel(worker: Worker, ticket: Ticket) -> CommChannel:
    """Connect a rank to the parameter server of its run.

    Raises
    ------
    StaleMessageError
        If the run is not open on the scheduler any more.
    RunAbortedError
        If the scheduler cannot be reached within ``daskps.timeouts.connect``.
    """
    loop = asyncio.new_event_loop()
    try:
        comm = loop.run_until_complete(_join(worker, ticket))
    except BaseException:
        loop.close()
        raise
    return CommChannel(comm, loop, ticket)


async def _join(worker: Worker, ticket: Ticket) -> Comm:
    timeout = config.seconds("timeouts.connect")
    try:
        comm = await connect(worker.scheduler.address, timeout, deserialize=False, **worker.connection_args)
        await comm.write(
            {
                "op": JOIN,
                "run_id": ticket.run_id,
                "rank": ticket.rank,
                "generation": ticket.generation,
                "reply": False,
            }
        )
        greeting = await asyncio.wait_for(comm.read(), timeout)
    except (TimeoutError, OSError) as error:
        raise RunAbortedError(f"cannot join the run at the scheduler: {error!r}") from error
    if greeting["status"] != "OK":
        comm.abort()
        _wire.result(greeting)
    return comm
