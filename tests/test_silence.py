import pytest

from daskps._silence import Silence


@pytest.fixture
def silence():
    return Silence(100.0)


def look(silence, *times):
    for now in times:
        silence.looked(now)


def test_grows_while_nothing_is_heard(silence):
    look(silence, 100.5, 101.0, 101.5)
    assert silence.of(last_seen=90.0) == 1.5
    assert silence.of(last_seen=101.0) == 0.5


def test_a_heartbeat_after_the_last_look_is_no_silence(silence):
    look(silence, 100.5)
    assert silence.of(last_seen=100.7) < 0


@pytest.mark.parametrize("late", [102.1, 1000.0, 99.0])
def test_a_listener_that_was_asleep_has_heard_nobody(silence, late):
    """Its event loop was blocked, its machine slept, or its clock was set."""
    look(silence, late)
    assert silence.of(last_seen=90.0) == 0
    look(silence, late + 0.5)
    assert silence.of(last_seen=90.0) == 0.5
