"""The check of a cluster, on the shared one."""

from __future__ import annotations

import asyncio

import dask
import pytest

import daskps
from daskps import _check, _facts, cli
from daskps._findings import CheckReport, Finding
from daskps._launch import open_run
from daskps.exceptions import DaskpsError


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(_check, "_SECONDS", 1.0)


def by_what(report):
    found = {}
    for finding in report.findings:
        found.setdefault(finding.what, []).append(finding)
    return found


def test_a_cluster_that_can_train(client, cluster):
    client.run(_facts.of_worker)  # the first import of torch may take longer than a check waits
    report = daskps.check(client)
    found = by_what(report)
    assert {finding.what for finding in report.findings if finding.bad} <= {"threads"}, report
    assert found["daskps"][0].found == daskps.__version__
    assert {"dask", "distributed", "torch", "skorch", "memory", "threads"} <= found.keys()
    assert "none on tcp://" in found["encryption"][0].found
    addresses = {finding.found.rpartition(": ")[0] for finding in found["transport"]}
    assert addresses == set(cluster.scheduler.workers)
    assert all("shared-memory" in finding.found for finding in found["transport"])


def test_while_fits_hold_the_workers(client, hasty, session_client, monkeypatch):
    facts = {"client": _facts.facts(), "scheduler": _facts.facts()}

    async def answered(used):
        return {**facts, **dict.fromkeys(await used.scheduler.ncores(), facts["client"])}

    monkeypatch.setattr(_check, "_ask_all", answered)
    with open_run(session_client, 4, 4):
        report = daskps.check(client)
    (found,) = by_what(report)["transport"]
    assert not found.bad
    assert "fits hold the workers" in found.found


def test_a_worker_that_does_not_answer_is_named_and_waited_for_no_longer(client, hasty, monkeypatch):
    async def never(used, address, **kwargs):
        await asyncio.Event().wait()

    monkeypatch.setattr(_check, "_of_worker", never)
    found = by_what(daskps.check(client))
    silent = {what for what, findings in found.items() if findings[0].found == "no answer"}
    assert len(silent - {"scheduler"}) == 4
    assert found["workers"][0].bad
    assert "transport" not in found


def test_a_scheduler_that_does_not_answer_is_an_error_that_says_so(client, hasty, monkeypatch):
    async def never(**kwargs):
        await asyncio.Event().wait()

    monkeypatch.setattr(client.scheduler, "ncores", never, raising=False)
    with pytest.raises(DaskpsError, match=r"the scheduler tcp://.* did not answer for 1 s"):
        daskps.check(client)


class TestCommand:
    def test_without_a_scheduler_is_one_line(self, capsys):
        with dask.config.set({"distributed.comm.timeouts.connect": "200ms"}):
            assert cli.main(["check", "tcp://127.0.0.1:1"]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("daskps: ")
        assert "127.0.0.1:1" in line

    @pytest.mark.parametrize(("bad", "status"), [(False, 0), (True, 1)])
    def test_prints_the_table_and_its_status_says_whether_something_is_bad(
        self, monkeypatch, capsys, bad, status
    ):
        asked = []

        def check(address):
            asked.append(address)
            return CheckReport([Finding("torch", "2.5", "mend", bad)])

        monkeypatch.setattr(_check, "check", check)
        assert cli.main(["check", "tcp://somewhere:1"]) == status
        assert cli.main(["check"]) == status
        assert asked == ["tcp://somewhere:1", None]
        assert "torch  2.5" in capsys.readouterr().out
