"""The thread that serves the rounds of a run, and the ranks' channels to it, without a cluster."""

import contextlib
import functools
import itertools
import logging
import random
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from probes import wait_until
from ranks import RUN_ID, combined, fds, filled, hub, no_new_fds, round_threads, side_by_side

from daskps import _wire
from daskps._aggregators import CHUNK
from daskps._interpreter import EAGER_SECONDS
from daskps._links import SocketLink, receive_into
from daskps._rounds import RoundServer
from daskps._server import ParameterServer
from daskps._spec import Contribution
from daskps.exceptions import (
    DaskpsError,
    InvalidMessageError,
    RoundTimeoutError,
    RunAbortedError,
    StaleMessageError,
    WorkerLostError,
)

# What nobody closed says so when it is collected.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")

SOCKETS = ["unix", "tcp"]
ROADS = {
    "unix": ("unix",),
    "tcp": ("tcp",),
    "shared": ("shared",),
    "shared and unix": ("shared", "unix"),
    "tcp and shared": ("tcp", "shared"),
}
roads = pytest.mark.parametrize("kinds", ROADS.values(), ids=ROADS)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No thread and no descriptor; and the interpreter is as before."""
    before, interval = fds(), sys.getswitchinterval()
    yield
    assert round_threads() == []
    assert sys.getswitchinterval() == interval
    no_new_fds(before)


# What a rank says and hears, without a channel


def header(rank, round_=0, **fields):
    values = {"weight": 1.0, "reduction": "mean", "size": 3, "dtype": "float64", **fields}
    whose = {"run_id": RUN_ID, "generation": 0, **{k: values.pop(k) for k in WHOSE if k in values}}
    return _wire.pack_push(Contribution(**whose, rank=rank, round=round_, **values))


WHOSE = ("run_id", "generation")


def say(sock, rank, values, round_=0, weight=1.0, reduction="mean"):
    values = np.asarray(values)
    sock.sendall(
        header(rank, round_, weight=weight, reduction=reduction, size=len(values), dtype=str(values.dtype))
    )
    sock.sendall(values.tobytes())


def hear(sock):
    """The values of an answer; a refusal is raised, and an EOFError if there is no answer."""
    head = receive(sock, _wire.ANSWER_BYTES)
    answer = _wire.unpack_answer(head, lambda n_text: receive(sock, n_text))
    return np.frombuffer(receive(sock, _wire.following_bytes(head)), answer.dtype)


def receive(sock, n_bytes):
    data = bytearray(n_bytes)
    try:
        receive_into(sock, memoryview(data))
    except ConnectionResetError:
        raise EOFError("the connection was reset") from None
    return bytes(data)


def has_arrived(opened, *ranks):
    wait_until(lambda: not set(ranks) & set(opened.server.missing()))


def outcome(of):
    """What a call returns or raises."""
    try:
        return of()
    except Exception as error:
        return error


def outcomes(*calls):
    """What each of several calls at once returns or raises."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def push_pull(channel, values, weight=1.0, reduction="mean"):
    return lambda: channel.push_pull(np.asarray(values), weight, reduction)


def two_of_three(opened, kinds, event):
    """What two ranks get that wait in a round for the third, while something happens; its channel."""
    channels = [opened.channel(rank, kinds[rank % len(kinds)]) for rank in range(3)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(outcome, push_pull(channel, np.ones(3))) for channel in channels[:2]]
        has_arrived(opened, 0, 1)
        event()
        return [future.result() for future in waiting], channels[2]


# The result


def parts(n_ranks, size=50, dtype="float64"):
    generator = np.random.default_rng(0)
    return [generator.normal(size=size).astype(dtype) for _ in range(n_ranks)]


class TestResult:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("pair", SOCKETS)
    def test_bits_do_not_depend_on_the_order_of_arrival(self, pair, reduction, dtype):
        values, weights = parts(3, dtype=dtype), [3.0, 64.0, 5.0]
        expected = (values[0] + values[1]) + values[2]
        if reduction == "mean":
            expected = expected / np.dtype(dtype).type(72.0)
        with hub(3) as opened:
            socks = [opened.sock(rank, pair) for rank in range(3)]
            for round_, order in enumerate(itertools.permutations(range(3))):
                for rank in order[:-1]:
                    say(socks[rank], rank, values[rank], round_, weights[rank], reduction)
                    has_arrived(opened, rank)
                say(socks[order[-1]], order[-1], values[order[-1]], round_, weights[order[-1]], reduction)
                for sock in socks:
                    result = hear(sock)
                    assert result.dtype == dtype
                    assert result.tobytes() == expected.tobytes()

    @roads
    @pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
    def test_mean_is_weighted_and_sum_is_not(self, kinds, n_ranks):
        values, weights = parts(n_ranks), [64.0, 6.0, 1.5, 0.25][:n_ranks]
        scaled = [v * w for v, w in zip(values, weights, strict=True)]
        mean = combined(*((v, w, "mean") for v, w in zip(scaled, weights, strict=True)), kinds=kinds)
        np.testing.assert_allclose(mean, np.average(values, 0, weights), rtol=1e-13, atol=1e-15)
        total = combined(*((v, w, "sum") for v, w in zip(values, weights, strict=True)), kinds=kinds)
        np.testing.assert_allclose(total, np.sum(values, 0), rtol=1e-13, atol=1e-15)

    @roads
    def test_all_roads_give_the_same_bits(self, kinds):
        contributions = [(v, w, "mean") for v, w in zip(parts(4), [3.0, 0.0, 0.1, 7.0], strict=True)]
        result = combined(*contributions, kinds=kinds)
        assert result.tobytes() == combined(*contributions, kinds=("unix",)).tobytes()

    @roads
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_rank_of_weight_0_is_left_out_even_if_its_values_are_nan(self, kinds, reduction):
        values = np.array([2.0, 4.0])
        contributions = [(np.full(2, np.nan), 0.0, reduction), (values, 2.0, reduction)]
        expected = [1.0, 2.0] if reduction == "mean" else [2.0, 4.0]
        assert combined(*contributions, kinds=kinds).tolist() == expected
        assert combined(*contributions[::-1], kinds=kinds).tolist() == expected

    @roads
    def test_nan_that_counts_is_not_hidden(self, kinds):
        assert np.isnan(
            combined((np.full(2, np.nan), 1.0, "mean"), (np.ones(2), 1.0, "mean"), kinds=kinds)
        ).all()

    @roads
    def test_round_in_which_nobody_has_weight_is_empty_and_the_next_is_not(self, kinds):
        def rank_does(rank, channel):
            empty = channel.push_pull(filled(channel, [np.nan]), 0.0, "mean").size
            return empty, channel.push_pull(filled(channel, [rank + 1.0]), 1.0, "mean").tolist()

        assert side_by_side(3, rank_does, kinds=kinds) == [(0, [2.0])] * 3

    @roads
    @pytest.mark.parametrize("values", [
        np.array([1.5, -2.0, np.nan, np.inf, -np.inf], "float32"),
        np.array([1e-300, -0.0, 5e-324]),
        np.arange(2 * CHUNK + 7, dtype="float64"),
        np.arange(2 * CHUNK + 7, dtype="float32"),
    ])  # fmt: skip
    def test_of_one_rank_comes_back_bit_for_bit(self, kinds, values):
        def rank_does(rank, channel):
            return channel.push_pull(values, 1.0, "mean").copy()

        (result,) = side_by_side(1, rank_does, n_bytes=2 << 20, kinds=kinds)
        assert (result.dtype, result.tobytes()) == (values.dtype, values.tobytes())

    @roads
    def test_length_dtype_and_reduction_may_change_from_round_to_round(self, kinds):
        rounds = [(3, "float64", "mean"), (CHUNK + 1, "float32", "sum"), (1, "float32", "mean")]

        def rank_does(rank, channel):
            results = [
                channel.push_pull(filled(channel, np.full(size, rank + 1.0), dtype), 1.0, reduction).copy()
                for size, dtype, reduction in rounds
            ]
            return [(len(result), str(result.dtype), set(result.tolist())) for result in results]

        expected = [(3, "float64", {1.5}), (CHUNK + 1, "float32", {3.0}), (1, "float32", {1.5})]
        assert side_by_side(2, rank_does, kinds=kinds) == [expected] * 2

    @roads
    def test_what_is_pushed_is_not_changed(self, kinds):
        values = np.array([1.0, 2.0])
        values.flags.writeable = False
        combined((values, 1.0, "mean"), (values, 3.0, "mean"), kinds=kinds)
        assert values.tolist() == [1.0, 2.0]

    @roads
    def test_traffic_is_counted(self, kinds):
        def rank_does(rank, channel):
            channel.push_pull(np.ones(10), 1.0, "mean")
            channel.push_pull(np.ones(10), float(rank == 0), "mean")
            return channel.traffic

        first, second = side_by_side(2, rank_does, kinds=kinds)
        assert [first.rounds, second.rounds] == [2, 2]
        assert [first.bytes, second.bytes] == [4 * 80, 3 * 80]
        for traffic in (first, second):
            assert traffic.wait_seconds >= 0
            assert traffic.sync_seconds >= 0

    @roads
    def test_results_that_are_not_finite_are_counted(self, kinds):
        def rank_does(rank, channel):
            counts = []
            for value in (1.0, np.nan, np.inf, 2.0):
                channel.push_pull(np.array([1.0, value if rank else 1.0]), 1.0, "mean")
                counts.append(channel.n_not_finite)
            return counts

        assert side_by_side(2, rank_does, kinds=kinds) == [[0, 1, 2, 2]] * 2


def test_there_is_no_memory_of_rounds_that_are_over():
    """A rank may join just when they end, and nobody would close the memory."""
    over = threading.Event()
    rounds = RoundServer(ParameterServer("run", 2), 20.0, over.set)
    rounds.agree(64)
    rounds.close(RunAbortedError("the test is over"))
    assert over.wait(20)
    with pytest.raises(OSError, match="over"):
        rounds.results()


class TestManyRanks:
    @roads
    def test_8_ranks_of_4_megabytes_do_not_block_each_other(self, kinds):
        """No socket's buffer holds so much, so a rank sends while the server reads from another."""
        size = 1 << 20

        def rank_does(rank, channel):
            values = filled(channel, np.full(size, rank, "float32"), "float32")
            sums = [channel.push_pull(values, 1.0, "sum") for _ in range(3)]
            return len(sums[-1]), sums[-1].min(), sums[-1].max()

        results = side_by_side(8, rank_does, n_bytes=4 * size, kinds=kinds)
        assert results == [(size, 28.0, 28.0)] * 8

    def test_two_runs_at_once_do_not_meet(self):
        def run(factor):
            def rank_does(rank, channel):
                values = [factor * (rank + round_) for round_ in range(50)]
                return [channel.push_pull(np.array([v], "float64"), 1.0, "sum")[0] for v in values]

            return side_by_side(2, rank_does)

        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(run, [1.0, 1000.0]))
        for factor, result in zip([1.0, 1000.0], results, strict=True):
            assert result == [[factor * (1 + 2 * round_) for round_ in range(50)]] * 2


class TestResultMemory:
    def test_is_good_until_the_rank_contributes_again(self):
        """No rank can bring a round to its end, so that its result is written, before this one joins in."""

        def rank_does(rank, channel):
            values = filled(channel, np.full(1000, rank + 1.0))
            results = []
            for round_ in range(4):
                result = channel.push_pull(values, 1.0, "sum")
                values += 1  # while the other rank may be a round ahead
                assert set(result.tolist()) == {3.0 + 2 * round_}
                results.append(result)
            return [np.shares_memory(results[0], other) for other in results[1:]]

        assert side_by_side(2, rank_does, kinds=("shared",)) == [[True, True, True]] * 2

    @roads
    def test_of_pushes_on_their_way_has_places_of_its_own(self, kinds):
        def rank_does(rank, channel):
            room = channel.allocate(48, "float64")
            places = [room[0:16], room[16:24], room[40:48]]
            results = []
            for turn in range(3):
                for number, place in enumerate(places):
                    place[:] = 100 * turn + 10 * number + rank
                    channel.push(place, 1.0, "mean")
                results.append([set(channel.pull().tolist()) for _ in places])
            return results

        expected = [[{100 * turn + 10 * number + 0.5} for number in range(3)] for turn in range(3)]
        assert side_by_side(2, rank_does, kinds=kinds) == [expected] * 2

    def test_of_one_size_of_result_does_not_touch_that_of_another(self):
        def rank_does(rank, channel):
            small = channel.push_pull(filled(channel, np.ones(2)), 1.0, "sum").tolist()
            large = channel.push_pull(filled(channel, np.full(100, 5.0)), 1.0, "sum")
            return small, set(large.tolist())

        results = side_by_side(2, rank_does, n_bytes=832, kinds=("shared",))
        assert results == [([2.0, 2.0], {10.0})] * 2

    def test_values_in_the_room_of_the_channel_are_not_copied(self):
        with hub(1) as opened:
            channel = opened.channel(0, "shared")
            first, second = (channel.allocate(size, "float64") for size in (10, 20))
            assert np.shares_memory(first, second)
            first[:] = 2.0
            assert channel.push_pull(first, 1.0, "mean").tolist() == [2.0] * 10
            assert first.tolist() == [2.0] * 10


class TestCapacity:
    """The ranks agree on 64 bytes: 8 values of float64."""

    @pytest.mark.parametrize(("size", "dtype"), [(9, "float64"), (17, "float32"), (2**63, "float32")])
    @pytest.mark.parametrize("pair", SOCKETS)
    def test_larger_contribution_is_refused_to_all(self, pair, size, dtype):
        with hub(2, n_bytes=64) as opened:
            socks = [opened.sock(rank, pair) for rank in range(2)]
            say(socks[0], 0, np.ones(8))
            has_arrived(opened, 0)
            socks[1].sendall(header(1, size=size, dtype=dtype))
            for sock in socks:
                with pytest.raises(InvalidMessageError, match=f"rank 1 sent {size} values .* of 64 bytes"):
                    hear(sock)
            opened.join()

    @roads
    @pytest.mark.parametrize(("size", "dtype", "n_rounds"), [
        (8, "float64", 1), (9, "float64", 2), (16, "float64", 2), (17, "float64", 3), (16, "float32", 1),
        (33, "float32", 3),
    ])  # fmt: skip
    def test_channel_cuts_what_is_longer_into_rounds(self, kinds, size, dtype, n_rounds):
        def rank_does(rank, channel):
            values = filled(channel, np.arange(size) * (rank + 1.0), dtype)
            result = channel.push_pull(values, 1.0, "sum").copy()
            assert channel.traffic.rounds == n_rounds
            after = channel.push_pull(np.ones(1), 1.0, "sum")
            return result.dtype, result.tolist(), after.tolist()

        expected = (np.dtype(dtype), (6.0 * np.arange(size)).tolist(), [3.0])
        assert side_by_side(3, rank_does, n_bytes=64, kinds=kinds) == [expected] * 3

    @roads
    def test_rank_of_weight_0_takes_part_in_all_of_them(self, kinds):
        def rank_does(rank, channel):
            result = channel.push_pull(np.arange(20.0), float(rank == 1), "mean")
            return result.tolist(), channel.traffic.rounds

        results = side_by_side(3, rank_does, n_bytes=64, kinds=kinds)
        assert results == [(np.arange(20.0).tolist(), 3)] * 3

    @roads
    def test_where_nobody_has_weight_the_result_of_all_of_them_is_empty(self, kinds):
        def rank_does(rank, channel):
            return channel.push_pull(np.arange(20.0), 0.0, "mean").size, channel.traffic.rounds

        assert side_by_side(2, rank_does, n_bytes=64, kinds=kinds) == [(0, 3)] * 2

    def test_ranks_that_do_not_agree_are_refused_and_the_first_stays(self):
        with hub(2, n_bytes=64) as opened:
            with pytest.raises(InvalidMessageError, match="128 bytes, others have 64"):
                opened.rounds.agree(128)
            opened.rounds.agree(64)
            assert opened.server.capacity == 64


# How a run ends


def close_hard(sock):
    """Close a connection so that the peer gets an error instead of an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


GONE = {
    "before anything": lambda sock: None,
    "in the header": lambda sock: sock.sendall(header(1)[:20]),
    "after the header": lambda sock: sock.sendall(header(1)),
    "in the values": lambda sock: sock.sendall(header(1) + b"12345"),
}


class TestRankThatCloses:
    """No other error than that of a run that ended: why it did is known where the rank was."""

    @pytest.mark.parametrize("close", [socket.socket.close, close_hard], ids=["close", "reset"])
    @pytest.mark.parametrize("pair", SOCKETS)
    @pytest.mark.parametrize("when", GONE)
    @pytest.mark.parametrize("kind", ["unix", "shared"])
    def test_ends_the_run_for_those_who_wait(self, kind, when, pair, close, caplog):
        with hub(3) as opened:
            channels = [opened.channel(0, kind), opened.channel(2, kind)]
            sock = opened.sock(1, pair)
            with ThreadPoolExecutor(2) as pool:
                waiting = [pool.submit(outcome, push_pull(channel, np.ones(3))) for channel in channels]
                has_arrived(opened, 0, 2)
                GONE[when](sock)
                close(sock)
                errors = [future.result() for future in waiting]
            opened.join()
            assert [type(error) for error in errors] == [RunAbortedError] * 2
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    @pytest.mark.parametrize("close", [socket.socket.close, close_hard], ids=["close", "reset"])
    @pytest.mark.parametrize("pair", SOCKETS)
    def test_ends_the_run_while_it_waits_itself(self, pair, close):
        """It has contributed; the round is not complete and will not be."""
        with hub(3) as opened:
            channel, sock = opened.channel(0), opened.sock(1, pair)
            idle = opened.sock(2)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(outcome, push_pull(channel, np.ones(3)))
                say(sock, 1, np.ones(3))
                has_arrived(opened, 0, 1)
                close(sock)
                assert type(waiting.result()) is RunAbortedError
            with pytest.raises(EOFError):
                hear(idle)
            opened.join()

    @pytest.mark.parametrize("close", [socket.socket.close, close_hard], ids=["close", "reset"])
    @pytest.mark.parametrize("pair", SOCKETS)
    @pytest.mark.parametrize("came", ["last", "first"])
    def test_instead_of_taking_the_result_ends_the_run(self, came, pair, close, caplog):
        """Who comes last is answered first: the other never gets the result, or has it already."""
        n_values = 1 << 20  # more than the buffers of a socket hold
        taken = threading.Event()
        with hub(2, n_bytes=8 * n_values) as opened:
            channel, sock = opened.channel(0), opened.sock(1, pair)

            def leave():
                if came == "last":
                    has_arrived(opened, 0)
                say(sock, 1, np.ones(n_values), reduction="sum")
                if came == "first":
                    assert taken.wait(30)
                close(sock)

            def stay():
                if came == "first":
                    has_arrived(opened, 1)
                for _ in range(3):
                    channel.push_pull(np.ones(n_values), 1.0, "sum")
                    taken.set()

            _, error = outcomes(leave, stay)
            assert type(error) is RunAbortedError
            assert channel.traffic.rounds == (came == "first")
            opened.join()
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []

    def test_before_all_have_joined_ends_the_run_when_they_have(self):
        with hub(2) as opened:
            opened.sock(0).close()
            channel = opened.channel(1)
            with pytest.raises(RunAbortedError):
                channel.push_pull(np.ones(3), 1.0, "mean")
            opened.join()


class TestDeadline:
    def test_names_the_ranks_that_did_not_contribute_and_the_setting(self):
        with hub(4, patience=2.0) as opened:
            channels = [opened.channel(rank) for rank in range(4)]
            errors = outcomes(*(push_pull(channels[rank], np.ones(3)) for rank in (1, 3)))
            for error in errors:
                assert type(error) is RoundTimeoutError
                assert "Round 0 waited 2 s for ranks [0, 2]." in str(error)
                assert "daskps.timeouts.round" in str(error)
            # The others learn it as soon as they ask.
            for rank in (0, 2):
                with pytest.raises(RoundTimeoutError, match=r"ranks \[0, 2\]"):
                    channels[rank].push_pull(np.ones(3), 1.0, "mean")
            opened.join()

    def test_names_the_ranks_that_did_not_join(self):
        with hub(3, patience=0.2) as opened:
            channel = opened.channel(1)
            with pytest.raises(RoundTimeoutError, match=r"ranks \[0, 2\]\. .*daskps\.timeouts\.round"):
                channel.push_pull(np.ones(3), 1.0, "mean")
            opened.join()

    @pytest.mark.parametrize("said", ["in the header", "after the header", "in the values"])
    def test_holds_for_a_rank_that_stops_in_the_middle(self, said):
        with hub(2, patience=0.5) as opened:
            channel, sock = opened.channel(0), opened.sock(1)
            GONE[said](sock)
            error = outcome(push_pull(channel, np.ones(3)))
            assert type(error) is RoundTimeoutError
            assert "daskps.timeouts.round" in str(error)
            opened.join()

    def test_begins_when_the_first_rank_waits(self):
        """Between two epochs the client works, and no rank waits for another."""
        with hub(2, patience=1.0) as opened:
            channels = [opened.channel(rank) for rank in range(2)]
            for _ in range(2):
                results = outcomes(*(push_pull(channel, np.ones(3)) for channel in channels))
                assert [result.tolist() for result in results] == [[1.0] * 3] * 2
                assert not opened.ended.wait(2.0)


class TestRefusal:
    @pytest.mark.parametrize(("fields", "kind", "reason"), [
        ({"run_id": "f" * 32}, StaleMessageError, "run 'f+' is not open"),
        ({"run_id": "run"}, StaleMessageError, "is not open"),
        ({"rank": 0}, InvalidMessageError, "rank 1 speaks for rank 0"),
        ({"rank": 2}, InvalidMessageError, "rank 1 speaks for rank 2"),
        ({"generation": 6}, StaleMessageError, "generation 6 is over, it is 7"),
        ({"generation": 8}, InvalidMessageError, "has not begun"),
        ({"round_": 0}, StaleMessageError, "round 0 is over, it is 1"),
        ({"round_": 2}, InvalidMessageError, "has not begun"),
        ({"size": 4}, InvalidMessageError, "rank 1 sent .* rank 0 sent"),
        ({"dtype": "float32"}, InvalidMessageError, "rank 1 sent .* rank 0 sent"),
        ({"reduction": "sum"}, InvalidMessageError, "rank 1 sent .* rank 0 sent"),
        ({"weight": 0.0}, InvalidMessageError, "rank 1 sent 3 values with weight 0"),
        ({"size": 0}, InvalidMessageError, "rank 1 sent 0 values with weight 1"),
        ({"weight": float("nan")}, InvalidMessageError, "weight nan of rank 1"),
        ({"weight": -1.0}, InvalidMessageError, "weight -1.0 of rank 1"),
    ])  # fmt: skip
    @pytest.mark.parametrize("kind_of_1", ["unix", "shared"])
    def test_reaches_all_ranks(self, kind_of_1, fields, kind, reason):
        with hub(3) as opened:
            opened.server.generation = 7
            opened.server.round = 1
            channel = opened.channel(1, kind_of_1)
            socks = [opened.sock(0), channel._sock, opened.sock(2)]
            socks[0].sendall(header(0, 1, generation=7))
            has_arrived(opened, 0)
            good = {"rank": 1, "round_": 1, "generation": 7}
            socks[1].sendall(header(**{**good, **fields}))
            for sock in socks:
                with pytest.raises(DaskpsError, match=reason) as caught:
                    hear(sock)
                assert type(caught.value) is kind
                with pytest.raises(EOFError):
                    hear(sock)
            opened.join()

    @pytest.mark.parametrize("code", [b"\xff" * 32, b"\0" * 32])
    def test_of_bytes_that_are_no_header_reaches_all_ranks(self, code):
        with hub(2) as opened:
            socks = [opened.sock(rank) for rank in range(2)]
            socks[1].sendall(code + b"\xff" * (_wire.PUSH_BYTES - 32))
            for sock in socks:
                with pytest.raises((InvalidMessageError, StaleMessageError)):
                    hear(sock)
            opened.join()

    def test_of_a_second_contribution_to_a_round_that_is_over(self):
        with hub(2) as opened:
            channel = opened.channel(0, "shared")
            other = opened.sock(1)
            channel._sock.sendall(header(0) + header(0))
            say(other, 1, np.ones(3))
            assert len(hear(other)) == 3
            with pytest.raises(StaleMessageError, match="round 0 is over, it is 1"):
                hear(other)
            opened.join()

    @pytest.mark.parametrize("pair", SOCKETS)
    def test_reaches_a_rank_that_is_in_the_middle_of_sending(self, pair):
        n_values = 1 << 20
        with hub(2, n_bytes=8 * n_values) as opened:
            channels = [opened.channel(rank, pair) for rank in range(2)]
            calls = [
                push_pull(channels[0], np.ones(n_values)),
                push_pull(channels[1], np.ones(n_values - 1)),
            ]
            errors = outcomes(*calls)
            for error in errors:
                assert type(error) is InvalidMessageError
                assert f"{n_values - 1}" in str(error)
            opened.join()

    def test_of_a_rank_that_asks_again_is_the_same(self):
        with hub(2) as opened:
            channels = [opened.channel(rank) for rank in range(2)]
            opened.rounds.fail(WorkerLostError("worker 1 left"))
            opened.join()
            for channel in channels:
                with pytest.raises(WorkerLostError, match="worker 1 left"):
                    channel.push_pull(np.ones(3), 1.0, "mean")
                with pytest.raises(RunAbortedError):
                    channel.push_pull(np.ones(3), 1.0, "mean")


class TestFailure:
    @roads
    def test_from_outside_reaches_all_that_wait(self, kinds):
        with hub(3) as opened:
            fail = functools.partial(opened.rounds.fail, WorkerLostError("worker 2 left"))
            errors, _ = two_of_three(opened, kinds, fail)
            opened.join()
            for error in errors:
                assert type(error) is WorkerLostError
                assert str(error) == "worker 2 left"

    def test_before_anybody_has_joined_ends_the_thread(self):
        with hub(2) as opened:
            opened.rounds.fail(WorkerLostError("gone"))
            opened.join()

    def test_is_the_first_whatever_follows(self):
        with hub(2) as opened:
            channels = [opened.channel(rank) for rank in range(2)]
            opened.rounds.fail(WorkerLostError("the first"))
            opened.rounds.fail(DaskpsError("a consequence"))
            errors = outcomes(*(push_pull(channel, np.ones(3)) for channel in channels))
            assert [str(error) for error in errors] == ["the first"] * 2

    def test_of_the_sum_reaches_all_ranks_and_is_logged(self, monkeypatch, caplog):
        def fail(*args):
            raise ArithmeticError("two and two")

        monkeypatch.setattr("daskps._rounds.combine", fail)
        with hub(2) as opened:
            channels = [opened.channel(rank) for rank in range(2)]
            errors = outcomes(*(push_pull(channel, np.ones(3)) for channel in channels))
            for error in errors:
                assert type(error) is DaskpsError
                assert "two and two" in str(error)
            opened.join()
        assert "two and two" in caplog.text

    def test_while_contributions_come_in_is_never_taken_for_a_fault_of_the_sum(self, caplog):
        """The event loop fails the run while the thread looks at what is pending."""
        for _ in range(100):
            with hub(4) as opened:
                channels = [opened.channel(rank) for rank in range(4)]
                fail = functools.partial(opened.rounds.fail, WorkerLostError("gone"))
                results = outcomes(*(push_pull(channel, np.ones(3)) for channel in channels), fail)
                for result in results[:-1]:
                    assert isinstance(result, (np.ndarray, WorkerLostError)), result
        assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


class TestClose:
    @pytest.mark.parametrize("kinds", [("unix",), ("tcp", "shared")])
    def test_ends_a_round_that_waits(self, kinds):
        with hub(3) as opened:
            errors, third = two_of_three(opened, kinds, opened.end)
            assert [type(error) for error in errors] == [RunAbortedError] * 2
            with pytest.raises(RunAbortedError):
                third.push_pull(np.ones(3), 1.0, "mean")

    @pytest.mark.parametrize("pair", SOCKETS)
    def test_ends_a_round_that_reads(self, pair):
        """The thread is inside a call to the socket of a rank that stopped in its values."""
        with hub(2) as opened:
            channel, sock = opened.channel(0), opened.sock(1, pair)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(outcome, push_pull(channel, np.ones(3)))
                sock.sendall(header(1) + b"12345")
                wait_until(lambda: opened.server.round == 1)
                opened.end()
                assert type(waiting.result()) is RunAbortedError

    def test_again_is_nothing_and_nothing_can_be_attached_any_more(self):
        with hub(2) as opened:
            opened.end()
            opened.rounds.close(RunAbortedError("again"))
            opened.rounds.fail(RunAbortedError("again"))
            with pytest.raises(EOFError):
                hear(opened.sock(0))


class TestAttach:
    @pytest.mark.parametrize("pair", SOCKETS)
    def test_of_a_rank_that_is_there_closes_the_second_and_leaves_the_first(self, pair):
        with hub(2) as opened:
            channels = [opened.channel(rank, pair) for rank in range(2)]
            again = opened.sock(0, pair)
            with pytest.raises(EOFError):
                hear(again)
            results = outcomes(*(push_pull(channel, np.ones(3)) for channel in channels))
            assert [result.tolist() for result in results] == [[1.0] * 3] * 2

    @pytest.mark.parametrize("rank", [2, -1, 2**40])
    def test_of_a_rank_that_is_none_closes_it_and_the_run_waits_for_the_others(self, rank):
        with hub(2) as opened:
            first, stranger = opened.channel(0), opened.sock(rank)
            with pytest.raises(EOFError):
                hear(stranger)
            second = opened.channel(1)
            results = outcomes(*(push_pull(channel, np.ones(3)) for channel in (first, second)))
            assert [result.tolist() for result in results] == [[1.0] * 3] * 2

    def test_order_does_not_matter(self):
        with hub(3) as opened:
            channels = {rank: opened.channel(rank) for rank in (2, 0, 1)}
            assert opened.rounds.kinds() == ["comm"] * 3
            results = outcomes(*(push_pull(channels[rank], [float(rank)]) for rank in range(3)))
            assert [result.tolist() for result in results] == [[1.0]] * 3

    def test_kinds_are_in_rank_order(self):
        with hub(2) as opened:
            _first, _second = opened.channel(1, "shared"), opened.channel(0)
            assert opened.rounds.kinds() == ["comm", "shared-memory"]


class TestInterpreter:
    def test_hands_over_sooner_until_the_last_run_has_ended(self):
        usual = sys.getswitchinterval()
        with hub(2):
            assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS)
            with hub(2):
                assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS)
            assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS)
        assert sys.getswitchinterval() == usual

    def test_is_as_before_after_a_run_that_failed(self):
        usual = sys.getswitchinterval()
        with hub(2) as opened:
            opened.rounds.fail(WorkerLostError("gone"))
            opened.join()
            assert sys.getswitchinterval() == usual


class TestEnd:
    def test_of_many_runs_leaves_nothing(self):
        """Every kind of end, again and again; the fixture counts."""

        def meet(rank, channel):
            return channel.push_pull(np.ones(3), 1.0, "mean").sum()

        for kinds in ROADS.values():
            for _ in range(5):
                assert side_by_side(2, meet, kinds=kinds) == [3.0, 3.0]
                with pytest.raises(ZeroDivisionError):
                    side_by_side(2, lambda rank, channel: 1 // rank, kinds=kinds)


# Malformed, stale and foreign


def odd_header(generator, rank, round_):
    """A header that differs from the right one in one field or more, or in anything."""
    right = header(rank, round_)
    kind = generator.choice(["bytes", "field", "noise", "short"])
    if kind == "noise":
        return generator.randbytes(_wire.PUSH_BYTES)
    if kind == "short":
        return right[: generator.randrange(_wire.PUSH_BYTES)]
    if kind == "field":
        field = generator.choice(list(ODD))
        return header(**{"rank": rank, "round_": round_, field: generator.choice(ODD[field])})
    odd = bytearray(right)
    for _ in range(generator.choice([1, 1, 2, 8])):
        odd[generator.randrange(len(odd))] ^= generator.randrange(1, 256)
    return bytes(odd)


ODD = {
    "run_id": ["", "f" * 32, "../../etc/passwd"],
    "generation": [1, 2**32 - 1],
    "rank": [0, 2, 2**32 - 1],
    "round_": [0, 2, 2**64 - 1],
    "weight": [0.0, -0.0, -1.0, float("nan"), float("inf"), float("-inf")],
    "reduction": ["sum"],
    "size": [0, 1, 4, 10_000, 2**64 - 1],
    "dtype": ["float32"],
    "offset": [1, 7, 2**16, 2**63, 2**64 - 1],
    "narrow": [1, 3, 4, 2**64 - 1],
}


class TestFuzz:
    N = 2000

    def test_any_header_ends_its_own_run_with_a_typed_error_and_no_other(self):
        generator = random.Random(0)
        ended = {"refused": 0, "closed": 0, "taken": 0}
        stop = threading.Event()

        def rank_does(rank, channel):
            n_rounds = 0
            while channel.push_pull(np.array([float(stop.is_set())]), 1.0, "sum")[0] == 0:
                total = channel.push_pull(filled(channel, np.full(500, n_rounds + rank)), 1.0, "sum")
                assert set(total.tolist()) == {2.0 * n_rounds + 1}
                n_rounds += 1
                stop.wait(0.002)
            return n_rounds

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(side_by_side, 2, rank_does)
            try:
                for _ in range(self.N):
                    ended[self.one_run(generator)] += 1
                assert not other.done()
            finally:
                stop.set()
            first, second = other.result()
        assert first == second > 0
        assert sum(ended.values()) == self.N
        assert ended["refused"] > self.N / 2
        assert ended["closed"] > 100
        assert ended["taken"] < self.N / 10  # another weight is as good

    def one_run(self, generator):
        """How a run ends whose rank 1 says something odd in its second round."""
        with hub(2, n_bytes=64) as opened:
            socks = [opened.sock(rank) for rank in range(2)]
            for rank, sock in enumerate(socks):
                say(sock, rank, np.ones(3))
            for sock in socks:
                assert hear(sock).tolist() == [1.0] * 3
            said = odd_header(generator, 1, 1)
            say(socks[0], 0, np.ones(3), 1)
            has_arrived_or_ended(opened)
            say_and_end(socks[1], said)
            heard = [outcome(lambda sock=sock: hear(sock)) for sock in socks]
            opened.join()
        kinds = {type(result) for result in heard}
        if kinds == {EOFError}:
            return "closed"
        if kinds == {np.ndarray}:
            return "taken"
        assert len(kinds) == 1
        assert kinds <= {InvalidMessageError, StaleMessageError}
        return "refused"


def has_arrived_or_ended(opened):
    def is_true():
        return opened.server.missing() == [1] or opened.server.error is not None

    wait_until(is_true, every=0.0001)  # thousands of times


def say_and_end(sock, said):
    """Say something, then values, whatever was said of them, and then that there will be no more."""
    with contextlib.suppress(OSError):  # refused meanwhile
        sock.sendall(said + b"\0" * 24)
        sock.shutdown(socket.SHUT_WR)


def test_links_say_of_what_kind_they_are():
    ours, theirs = socket.socketpair()
    assert SocketLink(theirs).kind == "comm"
    ours.close()
    theirs.close()
