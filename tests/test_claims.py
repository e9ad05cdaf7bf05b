import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from daskps import _claims
from daskps._claims import claimed
from daskps.exceptions import DaskpsError


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    assert not _claims._owners


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Held:
    """Another thread that holds paths until it is told to let go."""

    def __init__(self, pool, *paths):
        self.has_them, self.let_go = threading.Event(), threading.Event()
        self.future = pool.submit(self._run, set(paths))

    def _run(self, paths):
        with claimed(paths, 20):
            self.has_them.set()
            assert self.let_go.wait(20)


def test_other_paths_do_not_wait(pool):
    held = Held(pool, "a")
    assert held.has_them.wait(20)
    with claimed({"b"}, 20):
        assert not held.future.done()
    held.let_go.set()


def test_the_same_path_waits(pool):
    first = Held(pool, "a", "b")
    assert first.has_them.wait(20)
    second = Held(pool, "b", "c")
    assert not second.has_them.wait(0.05)
    first.let_go.set()
    assert second.has_them.wait(20)
    second.let_go.set()


def test_who_waits_holds_nothing(pool):
    first = Held(pool, "a")
    assert first.has_them.wait(20)
    second = Held(pool, "a", "b")
    with claimed({"b"}, 20):  # so that no two can wait for each other
        assert not second.has_them.is_set()
    first.let_go.set()
    second.let_go.set()


def test_one_thread_has_a_path_twice():
    with claimed({"a"}, 20):
        with claimed({"a", "b"}, 20):
            assert _claims._owners.keys() == {"a", "b"}
        assert _claims._owners.keys() == {"a"}


def test_paths_are_let_go_after_an_error():
    with pytest.raises(KeyError), claimed({"a"}, 20):
        raise KeyError
    with claimed({"a"}, 20):
        pass


def test_patience_ends(pool):
    held = Held(pool, "a", "b")
    assert held.has_them.wait(20)
    with pytest.raises(DaskpsError) as caught, claimed({"b", "c"}, 0.01):
        pass
    for part in ("ThreadPoolExecutor", "writing to b for", "daskps.timeouts.files (0.01 s)", "a folder"):
        assert part in str(caught.value)
    held.let_go.set()


def test_no_paths_wait_for_nobody(pool):
    held = Held(pool, "a")
    assert held.has_them.wait(20)
    with claimed(set(), 20):
        pass
    held.let_go.set()
