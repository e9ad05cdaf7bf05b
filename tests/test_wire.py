import random

import distributed.protocol.pickle
import msgpack
import numpy as np
import pytest
from distributed.protocol import Serialized, dumps, loads

from daskps import _wire, exceptions
from daskps._server import ParameterServer
from daskps._spec import Ticket
from daskps.exceptions import (
    DaskpsError,
    InvalidMessageError,
    RoundTimeoutError,
    StaleMessageError,
    WorkerLostError,
)

TICKET = Ticket("run", 2, 1, 3)


def sent(message):
    """The message as it arrives on a connection that deserializes nothing."""
    return loads([bytes(frame) for frame in dumps(message)], deserialize=False)


@pytest.fixture
def no_pickle(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("pickle was used")

    monkeypatch.setattr(distributed.protocol.pickle, "dumps", refuse)
    monkeypatch.setattr(distributed.protocol.pickle, "loads", refuse)


ARRAYS = [
    np.array([1.5, -2.0, np.nan, np.inf], "float32"),
    np.array([1e-300, -0.0]),
    np.empty(0, "float32"),
    np.arange(100_000, dtype="float64"),
]


@pytest.mark.usefixtures("no_pickle")
class TestRoundTrip:
    @pytest.mark.parametrize("buffer", ARRAYS)
    def test_contribution_arrives_bit_for_bit(self, buffer):
        received = _wire.contribution(sent(_wire.push(TICKET, 5, 2.5, "mean", buffer)))
        assert received.buffer.tobytes() == buffer.tobytes()
        assert received.buffer.dtype == buffer.dtype
        assert (received.run_id, received.generation, received.rank) == ("run", 2, 1)
        assert (received.round, received.weight, received.reduction) == (5, 2.5, "mean")

    @pytest.mark.parametrize("mean", ARRAYS)
    def test_result_arrives_bit_for_bit(self, mean):
        received, waited = _wire.result(sent(_wire.answer(mean, waited=0.25)))
        assert received.tobytes() == mean.tobytes()
        assert received.dtype == mean.dtype
        assert waited == 0.25

    def test_values_are_opaque_to_dask(self):
        message = sent(_wire.push(TICKET, 0, 1.0, "sum", np.ones(3)))
        assert isinstance(message["buffer"], Serialized)


class TestRefusal:
    @pytest.mark.parametrize("kind", [
        InvalidMessageError, StaleMessageError, RoundTimeoutError, WorkerLostError, DaskpsError,
    ])  # fmt: skip
    def test_is_raised_as_the_error_that_it_names(self, kind):
        with pytest.raises(DaskpsError, match=r"^what went wrong$") as caught:
            _wire.result(sent(_wire.refusal(kind("what went wrong"))))
        assert type(caught.value) is kind

    def test_of_a_kind_that_is_not_known_here_is_a_general_error(self):
        class NewerError(DaskpsError):
            pass

        with pytest.raises(DaskpsError, match="new") as caught:
            _wire.result(sent(_wire.refusal(NewerError("new"))))
        assert type(caught.value) is DaskpsError

    def test_all_errors_of_the_package_survive(self):
        kinds = [k for k in vars(exceptions).values() if isinstance(k, type)]
        assert len(kinds) > 5
        for kind in kinds:
            with pytest.raises(kind):
                _wire.result(_wire.refusal(kind("reason")))


def good_message():
    return _wire.push(TICKET, 0, 1.0, "mean", np.ones(3))


ODD = [
    None, True, 0, -1, 2**70, 1.5, float("nan"), "", "0", "float16", "object", b"", b"12345678",
    [], [1], (), {}, {"a": 1}, object(), np.ones(2), np.float32(1),
    Serialized({}, []), Serialized({}, [b"1234567"]), Serialized({}, [b"1" * 8, b"1" * 8]),
    Serialized({}, ["text"]), Serialized({}, [None]), Serialized({}, None),
]  # fmt: skip


class TestMalformed:
    @pytest.mark.parametrize("message", [*ODD, [("run_id", "run")], "text", range(3)])
    def test_what_is_no_message_is_invalid(self, message):
        with pytest.raises(InvalidMessageError):
            _wire.contribution(message)

    @pytest.mark.parametrize("name", list(good_message()))
    def test_missing_field_is_invalid(self, name):
        message = good_message()
        del message[name]
        with pytest.raises(InvalidMessageError):
            _wire.contribution(message)

    def test_unknown_field_is_invalid(self):
        with pytest.raises(InvalidMessageError):
            _wire.contribution({**good_message(), "extra": 1})

    @pytest.mark.parametrize("name", list(good_message()))
    @pytest.mark.parametrize("kind", [list, dict, type(None), bytes])
    def test_field_of_another_type_is_invalid(self, name, kind):
        with pytest.raises(InvalidMessageError):
            _wire.contribution({**good_message(), name: kind()})

    @pytest.mark.parametrize("dtype", ["float16", "int64", "object", "complex64", ">f4", "O"])
    def test_only_floats_that_can_be_added_are_taken(self, dtype):
        with pytest.raises(InvalidMessageError, match="dtype"):
            _wire.contribution({**good_message(), "dtype": dtype})

    def test_odd_values_are_taken_or_refused_with_a_typed_error_by_wire_and_server(self):
        generator = random.Random(0)
        server = ParameterServer("run", 3)
        server.generation = TICKET.generation
        refused = 0
        for _ in range(1000):
            message = good_message()
            for name in generator.sample(list(message), generator.choice([1, 1, 2, 4])):
                message[name] = generator.choice(ODD)
            try:
                server.push(_wire.contribution(message))
            except (InvalidMessageError, StaleMessageError):
                refused += 1
            server._pending.clear()
        assert refused > 900

    def test_random_bytes_as_values_of_a_message_are_refused(self):
        generator = random.Random(0)
        for size in range(1, 64):
            frame = generator.randbytes(size)
            message = {**good_message(), "buffer": Serialized({}, [frame])}
            if size % 8:
                with pytest.raises(InvalidMessageError):
                    _wire.contribution(message)
            else:
                assert _wire.contribution(message).buffer.tobytes() == frame


def test_headers_are_plain_enough_for_msgpack():
    message = good_message()
    del message["buffer"]
    assert msgpack.unpackb(msgpack.packb(message)) == message
