"""A client that waits for a run hears of lost workers, whatever it waits for."""

import asyncio
import queue
import threading

import pytest
from probes import wait_until

from daskps._watch import Watch
from daskps.exceptions import RunAbortedError, WorkerLostError

LOST = {
    "run_id": "run",
    "generation": 0,
    "lost": "worker a left",
    "worker": "tcp://a",
    "round": 3,
    "allowed_failures": 2,
}


class Loop:
    """An event loop in a thread, with the attribute by which tornado's knows asyncio's."""

    def __init__(self):
        self.asyncio_loop = asyncio.new_event_loop()


class FakeClient:
    """What a watch needs of a client."""

    def __init__(self):
        self.status = "running"
        self.loop = Loop()
        self.id = "me"


@pytest.fixture
def client():
    client = FakeClient()
    loop = client.loop.asyncio_loop
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield client
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


@pytest.fixture
def events():
    return queue.SimpleQueue()


@pytest.fixture
def watch(client, events):
    return Watch(client, events)


class TestNext:
    def test_in_order(self, watch):
        watch.put({"done": 1})
        watch.put({"done": 2})
        assert [watch.next()["done"] for _ in range(2)] == [1, 2]

    def test_none_if_nothing_comes(self, watch):
        assert watch.next(0.0) is None

    def test_a_lost_worker_is_an_error_with_all_that_is_known(self, watch):
        watch.put(LOST)
        with pytest.raises(WorkerLostError, match="worker a left") as caught:
            watch.next()
        error = caught.value
        assert (error.worker, error.run_id, error.round) == ("tcp://a", "run", 3)
        assert watch.allowed_failures == 2

    def test_the_end_of_the_run_is_an_error(self, watch):
        watch.put({"run_id": "run", "ended": "the cluster restarts"})
        with pytest.raises(RunAbortedError, match="the cluster restarts"):
            watch.next()

    @pytest.mark.parametrize("generation", [0, 2])
    def test_news_of_another_generation_is_none(self, watch, generation):
        watch.generation = 1
        watch.put({**LOST, "generation": generation})
        assert watch.next(0.0) is None

    def test_a_client_without_scheduler_is_an_error(self, watch, client):
        client.status = "connecting"
        with pytest.raises(RunAbortedError, match="connecting"):
            watch.next(0.0)


class TestSync:
    def test_returns_what_the_coroutine_returns(self, watch):
        async def add(a, b):
            return a + b

        assert watch.sync(add, 1, b=2) == 3

    def test_ends_when_a_worker_is_lost(self, watch):
        cancelled = threading.Event()

        async def never():
            watch.put(LOST)
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(WorkerLostError):
            watch.sync(never)
        wait_until(cancelled.is_set)

    def test_a_failure_that_comes_of_a_lost_worker_is_that(self, watch, monkeypatch):
        monkeypatch.setattr("daskps._watch._NEWS_SECONDS", 60.0)

        async def fails(after):
            asyncio.get_running_loop().call_later(0.05, watch.put, LOST)
            raise after

        with pytest.raises(WorkerLostError):
            watch.sync(fails, OSError("cannot reach it"))

    def test_any_other_failure_is_as_it_is(self, watch, monkeypatch):
        monkeypatch.setattr("daskps._watch._NEWS_SECONDS", 0.01)

        async def fails():
            raise LookupError("my own")

        with pytest.raises(LookupError, match="my own"):
            watch.sync(fails)


class TestAsk:
    def test_returns_the_answer(self, watch):
        async def answer(question):
            return question + 1

        assert watch.ask(answer, question=1) == 2

    def test_what_happens_to_the_workers_meanwhile_is_not_forgotten(self, watch):
        """The scheduler has opened a generation, and loses a worker before its answer is here."""

        async def answer():
            watch.put(LOST)
            watch.put({"done": "an old task"})
            while not watch._events.empty():
                await asyncio.sleep(0)
            return "answer"

        assert watch.ask(answer) == "answer"
        with pytest.raises(WorkerLostError):
            all(watch.next() or True for _ in range(10))


def test_is_the_client_in_everything_else(watch):
    assert watch.id == "me"


def test_what_has_begun_is_ended_though_nobody_waits_for_it(watch):
    """Dask would keep for ever what a scatter has half sent."""
    gate, ended = threading.Event(), threading.Event()

    async def send():
        watch.put(LOST)
        await asyncio.to_thread(gate.wait, 20)
        ended.set()

    async def sent():
        await asyncio.shield(send())

    with pytest.raises(WorkerLostError):
        watch.sync(sent)
    assert not ended.is_set()
    gate.set()
    wait_until(ended.is_set)
