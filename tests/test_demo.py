import pytest
from skorch.history import History

from daskps import _demo, _workload, cli


def test_table_compares_with_its_first_row():
    lines = [
        _demo.Line("plain skorch", 1, 1000.0, 0.95),
        _demo.Line("batch", 2, 1500.0, 0.9512, predicted=1.6),
    ]
    head, plain, batch = _demo.table(lines).strip().splitlines()
    assert head.split() == ["mode", "workers", "images/s", "speedup", "predicted", "test", "accuracy"]
    assert plain.split() == ["plain", "skorch", "1", "1000", "1.00", "-", "0.9500"]
    assert batch.split() == ["batch", "2", "1500", "1.50", "1.60", "0.9512"]


def test_command_has_its_own_number_of_epochs_for_each_data_set(monkeypatch):
    calls = []
    monkeypatch.setattr(_demo, "demo", lambda *arguments: calls.append(arguments))
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--data", "fashion-mnist", "--workers", "3"]) == 0
    assert cli.main(["demo", "--epochs", "7"]) == 0
    assert calls == [("digits", 2, 10), ("fashion-mnist", 3, 3), ("digits", 2, 7)]


def test_missing_data_is_one_line_that_says_what_to_install(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DASKPS_DATA", str(tmp_path))
    assert cli.main(["demo", "--data", "fashion-mnist"]) == 1
    assert "apt-get install dataset-fashion-mnist" in capsys.readouterr().err


def test_cluster_has_as_many_workers_as_are_asked_for(monkeypatch):
    """Not as many as the machine has cores."""
    asked = []

    class SeenError(Exception):
        pass

    def cluster(*args, **options):
        asked.append((args, options["n_workers"]))
        raise SeenError

    monkeypatch.setattr("distributed.LocalCluster", cluster)
    with pytest.raises(SeenError):
        _demo.demo("digits", 5, 1)
    assert asked == [((), 5)]


def test_every_mode_learns_digits(client):
    split = _workload.load("digits", 720)
    plain = _demo._train_plainly(split, 4)
    trained = [_demo._train(split, 4, mode, 2, client) for mode in ("batch", "epoch")]
    assert [(line.mode, line.workers) for line in trained] == [("batch", 2), ("epoch", 2)]
    for line in (plain, *trained):
        assert line.accuracy > 0.5
        assert line.images_per_second > 0
    assert plain.predicted is None
    assert all(line.predicted > 0 for line in trained)


def test_ctrl_c_in_a_fit_stops_the_demo():
    """The fit itself returns, with the epochs that it has."""
    history = History()
    for seconds in (2.0, 1.0, 4.0):
        history.new_epoch()
        history.record("dur", seconds)
    assert _demo._epoch_seconds(history, 3) == 2.0
    with pytest.raises(KeyboardInterrupt):
        _demo._epoch_seconds(history, 4)
