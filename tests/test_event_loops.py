"""Fits where an event loop runs: in a notebook, and with asynchronous clients."""

from __future__ import annotations

import asyncio

import dask.array as da
import numpy as np
import pytest
from distributed import Client
from nets import CNN3
from reference import digits, fit_daskps, identical, make_net

from daskps import DaskpsError

X, Y = digits(90, np.float32)
NET = make_net(CNN3, max_epochs=2)


def test_a_notebook(client):
    """Its cells run in the event loop of the main thread; the client has a thread and a loop of its own."""

    async def cell():
        address = client.scheduler.address
        fits = [fit_daskps(given, NET, X, Y, n_workers=2) for given in (client, address)]
        with Client(address) as current:  # made in the cell, and the current one from then on
            assert not current.asynchronous
            fits.append(fit_daskps(None, NET, X, Y, n_workers=2))
            lazy = fits[0].predict(da.from_array(X, chunks=(50, 1, 8, 8)))
            np.testing.assert_array_equal(lazy.compute(), fits[0].predict(X))
        return fits

    expected = fit_daskps(client, NET, X, Y, n_workers=2)
    assert [identical(fit, expected) for fit in asyncio.run(cell())] == [True] * 3


@pytest.mark.parametrize("rows", [X, da.from_array(X, chunks=(50, 1, 8, 8))], ids=["numpy", "dask"])
def test_an_asynchronous_client_is_refused_in_one_sentence(client, rows):
    async def fit():
        async with Client(client.scheduler.address, asynchronous=True, set_as_default=False) as given:
            fit_daskps(given, NET, rows, Y)

    with pytest.raises(DaskpsError, match=r"needs a synchronous client.*give it the scheduler's address"):
        asyncio.run(fit())


def test_what_the_sentence_advises(client):
    """The address; in a thread, so that the event loop goes on meanwhile."""

    async def fit():
        async with Client(client.scheduler.address, asynchronous=True, set_as_default=False) as given:
            there = given.scheduler.address
            fitting = asyncio.to_thread(fit_daskps, there, NET, X, Y, n_workers=2)
            found, sums = await asyncio.gather(fitting, given.submit(sum, [1, 2], pure=False))
            return found, sums

    found, total = asyncio.run(fit())
    assert total == 3
    assert found.report_.world_size == 2
