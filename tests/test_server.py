import itertools
import random

import pytest

from daskps._server import ParameterServer
from daskps._spec import Contribution
from daskps.exceptions import InvalidMessageError, StaleMessageError, WorkerLostError

CAPACITY = 80  # 10 values of float64


def contribution(rank=0, round_=0, *, weight=1.0, size=None, **others):
    if size is None:
        size = 3 if weight > 0 else 0
    fields = {"run_id": "run", "generation": 0, "reduction": "mean", "dtype": "float64", **others}
    return Contribution(rank=rank, round=round_, weight=weight, size=size, **fields)


def server_for(world_size):
    server = ParameterServer("run", world_size)
    server.capacity = CAPACITY
    return server


@pytest.fixture
def server():
    return server_for(2)


def assert_round_works(server):
    """Complete the open round and check that nothing of another round is in it."""
    good = [
        contribution(rank, server.round, generation=server.generation, size=3) for rank in server.missing()
    ]
    before = server.round
    assert [server.push(c) for c in good[:-1]] == [None] * (len(good) - 1)
    complete = server.push(good[-1])
    assert [c.rank for c in complete] == list(range(server.world_size))
    assert all(c is complete[c.rank] for c in good)
    assert server.round == before + 1
    assert server.missing() == list(range(server.world_size))


class TestRounds:
    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_last_contribution_completes_the_round_in_rank_order(self, order):
        server = server_for(3)
        results = [server.push(contribution(rank)) for rank in order]
        assert results[:-1] == [None, None]
        assert [c.rank for c in results[-1]] == [0, 1, 2]

    def test_world_of_one_completes_at_once(self):
        server = server_for(1)
        for round_ in range(3):
            assert len(server.push(contribution(0, round_))) == 1

    def test_rounds_follow_one_another(self, server):
        for round_ in range(5):
            assert server.round == round_
            assert_round_works(server)

    def test_missing_names_the_ranks_that_are_waited_for(self):
        server = server_for(3)
        assert server.missing() == [0, 1, 2]
        server.push(contribution(1))
        assert server.missing() == [0, 2]
        server.push(contribution(0))
        assert server.missing() == [2]
        server.push(contribution(2))
        assert server.missing() == [0, 1, 2]

    def test_rank_of_weight_0_takes_part_without_values(self, server):
        server.push(contribution(0, weight=0.0))
        complete = server.push(contribution(1))
        assert [c.weight for c in complete] == [0.0, 1.0]

    def test_round_in_which_nobody_has_weight_is_complete(self, server):
        server.push(contribution(0, weight=0.0))
        assert len(server.push(contribution(1, weight=0.0))) == 2

    def test_shape_may_change_from_round_to_round(self, server):
        for round_, size in enumerate([3, 5, 1]):
            for rank in range(2):
                server.push(contribution(rank, round_, size=size))
        assert server.round == 3


class TestRefusals:
    @pytest.mark.parametrize("fields", [{"run_id": "other"}, {"generation": -1}, {"round_": -1}])
    def test_what_is_over_is_stale(self, server, fields):
        with pytest.raises(StaleMessageError):
            server.push(contribution(**fields))
        assert_round_works(server)

    def test_last_round_is_stale(self, server):
        assert_round_works(server)
        with pytest.raises(StaleMessageError, match="round 0 is over, it is 1"):
            server.push(contribution(0, 0))
        assert_round_works(server)

    @pytest.mark.parametrize("fields", [
        {"generation": 1},
        {"round_": 1},
        {"rank": 2},
        {"rank": -1},
        {"weight": float("nan"), "size": 3},
        {"weight": float("nan"), "size": 0},
        {"weight": float("inf")},
        {"weight": -1.0, "size": 3},
        {"weight": -1.0},
        {"reduction": "max"},
        {"reduction": None},
        {"dtype": "float16"},
        {"dtype": "int64"},
        {"dtype": None},
        {"weight": 0.0, "size": 3},
        {"weight": 1.0, "size": 0},
        {"size": 11},
        {"size": 21, "dtype": "float32"},
        {"size": 2**64 - 1},
    ])  # fmt: skip
    def test_what_cannot_belong_to_the_round_is_invalid(self, server, fields):
        with pytest.raises(InvalidMessageError):
            server.push(contribution(**fields))
        assert server.missing() == [0, 1]
        assert_round_works(server)

    def test_second_contribution_of_a_rank_is_invalid_and_the_first_stays(self, server):
        first = contribution(0)
        server.push(first)
        with pytest.raises(InvalidMessageError, match="rank 0 contributed twice"):
            server.push(contribution(0))
        assert server.push(contribution(1))[0] is first

    @pytest.mark.parametrize("unlike", [
        {"size": 4},
        {"dtype": "float32"},
        {"reduction": "sum"},
    ])  # fmt: skip
    def test_all_that_count_have_the_same_length_dtype_and_reduction(self, server, unlike):
        server.push(contribution(0))
        with pytest.raises(InvalidMessageError, match=r"rank 1 sent .* rank 0 sent"):
            server.push(contribution(1, **unlike))
        assert_round_works(server)

    @pytest.mark.parametrize(("size", "dtype"), [(10, "float64"), (20, "float32")])
    def test_as_much_as_the_ranks_agreed_on_is_taken(self, server, size, dtype):
        for rank in range(2):
            complete = server.push(contribution(rank, size=size, dtype=dtype))
        assert [c.size for c in complete] == [size, size]

    def test_more_than_the_ranks_agreed_on_is_refused_with_both_numbers(self, server):
        message = "rank 1 sent 11 values of float64 at 0, of 80 bytes"
        with pytest.raises(InvalidMessageError, match=message):
            server.push(contribution(1, size=11))

    def test_before_ranks_agreed_nothing_but_weight_0_is_taken(self):
        server = ParameterServer("run", 1)
        with pytest.raises(InvalidMessageError, match="of 0 bytes"):
            server.push(contribution(size=1))
        assert len(server.push(contribution(weight=0.0))) == 1

    def test_weight_0_is_like_any_other(self, server):
        server.push(contribution(0, weight=0.0, reduction="sum"))
        assert len(server.push(contribution(1))) == 2


class TestPoison:
    def test_every_push_raises_the_first_error(self, server):
        first = WorkerLostError("rank 1 left")
        server.push(contribution(0))
        server.fail(first)
        server.fail(ValueError("a consequence"))
        for message in (contribution(1), contribution(0), contribution(run_id="other")):
            with pytest.raises(WorkerLostError) as caught:
                server.push(message)
            assert caught.value is first

    def test_contributions_are_dropped(self, server):
        server.push(contribution(0))
        server.fail(WorkerLostError("gone"))
        assert server.missing() == [0, 1]


GOOD = {
    "run_id": ["run"],
    "generation": [0],
    "rank": [0, 1, 2],
    "weight": [1.0, 0.5, 7],
    "reduction": ["mean"],
    "size": [3],
    "dtype": ["float64"],
}
ODD = {
    "run_id": ["other", ""],
    "generation": [-1, 1],
    "rank": [-1, 3, 2**70],
    "weight": [0.0, -0.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf")],
    "reduction": ["sum", "max", "", None],
    "size": [0, 2, 11, 2**64 - 1],
    "dtype": ["float32", "float16", "", None],
}


def test_any_sequence_of_messages_is_taken_or_refused_and_never_disturbs_a_good_round():
    choice = random.Random(0).choice
    server = server_for(3)
    outcomes = {"taken": 0, "refused": 0}
    for number in range(4000):
        fields = {name: choice(choice([GOOD] * 9 + [ODD])[name]) for name in GOOD}
        outcomes[push_any(server, server.round + choice([0] * 9 + [-1, 1]), fields)] += 1
        if number % 20 == 0:
            end_open_round(server)
            assert_round_works(server)
    assert min(outcomes.values()) > 500


def push_any(server, round_, fields):
    before = server.missing()
    try:
        complete = server.push(Contribution(round=round_, **fields))
    except (StaleMessageError, InvalidMessageError):
        assert server.missing() == before
        return "refused"
    assert (complete is not None) == (before == [fields["rank"]])
    return "taken"


def end_open_round(server):
    if len(server.missing()) < server.world_size:
        for rank in server.missing():
            server.push(contribution(rank, server.round, weight=0.0))
