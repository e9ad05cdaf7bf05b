"""Which workers a client reaches itself: what they send each other need not pass through the scheduler.

Dask's ``scatter`` and ``gather`` take everything there unless they are told otherwise, since there is no
telling from an address whether a client gets through to it, nor that it is the same machine on both sides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from time import monotonic
from typing import Any
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
    gathering = asyncio.ensure_future(client.gather(futures, direct=direct or None, asynchronous=True))
    gathering.add_done_callback(error_of)
    begun = monotonic()
    # Dask asks for what several callers want at once: who cancels that cancels it for all, and for ever.
    results = await asyncio.shield(gathering)
    if monotonic() - begun > _PATIENCE:  # Dask may have waited in vain for one that is cut off by now
        for address in addresses:
            forget(client, address)
    return results


async def reached(client: Client, addresses: Iterable[str]) -> set[str]:
    """Those of the addresses at which the client finds the worker that the scheduler means.

    What is known of an address holds until it is forgotten, or as long as the client lives.
    """
    wanted = set(addresses)
    known = _known.setdefault(client.rpc, {})
    new = wanted - known.keys()
    found = await asyncio.gather(*(_is_reached(client, address) for address in new))
    known.update({address: is_ for address, is_ in zip(new, found, strict=True) if is_ is not None})
    return {address for address in wanted if known.get(address)}


def error_of(ended: asyncio.Future) -> BaseException | None:
    """What went wrong, if anything did. As a callback: what nobody waits for any more may fail unheard."""
    return None if ended.cancelled() else ended.exception()


def forget(client: Client, address: str) -> None:
    """Whether the client reaches this worker has to be found out anew."""
    _known.get(client.rpc, {}).pop(address, None)


async def _is_reached(client: Client, address: str) -> bool | None:
    """None if the scheduler has no answer either: a worker may be busy for a moment."""
    who = {"op": "identity"}
    own, told = await asyncio.gather(
        _answer(client.rpc(address).identity()),
        _answer(client.scheduler.broadcast(msg=who, workers=[address])),  # type: ignore[union-attr]
    )
    if told is None:
        return None
    return own is not None and bool(own["id"] == told[address]["id"])


async def _answer(asking: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await asyncio.wait_for(asking, _PATIENCE)
    except Exception:  # what a network has in store for those who try
        return None
