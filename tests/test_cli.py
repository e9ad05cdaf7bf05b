import itertools
import json
import signal

import pytest
from experiments import outcome_of

import daskps
from daskps import _trial, cli
from daskps._experiment import Cell, Plan
from daskps._trial import Trial


def parsed(*arguments):
    return cli._parser().parse_args(["speedup", *arguments])


@pytest.fixture
def without_clusters(monkeypatch):
    monkeypatch.setattr(_trial, "in_a_process", outcome_of)


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"daskps {daskps.__version__}\n"


@pytest.mark.parametrize("command", ["demo", "speedup", "check"])
def test_help_explains_every_option(capsys, command):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    lines = capsys.readouterr().out.partition("options:")[2].splitlines()
    bare = [a for a, b in itertools.pairwise([*lines, "  -"]) if a[2:3] == "-" and b[2:3] == "-"]
    assert [line for line in bare if "  " not in line.strip()] == []


class TestSpeedupArguments:
    def test_become_a_plan(self):
        options = parsed(
            *("--data", "fashion-mnist", "--rows", "6400", "--grid", "1x1,1x2,2x1"),
            *(
                "--sync",
                "batch,epoch,8",
                "--batch-size",
                "64",
                "--epochs",
                "2",
                "--repeats",
                "5",
                "--fit",
                "1",
            ),
        )
        assert cli._plan(options) == Plan(
            Trial("fashion-mnist", 6400, 64, 2),
            (Cell(1, 1), Cell(1, 2), Cell(2, 1)),
            ("batch", "epoch", 8),
            5,
            (1,),
        )

    @pytest.mark.parametrize(
        ("text", "emulate"),
        [("20ms", (0.002, 0.018 / 32)), ("1ms+32ms", (0.001, 0.001)), ("0.5s", (0.05, 0.45 / 32))],
    )
    def test_emulated_time_is_of_a_batch(self, text, emulate):
        assert cli._plan(parsed("--emulate", text)).base.emulate == pytest.approx(emulate)

    def test_what_comes_twice_is_measured_once(self):
        assert parsed("--grid", "2x1,2x1", "--sync", "8,8").grid == [(2, 1)]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--grid", "2"), "'2' is not workers x threads, such as 2x1"),
            (("--grid", "0x1"), "'0' is not an integer >= 1"),
            (("--sync", "never"), "'never' is not 'batch', 'epoch' or an integer >= 1"),
            (("--rows", "-1"), "'-1' is not an integer >= 1"),
            (("--emulate", "soon"), "'soon' is not a duration such as 20ms"),
            (("--emulate", "1ms+2ms+3ms"), "is not a duration such as 20ms"),
            (("--data", "cifar"), "invalid choice: 'cifar'"),
        ],
    )
    def test_bad_ones_are_named_with_what_is_allowed(self, capsys, arguments, message):
        with pytest.raises(SystemExit) as exit_info:
            parsed(*arguments)
        assert exit_info.value.code == 2
        assert message in capsys.readouterr().err


class TestSpeedup:
    def test_prints_a_table_and_writes_what_was_measured(self, without_clusters, capsys, tmp_path):
        file = tmp_path / "results.json"
        assert cli.main(["speedup", "--sync", "batch", "--repeats", "1", "--json", str(file)]) == 0
        out, err = capsys.readouterr()
        assert [line.split()[0] for line in out.splitlines()[1:4]] == ["plain", "batch", "batch"]
        assert err.splitlines()[-1].startswith("turn 1 of 1: batch, 2x1")
        plain = json.loads(file.read_text())
        assert plain["command"] == f"daskps speedup --sync batch --repeats 1 --json {file}"
        assert len(plain["turns"][0]) == 3

    def test_draws(self, without_clusters, tmp_path):
        pytest.importorskip("matplotlib").use("agg")
        file = tmp_path / "speedup.png"
        assert cli.main(["speedup", "--repeats", "1", "--plot", str(file)]) == 0
        assert file.read_bytes().startswith(b"\x89PNG")

    def test_emulation_is_in_all_that_is_printed(self, without_clusters, capsys):
        cli.main(["speedup", "--emulate", "20ms", "--sync", "batch", "--repeats", "1"])
        out, err = capsys.readouterr()
        assert out.startswith("EMULATED")
        assert all("emulated" in line for line in err.splitlines())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--fit", "1,4"], "--fit names [4] workers, which are not in --grid"),
            (["--json", "/no/such/folder/f.json"], "/no/such/folder is no folder that can be written to"),
            (["--json", "/"], "cannot write /: it is a folder"),
            (["--plot", "speedup.foo"], "cannot draw to speedup.foo: 'foo' is none of"),
        ],
    )
    def test_refuses_before_it_measures(self, monkeypatch, capsys, arguments, message):
        monkeypatch.setattr(_trial, "in_a_process", pytest.fail)
        assert cli.main(["speedup", *arguments]) == 1
        assert message in capsys.readouterr().err

    def test_says_in_a_line_where_missing_data_comes_from(self, monkeypatch, capsys, tmp_path):
        monkeypatch.setattr(_trial, "in_a_process", pytest.fail)
        monkeypatch.setenv("DASKPS_DATA", str(tmp_path))
        assert cli.main(["speedup", "--data", "fashion-mnist"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("daskps: no file train-images-idx3-ubyte.gz")
        assert "apt-get install dataset-fashion-mnist" in line

    def test_ctrl_c_is_no_error_of_ours(self, monkeypatch, capsys):
        def stopped(trial):
            raise KeyboardInterrupt

        monkeypatch.setattr(_trial, "in_a_process", stopped)
        assert cli.main(["speedup"]) == 130
        assert capsys.readouterr().err == "daskps: stopped\n"

    def test_being_terminated_lets_a_trial_end_what_it_started(self, monkeypatch):
        ended = []

        def terminated(trial):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                ended.append(trial)

        monkeypatch.setattr(_trial, "in_a_process", terminated)
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit) as exit_info:
            cli.main(["speedup"])
        assert exit_info.value.code == 143
        assert len(ended) == 1
        assert signal.getsignal(signal.SIGTERM) is before

    def test_a_trial_that_fails_is_one_line_with_its_own_words(self, monkeypatch, capsys):
        def fails(trial):
            raise RuntimeError(f"{trial} failed:\nOutOfMemory")

        monkeypatch.setattr(_trial, "in_a_process", fails)
        assert cli.main(["speedup"]) == 1
        assert "OutOfMemory" in capsys.readouterr().err
