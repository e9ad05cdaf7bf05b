import gc

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
