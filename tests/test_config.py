import dask
import pytest

from daskps import config

KEYS = ["timeouts.workers", "timeouts.connect", "timeouts.round", "timeouts.close"]


def test_defaults():
    assert config.get("min-rows-per-rank") == 16
    assert config.seconds("report-interval") == 0.25
    assert config.seconds("timeouts.workers") == 30
    assert config.seconds("timeouts.round") == 3600


@pytest.mark.parametrize("key", KEYS)
def test_timeouts_are_positive_numbers_of_seconds(key):
    seconds = config.seconds(key)
    assert type(seconds) is float
    assert seconds > 0


@pytest.mark.parametrize(("value", "expected"), [("2m", 120), ("500ms", 0.5), (3, 3), (0.5, 0.5)])
def test_durations_are_read_as_dask_reads_them(value, expected):
    with dask.config.set({"daskps.timeouts.workers": value}):
        assert config.seconds("timeouts.workers") == expected


def test_setting_of_the_user_wins():
    with dask.config.set({"daskps.min-rows-per-rank": 1}):
        assert config.get("min-rows-per-rank") == 1
    assert config.get("min-rows-per-rank") == 16


def test_unknown_key_is_an_error():
    with pytest.raises(KeyError):
        config.get("no-such-setting")
