"""Trials: one of them with a cluster of its own."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from probes import wait_until

from daskps._trial import Outcome, Trial, in_a_process, run
from daskps.report import FitReport

DIGITS = Trial("digits", 320, 32, 1)


def test_survives_json():
    trial = Trial("digits", None, 32, 1, 8, 2, 1, (0.5, 0.25))
    outcome = Outcome(trial, 10, 1.0, 2.0, {"test": 1.0}, {"client": 1}, None)
    assert Outcome.from_dict(json.loads(json.dumps(asdict(outcome)))) == outcome


def test_of_plain_skorch():
    outcome = run(DIGITS)
    assert outcome.trial == DIGITS
    assert outcome.rows == 320
    assert outcome.epoch_seconds > 0
    assert set(outcome.accuracy) == {"train", "test"}
    assert outcome.memory["client"] > 100e6  # torch alone
    assert outcome.report is None


@pytest.mark.timeout(300)  # three interpreters that import torch, and a busy machine
def test_emulated_on_two_workers_waits_and_exchanges_for_real():
    trial = Trial("digits", 320, 32, 1, "batch", 2, 1, (0.002, 0.001))
    outcome = in_a_process(trial)
    report = FitReport.from_dict(outcome.report)
    assert (report.world_size, report.sync_every, report.batch_size) == (2, "batch", 32)
    assert [entry.rounds for entry in report.ranks] == [10, 10]
    assert all(entry.compute_seconds >= 10 * 0.018 for entry in report.ranks)
    assert all(entry.bytes > 10 * 4 * 50_000 for entry in report.ranks)
    assert outcome.epoch_seconds >= 10 * 0.018
    assert outcome.accuracy == {}
    assert set(outcome.memory) == {"client", "scheduler", "worker"}
    assert outcome.memory["scheduler"] < outcome.memory["worker"]  # it has no torch


def test_that_hangs_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    python, child = tmp_path / "python", tmp_path / "child"
    python.write_text(f"#!/bin/sh\nsleep 600 &\necho $! >{child}.new\nmv {child}.new {child}\nwait\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))

    def give_up(process, timeout):
        wait_until(child.exists)
        raise subprocess.TimeoutExpired(process.args, timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", give_up)
    with pytest.raises(RuntimeError, match=r"was not done after 3600 s"):
        in_a_process(DIGITS)
    wait_until(lambda: not is_running(int(child.read_text())))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_that_fails_says_why(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no memory >&2\nexit 1\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(RuntimeError, match=r"(?s)Trial\(data='digits'.* failed:\nno memory"):
        in_a_process(DIGITS)
