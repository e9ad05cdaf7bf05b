import asyncio
from time import time
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import distributed.client
import pytest
from distributed import Client
from distributed.comm import CommClosedError
from nets import CNN3
from probes import wait_until, workers_of
from reference import fit_daskps, make_net, xy

from daskps import _direct
from daskps._direct import forget, gather, reached
from daskps._scatter import scatter


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine; and nothing is known of the addresses that tests share."""
    monkeypatch.setattr(_direct, "_PATIENCE", 60.0)
    monkeypatch.setattr(_direct, "_known", WeakKeyDictionary())


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(_direct, "_PATIENCE", 0.01)


async def said(answer):
    """What a worker says of itself, unless it says nothing or cannot be reached."""
    if answer is None:
        raise OSError("no route to host")
    if answer == "silent":
        await asyncio.Event().wait()
    return {"id": answer}


class Pool:
    """Connections to workers, of which some answer."""

    def __init__(self, ids):
        self.ids = ids
        self.asked = []

    def __call__(self, address):
        async def identity():
            self.asked.append(address)
            return await said(self.ids[address])

        return SimpleNamespace(identity=identity)


def client_of(ids, told):
    async def broadcast(msg, workers):
        assert msg == {"op": "identity"}
        return {address: await said(told[address]) for address in workers}

    return SimpleNamespace(rpc=Pool(ids), scheduler=SimpleNamespace(broadcast=broadcast))


def test_an_address_is_reached_where_the_same_worker_answers():
    client = client_of({"a": "1", "b": "other", "c": None}, {"a": "1", "b": "2", "c": "3"})
    assert asyncio.run(reached(client, ["a", "b", "c"])) == {"a"}


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_does_not_answer_is_not_waited_for_long():
    client = client_of({"a": "silent", "b": "2"}, {"a": "1", "b": "2"})
    for _ in range(2):
        assert asyncio.run(reached(client, ["a", "b"])) == {"b"}
    assert sorted(client.rpc.asked) == ["a", "b"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", ["silent", None])
def test_a_worker_that_answers_nobody_for_a_moment_is_asked_again(answer):
    ids = {"a": answer}
    client = client_of(ids, ids)
    assert asyncio.run(reached(client, ["a"])) == set()
    ids["a"] = "1"
    assert asyncio.run(reached(client, ["a"])) == {"a"}


def test_an_address_is_tried_once():
    client = client_of({"a": "1", "b": None}, {"a": "1", "b": "2"})
    for _ in range(2):
        assert asyncio.run(reached(client, ["a", "b", "a"])) == {"a"}
    assert sorted(client.rpc.asked) == ["a", "b"]


def test_an_address_is_tried_again_after_it_was_forgotten():
    client = client_of({"a": "1"}, {"a": "1"})
    forget(client, "a")
    assert asyncio.run(reached(client, ["a"])) == {"a"}
    forget(client, "a")
    client.rpc.ids["a"] = None
    assert asyncio.run(reached(client, ["a"])) == set()


def n_through_scheduler(client):
    """How often the scheduler has passed on data of the client."""
    events = [event for _, event in client.get_events(client.id)]
    return sum(event.get("action") == "scatter" for event in events)


@pytest.mark.parametrize(("direct_to_workers", "n"), [(None, 0), (True, 0), (False, 2)])
def test_data_goes_to_the_workers_themselves(client, direct_to_workers, n):
    address = client.scheduler.address
    with Client(address, set_as_default=False, direct_to_workers=direct_to_workers) as user:
        addresses = list(workers_of(user))[:2]
        futures = scatter(user, "value", [b"x", b"y"], addresses)
        assert n_through_scheduler(user) == n
        assert user.gather(futures) == [b"x", b"y"]
        assert [user.who_has(f)[f.key] for f in futures] == [(addresses[0],), (addresses[1],)]


def test_data_for_workers_out_of_reach_goes_through_the_scheduler(client, monkeypatch):
    async def is_reached(_, address):
        return False

    monkeypatch.setattr(_direct, "_is_reached", is_reached)
    with Client(client.scheduler.address, set_as_default=False) as user:
        addresses = list(workers_of(user))[:2]
        futures = scatter(user, "value", [b"x", b"y"], addresses)
        assert n_through_scheduler(user) == 2
        assert user.gather(futures) == [b"x", b"y"]


def test_data_for_a_worker_that_was_cut_off_meanwhile_goes_through_the_scheduler(client, monkeypatch):
    """It was reached before; the scheduler knows whether it is only the client that reaches it no more."""

    async def cut_off(workers, data, rpc):
        raise CommClosedError("in <TCP ...>: Stream is closed")

    with Client(client.scheduler.address, set_as_default=False) as user:
        addresses = list(workers_of(user))[:2]
        before = scatter(user, "value", [b"v", b"w"], addresses)
        assert n_through_scheduler(user) == 0
        monkeypatch.setattr(distributed.client, "scatter_to_workers", cut_off)
        futures = scatter(user, "value", [b"x", b"y"], addresses)
        assert n_through_scheduler(user) == 2
        assert user.gather([*before, *futures]) == [b"v", b"w", b"x", b"y"]
        assert [user.who_has(f)[f.key] for f in futures] == [(addresses[0],), (addresses[1],)]
        assert not _direct._known[user.rpc]


def test_data_for_a_worker_that_is_gone_is_an_error_of_which_the_scheduler_hears_nothing(
    client, monkeypatch
):
    """Dask would log a traceback."""

    async def gone(workers, data, rpc):
        raise CommClosedError("in <TCP ...>: Stream is closed")

    async def none(workers):
        return {}

    with Client(client.scheduler.address, set_as_default=False) as user:
        addresses = list(workers_of(user))[:1]
        scatter(user, "value", [b"v"], addresses)
        monkeypatch.setattr(distributed.client, "scatter_to_workers", gone)
        monkeypatch.setattr(user.scheduler, "ncores", none, raising=False)
        with pytest.raises(CommClosedError):
            scatter(user, "value", [b"x"], addresses)
        assert n_through_scheduler(user) == 0


def n_gathered(client, since):
    """How often the scheduler has brought results to a client since a moment."""
    events = [event for moment, event in client.get_events("all") if moment > since]
    return sum(event.get("action") == "gather" for event in events)


@pytest.mark.parametrize(("direct_to_workers", "n"), [(None, 0), (True, 0), (False, 1)])
def test_results_come_from_the_workers_themselves(client, direct_to_workers, n):
    address = client.scheduler.address
    with Client(address, set_as_default=False, direct_to_workers=direct_to_workers) as user:
        addresses = list(workers_of(user))[:2]
        futures = [user.submit(bytes, 3, workers=[address], pure=False) for address in addresses]
        wait_until(lambda: all(future.done() for future in futures))
        begun = time()
        assert user.sync(gather, user, futures, addresses) == [bytes(3), bytes(3)]
        assert n_gathered(user, begun) == n


def test_workers_whose_results_took_long_are_tried_again(client, monkeypatch):
    """Dask says nothing of a worker for which it waited until its own limits, and asked others then."""
    with Client(client.scheduler.address, set_as_default=False) as user:
        address = next(iter(workers_of(user)))
        future = user.submit(bytes, 3, workers=[address], pure=False)
        user.sync(gather, user, [future], [address])
        assert _direct._known[user.rpc] == {address: True}
        monkeypatch.setattr(_direct, "_PATIENCE", 0.0)
        assert user.sync(gather, user, [future], [address]) == [bytes(3)]
        assert _direct._known[user.rpc] == {}


def test_if_one_worker_is_out_of_reach_all_results_come_through_the_scheduler(client, monkeypatch):
    first, second = list(workers_of(client))[:2]

    async def is_reached(_, address):
        return address == first

    monkeypatch.setattr(_direct, "_is_reached", is_reached)
    with Client(client.scheduler.address, set_as_default=False) as user:
        futures = [user.submit(bytes, 3, workers=[address], pure=False) for address in (first, second)]
        wait_until(lambda: all(future.done() for future in futures))
        begun = time()
        assert user.sync(gather, user, futures, [first, second]) == [bytes(3), bytes(3)]
        assert n_gathered(user, begun) == 1


def test_a_gather_that_is_given_up_leaves_those_of_others_alone(client):
    """Five of a client's go on at once; those that come after them share one request."""

    async def scenario(user, futures, addresses):
        for _ in range(5):
            await user._gather_semaphore.acquire()
        given_up = asyncio.ensure_future(gather(user, futures, addresses))
        while user._gather_future is None:
            await asyncio.sleep(0.01)
        other = asyncio.ensure_future(gather(user, futures, addresses))
        given_up.cancel()
        await asyncio.wait([given_up])
        for _ in range(5):
            user._gather_semaphore.release()
        return await asyncio.wait_for(other, 60)

    with Client(client.scheduler.address, set_as_default=False) as user:
        addresses = list(workers_of(user))[:2]
        futures = [user.submit(bytes, 3, workers=[address], pure=False) for address in addresses]
        assert user.sync(scenario, user, futures, addresses) == [bytes(3), bytes(3)]
        assert user.gather(futures) == [bytes(3), bytes(3)]


def test_in_a_fit_the_scheduler_sees_no_results(client):
    begun = time()
    net = make_net(CNN3, max_epochs=2, module__n=3, train_split=None)
    fit_daskps(client, net, *xy(60, 3), n_workers=2)
    assert n_gathered(client, begun) == 0
