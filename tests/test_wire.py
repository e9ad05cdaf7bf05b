import pickle
import random
import struct

import distributed.protocol.pickle
import pytest

from daskps import _wire, exceptions
from daskps._server import ParameterServer
from daskps._spec import Contribution
from daskps._wire import Answer
from daskps.exceptions import (
    DaskpsError,
    InvalidMessageError,
    RoundTimeoutError,
    StaleMessageError,
    WorkerLostError,
)

RUN_ID = "0123456789abcdef" * 2


def contribution(**fields):
    good = {
        "run_id": RUN_ID, "generation": 2, "rank": 1, "round": 5, "weight": 2.5, "reduction": "mean",
        "size": 1000, "dtype": "float32",
    }  # fmt: skip
    return Contribution(**{**good, **fields})


@pytest.fixture
def no_pickle(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    for module in (distributed.protocol.pickle, pickle):
        monkeypatch.setattr(module, "dumps", refuse)
        monkeypatch.setattr(module, "loads", refuse)


def answered(data):
    """An answer that was read as a rank reads it: a header, and as much text as that announces."""
    header, text = data[: _wire.ANSWER_BYTES], data[_wire.ANSWER_BYTES :]

    def whole_text(n_text):
        assert n_text == len(text)
        return text

    return _wire.unpack_answer(header, whole_text)


@pytest.mark.usefixtures("no_pickle")
class TestRoundTrip:
    @pytest.mark.parametrize("fields", [
        {},
        {"reduction": "sum"},
        {"dtype": "float64"},
        {"weight": 0.0, "size": 0},
        {"weight": 1 / 3},
        {"generation": 2**32 - 1, "rank": 2**32 - 1, "round": 2**64 - 1, "size": 2**64 - 1},
    ])  # fmt: skip
    def test_contribution_arrives_as_it_was(self, fields):
        header = _wire.pack_push(contribution(**fields))
        assert len(header) == _wire.PUSH_BYTES
        assert _wire.unpack_push(header) == contribution(**fields)

    @pytest.mark.parametrize("weight", [float("nan"), float("inf"), float("-inf"), -1.0, -0.0])
    def test_weight_arrives_bit_for_bit_so_that_the_server_can_refuse_it(self, weight):
        received = _wire.unpack_push(_wire.pack_push(contribution(weight=weight)))
        assert struct.pack("d", received.weight) == struct.pack("d", weight)

    @pytest.mark.parametrize("answer", [
        Answer(1000, "float32", 12.25, 0.5), Answer(0, "float64", 1e9, 0.0),
        Answer(2**64 - 1, "float64", 0.1, 1e-9), Answer(10, "float32", 1.0, 0.5, 8, finite=False),
    ])  # fmt: skip
    def test_answer_arrives_as_it_was(self, answer):
        assert answered(_wire.pack_answer(answer)) == answer

    @pytest.mark.parametrize(("answer", "expected"), [
        (Answer(10, "float32", 0.0, 0.0), 40),
        (Answer(10, "float64", 0.0, 0.0), 80),
        (Answer(0, "float64", 0.0, 0.0), 0),
    ])  # fmt: skip
    def test_header_says_how_much_follows(self, answer, expected):
        header = _wire.pack_answer(answer)
        assert _wire.following_bytes(header) == expected

    def test_header_of_a_refusal_says_how_much_text_follows(self):
        data = _wire.pack_refusal(WorkerLostError("gone"))
        header = data[: _wire.ANSWER_BYTES]
        assert _wire.following_bytes(header) == len(data) - _wire.ANSWER_BYTES


class TestRefusal:
    @pytest.mark.parametrize("kind", [
        InvalidMessageError, StaleMessageError, RoundTimeoutError, WorkerLostError, DaskpsError,
    ])  # fmt: skip
    def test_is_raised_as_the_error_that_it_names(self, kind):
        with pytest.raises(DaskpsError, match=r"^what went wrong$") as caught:
            answered(_wire.pack_refusal(kind("what went wrong")))
        assert type(caught.value) is kind

    def test_of_a_kind_that_is_not_known_here_is_a_general_error(self):
        class NewerError(DaskpsError):
            pass

        with pytest.raises(DaskpsError, match="new") as caught:
            answered(_wire.pack_refusal(NewerError("new")))
        assert type(caught.value) is DaskpsError

    @pytest.mark.parametrize("kind", ["annotations", "__builtins__", "__doc__", "", "no such"])
    def test_of_a_name_that_is_no_error_is_a_general_error(self, kind):
        error = _wire.error_of(kind, "reason")
        assert type(error) is DaskpsError
        assert "reason" in str(error)

    def test_all_errors_of_the_package_survive(self):
        kinds = [k for k in vars(exceptions).values() if isinstance(k, type)]
        assert len(kinds) > 5
        for kind in kinds:
            with pytest.raises(kind):
                answered(_wire.pack_refusal(kind("reason")))

    def test_keeps_every_line_and_letter(self):
        reason = "first line\nsecond line: \u00e4\u20ac"
        with pytest.raises(DaskpsError) as caught:
            answered(_wire.pack_refusal(DaskpsError(reason)))
        assert str(caught.value) == reason

    @pytest.mark.parametrize("letter", ["x", "\u00e4", "\u20ac"])
    def test_of_any_length_arrives_with_its_beginning(self, letter):
        with pytest.raises(StaleMessageError, match=f"^{letter * 1000}"):
            answered(_wire.pack_refusal(StaleMessageError(letter * 100_000)))


class TestMalformed:
    @pytest.mark.parametrize("size", [0, 1, _wire.PUSH_BYTES - 1, _wire.PUSH_BYTES + 1])
    def test_header_of_another_length_is_invalid(self, size):
        with pytest.raises(InvalidMessageError, match="header"):
            _wire.unpack_push((_wire.pack_push(contribution()) * 2)[:size])

    @pytest.mark.parametrize("run_id", [b"\xff" * 32, b"\xc3" * 32, b"a" * 31 + b"\xc3"])
    def test_run_that_is_no_text_is_invalid(self, run_id):
        with pytest.raises(InvalidMessageError, match="header"):
            _wire.unpack_push(run_id + _wire.pack_push(contribution())[32:])

    @pytest.mark.parametrize("code", [2, 3, 255])
    @pytest.mark.parametrize("field", [-26, -25], ids=["reduction", "dtype"])
    def test_code_that_stands_for_nothing_is_invalid(self, field, code):
        header = bytearray(_wire.pack_push(contribution()))
        header[field] = code
        with pytest.raises(InvalidMessageError, match="header"):
            _wire.unpack_push(bytes(header))

    def test_run_of_another_name_does_not_become_ours(self):
        """Names shorter or longer than a run's are padded or cut, and never taken for it."""
        server = ParameterServer(RUN_ID, 1)
        for run_id in ("", RUN_ID[:-1], RUN_ID[:-1] + "\0", "x" + RUN_ID):
            received = _wire.unpack_push(_wire.pack_push(contribution(run_id=run_id)))
            with pytest.raises(StaleMessageError):
                server.push(received)

    def test_random_bytes_are_taken_or_refused_with_a_typed_error_by_wire_and_server(self):
        generator = random.Random(0)
        refused = 0
        for _ in range(3000):
            server = ParameterServer(RUN_ID, 3)
            server.capacity, server.generation, server.round = 4000, 2, 5
            header = bytearray(_wire.pack_push(contribution()))
            for _ in range(generator.choice([1, 1, 2, 8])):
                header[generator.randrange(len(header))] = generator.randrange(256)
            try:
                server.push(_wire.unpack_push(bytes(header)))
            except (InvalidMessageError, StaleMessageError):
                refused += 1
                assert server.missing() == [0, 1, 2]
            else:
                assert len(server.missing()) == 2
        assert 2000 < refused < 3000

    def test_bytes_that_are_no_header_at_all_are_refused(self):
        generator = random.Random(0)
        server = ParameterServer(RUN_ID, 3)
        server.capacity = 1 << 30
        for _ in range(1000):
            with pytest.raises((InvalidMessageError, StaleMessageError)):
                server.push(_wire.unpack_push(generator.randbytes(_wire.PUSH_BYTES)))
