"""How values of the client's get to the workers that are meant to have them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from distributed import Client, Future

from daskps import _direct


def scatter(client: Client, name: str, values: Sequence[Any], addresses: Sequence[str]) -> list[Future]:
    """Send one value to each address, side by side, under keys that nobody else has."""

    async def send_all() -> list[Future]:
        keys = [f"daskps-{name}-{uuid.uuid4().hex}" for _ in values]
        direct = await _direct.direct_ones(client, addresses)
        # One after the other would take as long as all together.
        sending = {
            key: asyncio.ensure_future(_send(client, key, value, address, address in direct))
            for key, value, address in zip(keys, values, addresses, strict=True)
        }
        together = asyncio.gather(*sending.values())
        try:
            # A scatter that is cancelled half-way leaves its keys in the cluster: Dask keeps them for the
            # client, which has no futures to let go of.
            arrived = await asyncio.shield(together)
        except BaseException:
            together.add_done_callback(_direct.error_of)
            for key, task in sending.items():
                task.add_done_callback(partial(_let_go, client, key))
            raise
        return [futures[key] for key, futures in zip(keys, arrived, strict=True)]

    return client.sync(send_all)


async def _send(client: Client, key: str, value: Any, address: str, direct: bool) -> dict[str, Future]:
    send = partial(client.scatter, {key: value}, workers=[address], hash=False, asynchronous=True)
    if direct:
        try:
            return await send(direct=True)
        except TimeoutError:  # the worker is paused, as the scheduler knows too
            raise
        except OSError:
            _direct.forget(client, address)
            if not await client.scheduler.ncores(workers=[address]):  # type: ignore[union-attr]
                raise  # it is gone, and not only cut off from the client
    return await send()


def _let_go(client: Client, key: str, ended: asyncio.Future) -> None:
    """Release what has arrived, of which the error's traceback may keep futures."""
    error = _direct.error_of(ended)
    if isinstance(error, KeyError):  # the worker left while it took the data
        loop: Any = client.loop
        loop.add_callback(_forget, client, key)
    elif error is None and not ended.cancelled():
        for future in ended.result().values():
            future.release()


async def _forget(client: Client, key: str) -> None:
    """Let go of a key that the scheduler may know, and nobody who wants it."""
    with suppress(OSError):  # a client that has lost its scheduler
        await client.scheduler.update_data(who_has={key: []}, nbytes={}, client=client.id)  # type: ignore[union-attr]
        Future(key, client).release()
