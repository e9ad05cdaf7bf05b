import asyncio
import gc
from types import SimpleNamespace

import distributed.client
import pytest
from distributed import Client
from probes import leftovers, wait_until, workers_of

from daskps._scatter import scatter


def test_what_has_arrived_is_let_go_if_something_else_cannot_be_sent(client, session_client):
    """Without a collection of garbage, which may not come for long."""
    good, *_ = workers_of(session_client)
    before = leftovers(session_client)
    gc.disable()
    try:
        with pytest.raises(KeyError):
            scatter(session_client, "x", [1, 2, 3], [good, "tcp://127.0.0.1:1", good])
        wait_until(lambda: leftovers(session_client) <= before)
    finally:
        gc.enable()


def test_what_a_worker_took_that_left_meanwhile_is_forgotten(client, session_client, monkeypatch):
    """Dask's scheduler notes a key before it looks for the worker that has it."""
    addresses = list(workers_of(session_client))[:2]
    before = leftovers(session_client)

    async def to_one_that_leaves(workers, data, rpc):
        return list(data), {key: ["tcp://127.0.0.1:1"] for key in data}, dict.fromkeys(data, 1)

    with Client(client.scheduler.address, set_as_default=False) as user:
        monkeypatch.setattr(distributed.client, "scatter_to_workers", to_one_that_leaves)
        with pytest.raises(KeyError):
            scatter(user, "x", [1, 2], addresses)
        wait_until(lambda: leftovers(session_client) <= before)


def test_a_scatter_that_is_given_up_says_nothing_of_its_failure_later():
    """The worker is gone, as the fit knows already: asyncio would print an error that nobody looks at."""
    complaints = []

    async def scenario():
        loop, gate = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda loop, context: complaints.append(context["message"]))

        async def fail(*args, **kwargs):
            await gate.wait()
            raise OSError("tcp://gone")

        client = SimpleNamespace(sync=lambda function: function(), scatter=fail, direct_to_workers=True)
        sending = asyncio.ensure_future(scatter(client, "shard", [1, 2], ["tcp://a", "tcp://b"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        del sending
        gc.collect()

    asyncio.run(scenario())
    assert complaints == []
