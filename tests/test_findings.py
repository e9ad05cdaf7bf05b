"""Each line of the table, and its remedy."""

import pytest

from daskps import _findings
from daskps._crowding import Place
from daskps._findings import CheckReport, Facts, Finding, Trip

GIB = 2**30


def facts(torch="2.5", failed=None, cores=(0, 1), threads=1, free=8 * GIB):
    versions = {"daskps": "1", "torch": torch}
    return Facts(versions, failed or {}, Place("host", cores, threads), free)


class TestVersions:
    def test_that_are_the_same_are_one_line(self):
        found = list(_findings.versions({"client": facts(), "w": facts()}, ["daskps", "torch"]))
        assert found == [Finding("daskps", "1"), Finding("torch", "2.5")]

    def test_that_differ_are_named_with_what_to_install(self):
        (found,) = _findings.versions({"client": facts(), "w1": facts("2.4"), "w2": facts()}, ["torch"])
        assert found.bad
        assert found.found == "2.5 on client, 2.4 on w1"
        assert found.remedy.startswith("install torch==2.5 everywhere")

    def test_missing_everywhere_is_bad_too(self):
        (found,) = _findings.versions({"client": facts("missing"), "w": facts("missing")}, ["torch"])
        assert found.bad
        assert found.remedy.startswith("install torch everywhere")


def test_imports_that_fail_are_named_with_their_place():
    assert list(_findings.imports({"w": facts()})) == [Finding("imports", "all packages can be imported")]
    (found,) = _findings.imports({"w": facts(failed={"torch": "ImportError: libcuda"}), "v": facts()})
    assert found.bad
    assert found.found == "w: torch: ImportError: libcuda"


def test_threads_need_cores():
    assert not _findings.threads({"a": facts(), "b": facts()}).bad
    crowded = _findings.threads({"a": facts(), "b": facts(), "c": facts()})
    assert crowded.bad
    assert "3 threads on 2 core(s) of host" in crowded.found
    assert crowded.remedy.startswith("use fewer workers")


@pytest.mark.parametrize(("free", "bad"), [(8 * GIB, False), (64 * 2**20 * 3, False), (GIB / 8, True)])
def test_memory_has_to_hold_a_buffer_for_each_rank(free, bad):
    found = _findings.memory(facts(free=free), 2)
    assert found.bad is bad
    assert bool(found.remedy) is bad


def test_encryption_is_told_and_only_advised():
    assert _findings.encryption("tls://127.0.0.1:1") == Finding(
        "encryption", "TLS: only who has the certificates gets in"
    )
    plain = _findings.encryption("tcp://127.0.0.1:1")
    assert not plain.bad
    assert "distributed.Security" in plain.remedy


class TestRoads:
    def test_are_told_with_the_time_of_a_trip(self):
        (found,) = _findings.roads({"w": Trip("shared-memory", 0.00012)}, "auto")
        assert found == Finding("transport", "w: shared-memory, 0.12 ms for a round trip")

    @pytest.mark.parametrize(("allowed", "advised"), [("auto", True), ("comm", False)])
    def test_through_a_connection_are_advised_against_unless_they_are_wanted(self, allowed, advised):
        (found,) = _findings.roads({"w": Trip("comm", 0.001)}, allowed)
        assert not found.bad
        assert bool(found.remedy) is advised

    def test_of_a_single_worker_lead_nowhere(self):
        (found,) = _findings.roads({"w": Trip("none", 0.0)}, "auto")
        assert "the only worker" in found.found


@pytest.mark.parametrize(
    ("error", "found", "remedy"),
    [
        (TimeoutError(), "no answer", "restart"),
        (ModuleNotFoundError("No module named 'daskps'"), "cannot load daskps", "install daskps"),
        (OSError("gone"), "OSError: gone", "log"),
    ],
)
def test_who_does_not_say_is_bad(error, found, remedy):
    (finding,) = _findings.silent({"tcp://w": error})
    assert finding.bad
    assert finding.what == "tcp://w"
    assert found in finding.found
    assert remedy in finding.remedy


class TestReport:
    def test_is_a_table_with_a_remedy_below_its_line(self):
        report = CheckReport([Finding("torch", "2.5"), Finding("threads", "3 on 2", "fewer", bad=True)])
        assert not report.ok
        assert str(report).splitlines() == [
            "ok   torch    2.5",
            "BAD  threads  3 on 2",
            "              -> fewer",
        ]

    def test_is_ok_if_nothing_is_bad(self):
        assert CheckReport([Finding("encryption", "none", "advice")]).ok
