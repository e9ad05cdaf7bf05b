"""Which workers a client reaches itself: what they send each other need not pass through the scheduler.

Dask's ``scatter`` and ``gather`` take everything there unless they are told otherwise, since there is no
telling from an address whether a client gets through to it, nor that it is the same machine on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from distributed import Client, Future
from distributed.core import ConnectionPool

# For a worker that does not answer, its share goes through the scheduler.
_PATIENCE = 1.0

_known: WeakKeyDictionary[ConnectionPool, dict[str, bool]] = WeakKeyDictionary()


async def direct_ones(client: Client, addresses: Iterable[str]) -> set[str]:
    """Those that the client is to talk to itself, if its user has not said what it does."""
    return await reached(client, addresses) if client.direct_to_workers is None else set()


async def gather(client: Client, futures: Sequence[Future], addresses: Sequence[str]) -> list:
    """Bring results from the workers that hold them, one at each of the addresses."""
    direct = await direct_ones(client, addresses) == set(addresses)
    return await client.gather(futures, direct=direct or None, asynchronous=True)


async def reached(client: Client, addresses: Iterable[str]) -> set[str]:
    """Those of the addresses at which the client finds the worker that the scheduler means.

    Each address is tried once in the life of a client.
    """
    known = _known.setdefault(client.rpc, {})
    new = [address for address in set(addresses) if address not in known]
    found = await asyncio.gather(*(_is_reached(client, address) for address in new))
    known.update(zip(new, found, strict=True))
    return {address for address in addresses if known[address]}


async def _is_reached(client: Client, address: str) -> bool:
    who = {"op": "identity"}
    asking = asyncio.gather(
        client.rpc(address).identity(),
        client.scheduler.broadcast(msg=who, workers=[address]),  # type: ignore[union-attr]
    )
    try:
        own, told = await asyncio.wait_for(asking, _PATIENCE)
    except Exception:  # what a network has in store for those who try
        return False
    return bool(own["id"] == told[address]["id"])
