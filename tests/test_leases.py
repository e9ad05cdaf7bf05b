import pytest

from daskps._leases import Leases, Request


def cluster(n_workers, per_process=1):
    """``n_workers`` addresses, with so many of them in each process."""
    return {f"tcp://{n}": f"process-{n // per_process}" for n in range(n_workers)}


def ask(leases, run_id, n_workers=None, most=100):
    request = Request(run_id, n_workers, most)
    leases.ask(request)
    return request


@pytest.fixture
def leases():
    return Leases()


class TestRequest:
    @pytest.mark.parametrize(("n_workers", "most", "n_eligible", "expected"), [
        (None, 100, 4, 4),
        (None, 3, 4, 3),
        (2, 100, 4, 2),
        (8, 100, 4, 8),
        (8, 3, 4, 3),
        (None, 100, 0, 1),
    ])  # fmt: skip
    def test_wanted(self, n_workers, most, n_eligible, expected):
        assert Request("run", n_workers, most).wanted(n_eligible) == expected


class TestGrant:
    def test_all_workers_that_are_eligible(self, leases):
        request = ask(leases, "a")
        assert leases.grant(request, cluster(3)) == ["tcp://0", "tcp://1", "tcp://2"]
        assert leases.held() == {"a": ["process-0", "process-1", "process-2"]}
        assert leases.waiting() == []

    def test_as_many_as_asked_for(self, leases):
        assert len(leases.grant(ask(leases, "a", 2), cluster(3))) == 2

    def test_no_more_than_the_data_can_feed(self, leases):
        assert len(leases.grant(ask(leases, "a", most=1), cluster(3))) == 1

    def test_all_or_nothing(self, leases):
        request = ask(leases, "a", 3)
        assert leases.grant(request, cluster(2)) is None
        assert leases.held() == {}
        assert leases.waiting() == ["a"]
        assert len(leases.grant(request, cluster(3))) == 3

    def test_no_worker_is_no_grant(self, leases):
        assert leases.grant(ask(leases, "a"), {}) is None

    def test_two_runs_share_no_worker(self, leases):
        first = leases.grant(ask(leases, "a", 2), cluster(4))
        second = leases.grant(ask(leases, "b", 2), cluster(4))
        assert not set(first) & set(second)

    def test_workers_of_one_process_count_once(self, leases):
        assert leases.grant(ask(leases, "a"), cluster(4, per_process=2)) == ["tcp://0", "tcp://2"]

    def test_lease_takes_the_whole_process(self, leases):
        leases.grant(ask(leases, "a", 1), {"tcp://0": "process", "tcp://1": "process"})
        assert leases.grant(ask(leases, "b", 1), {"tcp://1": "process"}) is None

    def test_fit_on_all_workers_waits_for_those_that_are_held(self, leases):
        leases.grant(ask(leases, "a", 1), cluster(2))
        request = ask(leases, "b")
        assert leases.grant(request, cluster(2)) is None
        leases.release("a")
        assert len(leases.grant(request, cluster(2))) == 2


class TestQueue:
    def test_first_come_first_served(self, leases):
        first, second = ask(leases, "a", 1), ask(leases, "b", 1)
        assert leases.grant(second, cluster(1)) is None
        assert leases.grant(first, cluster(1)) == ["tcp://0"]
        leases.release("a")
        assert leases.grant(second, cluster(1)) == ["tcp://0"]

    def test_large_request_is_not_starved_by_small_ones(self, leases):
        leases.grant(ask(leases, "a", 1), cluster(3))
        large, small = ask(leases, "large", 3), ask(leases, "small", 1)
        assert leases.grant(large, cluster(3)) is None
        assert leases.grant(small, cluster(3)) is None
        leases.release("a")
        assert len(leases.grant(large, cluster(3))) == 3
        leases.release("large")
        assert len(leases.grant(small, cluster(3))) == 1

    def test_request_larger_than_the_cluster_blocks_nobody(self, leases):
        too_large, small = ask(leases, "large", 5), ask(leases, "small", 1)
        assert leases.grant(small, cluster(2)) is not None
        assert leases.grant(too_large, cluster(2)) is None
        leases.release("small")
        assert len(leases.grant(too_large, cluster(5))) == 5

    def test_request_for_other_workers_blocks_nobody(self, leases):
        leases.grant(ask(leases, "a", 2), {"tcp://0": "p0", "tcp://1": "p1"})
        ask(leases, "b", 2)
        elsewhere = ask(leases, "c", 1)
        assert leases.grant(elsewhere, {"tcp://2": "p2"}) == ["tcp://2"]

    def test_hundred_runs_are_all_served_in_order(self, leases):
        requests = [ask(leases, f"run-{n}", 1 + n % 3) for n in range(100)]
        served, held = [], []
        while len(served) < 100:
            granted = [r for r in requests if r.run_id in leases.waiting()]
            granted = [r for r in granted if leases.grant(r, cluster(4)) is not None]
            served += [r.run_id for r in granted]
            held += [r.run_id for r in granted]
            leases.release(held.pop(0))
        assert served == [r.run_id for r in requests]


class TestKeepAndGrow:
    def test_what_is_left_is_kept(self, leases):
        leases.grant(ask(leases, "a", 3), cluster(3))
        leases.keep("a", ["process-0", "process-2"])
        assert leases.held() == {"a": ["process-0", "process-2"]}
        assert leases.grant(ask(leases, "b", 1), cluster(3)) == ["tcp://1"]

    @pytest.mark.parametrize(("n_workers", "most", "expected"), [
        (None, 100, ["tcp://2", "tcp://3"]), (3, 100, ["tcp://2"]), (2, 100, []), (None, 3, ["tcp://2"]),
    ])  # fmt: skip
    def test_up_to_what_was_asked_for(self, leases, n_workers, most, expected):
        request = ask(leases, "a", n_workers, most)
        leases.grant(request, cluster(2))
        leases.keep("a", ["process-0", "process-1"])
        assert leases.grow(request, cluster(4)) == expected
        assert len(leases.held()["a"]) == 2 + len(expected)

    def test_two_workers_of_one_process_are_one(self, leases):
        request = ask(leases, "a")
        leases.grant(request, cluster(2, per_process=2))
        assert leases.grow(request, cluster(4, per_process=2)) == ["tcp://2"]

    def test_not_what_others_hold(self, leases):
        request = ask(leases, "a", 2)
        leases.grant(request, cluster(2))
        leases.grant(ask(leases, "b", 1), cluster(3))
        leases.keep("a", ["process-0"])
        assert leases.grow(request, {"tcp://0": "process-0", "tcp://2": "process-2"}) == []

    def test_not_what_others_wait_for(self, leases):
        request = ask(leases, "a")
        leases.grant(request, cluster(2))
        ask(leases, "b", 3)
        assert leases.grow(request, cluster(3)) == []
        leases.release("b")
        assert leases.grow(request, cluster(3)) == ["tcp://2"]

    def test_who_lost_everything_comes_first(self, leases):
        ask(leases, "waits", 1)
        first = Request("lost", 1, 1)
        leases.ask(first, first=True)
        assert leases.grant(first, cluster(1)) == ["tcp://0"]


class TestRelease:
    def test_from_what_is_held(self, leases):
        leases.grant(ask(leases, "a"), cluster(2))
        leases.release("a")
        assert leases.held() == {}

    def test_from_the_queue(self, leases):
        ask(leases, "a", 1)
        second = ask(leases, "b", 1)
        leases.release("a")
        assert leases.waiting() == ["b"]
        assert leases.grant(second, cluster(1)) is not None

    def test_of_a_stranger_changes_nothing(self, leases):
        leases.grant(ask(leases, "a"), cluster(2))
        ask(leases, "b")
        leases.release("c")
        assert list(leases.held()) == ["a"]
        assert leases.waiting() == ["b"]

    def test_twice_is_once(self, leases):
        leases.grant(ask(leases, "a"), cluster(2))
        leases.release("a")
        leases.release("a")
        assert leases.held() == {}
