import json

import pytest
from reports import lost_one_of_three

from daskps.report import FitEvent, FitReport, RankEpoch

TRANSPORTS = ["shared-memory", "comm"]


def entry(epoch, rank, rows, compute, wait, sync):
    return RankEpoch(
        epoch=epoch,
        rank=rank,
        rows=rows,
        steps=10,
        rounds=11,
        compute_seconds=compute,
        wait_seconds=wait,
        sync_seconds=sync,
        bytes=2_500_000,
        transport=TRANSPORTS[rank % 2],
    )


@pytest.fixture
def report():
    """Two ranks, two epochs of 320 rows, so 20 batches of 32: C = 8 s / 20, S = (2 s / 2) / 20."""
    ranks = [
        entry(0, 0, 160, 2.0, 0.25, 0.25),
        entry(0, 1, 160, 2.0, 0.0, 0.5),
        entry(1, 0, 160, 2.5, 0.0, 0.5),
        entry(1, 1, 160, 1.5, 0.25, 0.25),
    ]
    return FitReport(2, "batch", 32, {"lease": 0.5, "replicas": 1.25}, [2.6, 2.7], ranks)


class TestModel:
    def test_c_and_s_are_seconds_per_batch(self, report):
        assert report.n_batches == 20
        assert report.C == pytest.approx(8 / 20)
        assert report.S == pytest.approx(1 / 20)

    def test_s_is_of_the_ranks_that_each_epoch_had(self):
        assert lost_one_of_three().S == pytest.approx(0.25, rel=0.05)

    def test_predicted_speedup(self, report):
        assert report.predicted_speedup == pytest.approx(0.4 / (0.4 / 2 + 0.05))

    def test_one_rank_has_no_speedup(self):
        alone = FitReport(1, "batch", 32, ranks=[entry(0, 0, 320, 4.0, 0.0, 0.0)])
        assert (alone.C, alone.S, alone.predicted_speedup) == (0.4, 0.0, 1.0)

    @pytest.mark.parametrize("n_ranks", [1, 2, 4])
    def test_ranks_that_never_talk_are_as_fast_as_they_are_many(self, n_ranks):
        ranks = [entry(0, rank, 320, 4.0, 0.0, 0.0) for rank in range(n_ranks)]
        assert FitReport(n_ranks, "epoch", 32, ranks=ranks).predicted_speedup == n_ranks

    def test_model_gives_back_the_time_that_the_ranks_took(self, report):
        seconds = report.C / report.world_size + report.S
        assert seconds * report.n_batches == pytest.approx(8 / 2 + 2 / 2)

    def test_nothing_measured_is_zero(self):
        empty = FitReport(2, "epoch", 32)
        assert (empty.n_batches, empty.C, empty.S, empty.predicted_speedup) == (0, 0, 0, 0)


class TestText:
    def test_has_numbers_with_units(self, report):
        text = str(report)
        for part in (
            "2 rank(s), sync_every='batch', batch_size=32",
            "transport comm, shared-memory\n",
            "1.75 s (lease 0.50, replicas 1.25)",
            "2 in 5.30 s",
            "400.00 ms",
            "50.00 ms",
            "1.60 predicted by C/(C/K + S)",
        ):
            assert part in text

    def test_has_a_line_for_every_epoch_and_rank_under_a_head_with_units(self, report):
        lines = str(report).splitlines()
        (head,) = [n for n, line in enumerate(lines) if "compute s" in line]
        assert {"epoch", "rank", "rows", "steps", "MB"} <= set(lines[head].split())
        cells = [line.split() for line in lines[head + 1 :]]
        assert cells[0] == ["1", "0", "160", "10", "2.00", "0.25", "0.25", "2.5"]
        assert [row[:2] for row in cells] == [["1", "0"], ["1", "1"], ["2", "0"], ["2", "1"]]

    def test_has_the_advice(self, report):
        assert report.advice() in str(report)

    def test_of_nothing_measured_can_be_printed(self):
        assert "0 in 0.00 s" in str(FitReport(2, 3, 32))


class TestShares:
    def test_idle_is_waiting_and_moving_data(self, report):
        assert report.idle_share == pytest.approx(2 / 10)

    def test_boundary_is_what_epochs_took_beyond_their_slowest_rank(self, report):
        report.epoch_seconds = [4.0, 6.0]  # the slowest ranks stepped for 2.5 and 3 s
        assert report.boundary_share == pytest.approx(4.5 / 10)

    def test_boundary_is_never_negative(self, report):
        report.epoch_seconds = [2.0, 2.0]  # clocks of two processes
        assert report.boundary_share == 0

    def test_seconds_by_rank_are_those_of_all_epochs(self, report):
        assert report.seconds_by_rank() == {
            0: {"compute": 4.5, "wait": 0.25, "sync": 0.75},
            1: {"compute": 3.5, "wait": 0.25, "sync": 0.75},
        }


class TestExport:
    def test_to_dict_survives_json(self, report):
        plain = report.to_dict()
        assert json.loads(json.dumps(plain)) == plain
        assert plain["C"] == report.C
        assert plain["S"] == report.S
        assert plain["predicted_speedup"] == report.predicted_speedup
        assert plain["ranks"][3]["compute_seconds"] == 1.5
        assert [entry["transport"] for entry in plain["ranks"]] == TRANSPORTS * 2
        assert plain["startup_seconds"] == {"lease": 0.5, "replicas": 1.25}
        assert plain["idle_share"] == report.idle_share
        assert plain["boundary_share"] == report.boundary_share
        assert plain["advice"] == report.advice()

    def test_from_dict_asks_for_no_more_than_a_report_does(self):
        plain = {"world_size": 2, "sync_every": "batch", "batch_size": 32}
        assert FitReport.from_dict(plain) == FitReport(**plain)

    def test_from_dict_gives_back_what_to_dict_took(self, report):
        report.events.append(FitEvent(1, "tcp://a", "joined"))
        assert FitReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report

    def test_to_frame_has_a_row_for_every_epoch_and_rank(self, report):
        pytest.importorskip("pandas")
        frame = report.to_frame()
        assert list(frame.columns) == list(RankEpoch.__dataclass_fields__)
        assert frame[["epoch", "rank"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
        assert frame["compute_seconds"].sum() == 8.0
        assert frame["transport"].tolist() == TRANSPORTS * 2

    def test_to_frame_of_nothing_measured_has_the_columns(self):
        pytest.importorskip("pandas")
        frame = FitReport(2, "epoch", 32).to_frame()
        assert list(frame.columns) == list(RankEpoch.__dataclass_fields__)
        assert len(frame) == 0


def test_events_are_told(report):
    report.events.append(FitEvent(1, "tcp://a", "was lost: the epoch began again on 1 worker(s)"))
    assert "epoch 2: tcp://a was lost: the epoch began again on 1 worker(s)" in str(report)
    assert report.to_dict()["events"] == [
        {"epoch": 1, "worker": "tcp://a", "what": "was lost: the epoch began again on 1 worker(s)"}
    ]
