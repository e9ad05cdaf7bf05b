"""The rank's half of joining: it connects to the parameter server and agrees on a road with it."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Worker
from distributed.comm import Comm, connect

from daskps import _sharedmemory, _wire
from daskps._handover import can_be_taken, take_socket
from daskps._spec import JOIN, Rules, Ticket
from daskps._transport import Channel, CommChannel, NoChannel, SharedMemoryChannel, SocketChannel
from daskps.exceptions import DaskpsError, RunAbortedError


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
    DaskpsError
        If the scheduler cannot be reached within ``daskps.timeouts.connect``.
    RunAbortedError
        If it hangs up.
    """
    loop = asyncio.new_event_loop()
    joining = _Joining(worker, ticket, capacity, rules)
    try:
        channel = loop.run_until_complete(asyncio.wait_for(joining.run(loop), 2 * rules.connect))
    except TimeoutError:
        loop.close()
        raise joining.unanswered("did not answer") from None
    except OSError as error:
        loop.close()
        raise RunAbortedError(f"the scheduler hung up on a rank that was joining: {error!r}") from error
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
        self._capacity = -(-capacity // 64) * 64
        self._rules = rules
        # The server's deadline is the same. Its answer, which names the ranks that are missing, must
        # have a chance to come first.
        self._patience = rules.round + rules.connect

    async def run(self, loop: asyncio.AbstractEventLoop) -> Channel:
        comm = await self._connected()
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

    async def _connected(self) -> Comm:
        worker = self._worker
        address, options = worker.scheduler.address, worker.connection_args
        try:
            return await connect(address, self._rules.connect, deserialize=False, **options)
        except OSError as error:
            raise self.unanswered("cannot be reached") from error

    def unanswered(self, what: str) -> DaskpsError:
        """Not a consequence of what happened elsewhere: a cause, for this rank's worker alone can tell."""
        return DaskpsError(
            f"The scheduler at {self._worker.scheduler.address} {what} from worker {self._worker.address}"
            f" within {self._rules.connect:g} s, so rank {self._ticket.rank} could not join. If the network"
            " is as slow as that, raise daskps.timeouts.connect."
        )

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
            return SocketChannel(sock, self._ticket, self._capacity, self._patience, self._rules.wire_dtype)
        return CommChannel(comm, loop, self._ticket, self._capacity, self._patience, self._rules.wire_dtype)
