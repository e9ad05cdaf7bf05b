import re
import subprocess
import sys
from pathlib import Path

import dask
import pytest
import yaml
from dask.config import collect_env

from daskps import config
from daskps._spec import Rules

KEYS = ["timeouts.workers", "timeouts.connect", "timeouts.round", "timeouts.close", "timeouts.files"]


def test_defaults():
    assert config.get("min-rows-per-rank") == 16
    assert config.seconds("report-interval") == 0.5
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


def test_documentation_lists_every_setting_with_its_default():
    page = Path(__file__).parents[1] / "docs" / "quickstart.md"
    rows = re.findall(r"^\| `daskps\.([a-z.-]+)` \| ([^|]+) \|", page.read_text(), re.MULTILINE)
    defaults = yaml.safe_load(Path(config.__file__).with_name("daskps.yaml").read_text())["daskps"]
    timeouts = {f"timeouts.{name}": value for name, value in defaults.pop("timeouts").items()}
    assert {key: yaml.safe_load(default) for key, default in rows} == {**defaults, **timeouts}


def test_setting_of_the_user_wins():
    with dask.config.set({"daskps.min-rows-per-rank": 1}):
        assert config.get("min-rows-per-rank") == 1
    assert config.get("min-rows-per-rank") == 16


def test_defaults_outlive_a_block_of_settings_around_the_first_import():
    code = (
        "import dask\n"
        "with dask.config.set({'daskps.transport': 'comm'}):\n"
        "    from daskps import config\n"
        "    assert config.rules().transport == 'comm'\n"
        "assert config.rules() == config.rules()._replace(transport='auto', round=3600.0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("value", ["soon", -1, "-1s", None, [1], float("nan")], ids=repr)
def test_what_is_no_duration_is_refused_by_its_key(value):
    message = r"daskps\.timeouts\.round must be a duration such as '30s', got "
    with dask.config.set({"daskps.timeouts.round": value}), pytest.raises(ValueError, match=message):
        config.seconds("timeouts.round")


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", None, True], ids=repr)
def test_what_is_no_number_of_rows_is_refused_by_its_key(value):
    message = r"daskps\.min-rows-per-rank must be an integer >= 1, got "
    with dask.config.set({"daskps.min-rows-per-rank": value}), pytest.raises(ValueError, match=message):
        config.count("min-rows-per-rank")


def test_unknown_key_is_an_error():
    with pytest.raises(KeyError):
        config.get("no-such-setting")


class TestRules:
    def test_are_the_settings_of_a_run(self):
        assert config.rules() == Rules(
            30.0, 30.0, 600.0, 3600.0, 30.0, 30.0, 0.5, "auto", 2**22, None, "warn"
        )

    @pytest.mark.parametrize(("key", "field"), [
        ("timeouts.workers", "workers"), ("timeouts.connect", "connect"), ("timeouts.round", "round"),
        ("timeouts.start", "start"), ("timeouts.silence", "silence"),
        ("timeouts.close", "close"), ("report-interval", "report_interval"),
    ])  # fmt: skip
    def test_take_every_duration_in_seconds(self, key, field):
        with dask.config.set({f"daskps.{key}": "77m"}):
            rules = config.rules()
        assert getattr(rules, field) == 77 * 60
        assert rules._replace(**{field: 0.0}) == config.rules()._replace(**{field: 0.0})

    @pytest.mark.parametrize("transport", ["auto", "shared-memory", "comm"])
    def test_take_the_transport(self, transport):
        with dask.config.set({"daskps.transport": transport}):
            assert config.rules().transport == transport

    @pytest.mark.parametrize("transport", ["sharedmemory", "", None, 1, ["auto"]])
    def test_refuse_a_transport_that_does_not_exist(self, transport):
        message = r"daskps\.transport must be one of \('auto', 'shared-memory', 'comm'\), got "
        with dask.config.set({"daskps.transport": transport}), pytest.raises(ValueError, match=message):
            config.rules()

    def test_take_the_size_of_a_bucket_in_bytes(self):
        for size, n_bytes in (("4 kB", 4000), ("1MiB", 2**20), (17, 17), (0, 0), ("0", 0)):
            with dask.config.set({"daskps.bucket-size": size}):
                assert config.rules().bucket_bytes == n_bytes

    @pytest.mark.parametrize("size", ["much", "-1", -1, None, "1 parsec", [1]])
    def test_refuse_a_size_that_is_none(self, size):
        message = r"daskps\.bucket-size must be a size such as '1MiB', or 0, got "
        with dask.config.set({"daskps.bucket-size": size}), pytest.raises(ValueError, match=message):
            config.rules()

    @pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
    def test_take_the_dtype_on_the_wire(self, dtype):
        with dask.config.set({"daskps.wire-dtype": dtype}):
            assert config.rules().wire_dtype == dtype

    @pytest.mark.parametrize("text", ["", "None", "none", "NULL", "null"])
    def test_take_every_way_to_write_none(self, text):
        """In an environment variable, which Dask reads first, and in a file."""
        variable = {"DASK_DASKPS__WIRE_DTYPE": text}
        for settings in (collect_env(variable), {"daskps.wire-dtype": text}):
            with dask.config.set({"daskps.wire-dtype": "float16"}), dask.config.set(settings):
                assert config.rules().wire_dtype is None

    @pytest.mark.parametrize("dtype", ["float32", "bf16", "no", 16])
    def test_refuse_another_dtype_on_the_wire(self, dtype):
        message = r"daskps\.wire-dtype must be one of \(None, 'bfloat16', 'float16'\), got "
        with dask.config.set({"daskps.wire-dtype": dtype}), pytest.raises(ValueError, match=message):
            config.rules()

    @pytest.mark.parametrize("value", ["warn", "raise", "ignore"])
    def test_take_what_to_do_on_divergence(self, value):
        with dask.config.set({"daskps.on-divergence": value}):
            assert config.rules().on_divergence == value

    @pytest.mark.parametrize("value", ["error", "", None, True])
    def test_refuse_what_cannot_be_done_on_divergence(self, value):
        message = r"daskps\.on-divergence must be one of \('warn', 'raise', 'ignore'\), got "
        with dask.config.set({"daskps.on-divergence": value}), pytest.raises(ValueError, match=message):
            config.rules()

    def test_are_plain_values(self):
        kinds = [float] * 7 + [str, int, type(None), str]
        assert [type(value) for value in config.rules()] == kinds
