import doctest
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reports import report_of

from daskps import SpeedupModel, speedup
from daskps.report import FitReport
from daskps.speedup import n_meetings

# Milliseconds here are seconds there: the model does not know its unit.
BATCH = SpeedupModel(c0=2.0, c1=0.5, s0=0.6, s1=0.2, batch_size=32)


def measured(model, workers, batch_size=32, noise=0.0):
    """What the ranks of fits that follow a batch-mode model measure: K, b, compute, sync."""
    K = np.asarray(workers, float)
    b = np.broadcast_to(np.asarray(batch_size, float), K.shape)
    rng = np.random.default_rng(0)
    compute = (model.c0 + model.c1 * b / K) * (1 + noise * rng.standard_normal(len(K)))
    sync = np.where(K > 1, model.s0 + model.s1 * K, 0.0) * (1 + noise * rng.standard_normal(len(K)))
    return K, b, compute, sync


class TestRuntime:
    def test_ranks_share_a_batch_in_batch_mode(self):
        assert BATCH.seconds_per_batch(1) == 2 + 0.5 * 32
        assert BATCH.seconds_per_batch(4) == pytest.approx(2 + 0.5 * 8 + 0.6 + 0.2 * 4)

    def test_batches_go_on_at_the_same_time_with_steps_between_meetings(self):
        model = SpeedupModel(2.0, 0.5, 0.6, 0.2, 32, sync_every=8)
        assert model.seconds_per_batch(4) == pytest.approx(18 / 4 + 1.4 / (4 * 8))

    def test_an_epoch_has_one_meeting(self):
        model = SpeedupModel(2.0, 0.5, 0.6, 0.2, 32, sync_every="epoch", batches_per_epoch=100)
        assert model.seconds_per_batch(4) == pytest.approx(18 / 4 + 1.4 / 100)

    def test_one_worker_meets_nobody(self):
        assert BATCH.sync_seconds(1) == 0
        assert BATCH.predict(1) == 1

    def test_the_reports_formula_is_a_case_of_it(self):
        C, S = 16.0, 1.5
        model = SpeedupModel(0.0, C / 32, S, 0.0, 32)
        assert [model.predict(K) for K in (2, 5)] == pytest.approx([C / (C / K + S) for K in (2, 5)])

    @pytest.mark.parametrize("sync_every", ["batch", 8])
    def test_busy_neighbours_make_computing_slower_and_nothing_else(self, sync_every):
        alone = replace(BATCH, sync_every=sync_every)
        beside = alone.with_contention(1.5)
        assert beside.seconds_per_batch(1) == alone.seconds_per_batch(1)
        assert beside.compute_seconds(4) == pytest.approx(1.5 * alone.compute_seconds(4))
        assert beside.sync_seconds(4) == alone.sync_seconds(4)
        assert beside.predict(4) < alone.predict(4)

    def test_efficiency_is_speedup_for_each_worker(self):
        assert BATCH.efficiency(4) == BATCH.predict(4) / 4


class TestBestWorkers:
    def test_is_where_the_derivative_is_zero(self):
        # d/dK (16/K + 0.2 K) = 0 at K = sqrt(80) = 8.9
        assert BATCH.best_workers() == 9

    def test_is_one_where_meeting_costs_more_than_it_saves(self):
        assert SpeedupModel(1.0, 0.1, 50.0, 0.0, 32).best_workers() == 1

    def test_a_rank_needs_two_rows_of_a_batch(self):
        assert SpeedupModel(0.0, 1.0, 0.001, 0.0, 32).best_workers() == 16

    def test_is_the_most_that_was_asked_for_where_the_speedup_keeps_growing(self):
        assert SpeedupModel(2.0, 0.5, 0.6, 0.2, 32, sync_every=8).best_workers(40) == 40


class TestFit:
    def test_gives_back_what_measurements_were_made_from(self):
        model = SpeedupModel.fit(*measured(BATCH, [1, 2, 4]))
        assert [model.c0, model.c1, model.s0, model.s1] == pytest.approx([2.0, 0.5, 0.6, 0.2])
        assert model.notes == ()
        assert model.predict(16) == pytest.approx(BATCH.predict(16))

    def test_batch_sizes_tell_rows_in_the_other_modes(self):
        fitted = SpeedupModel.fit([2, 2, 4], [32, 16, 32], [18, 10, 18], [1.0, 1.0, 1.4], sync_every=8)
        assert [fitted.c0, fitted.c1, fitted.s0, fitted.s1] == pytest.approx([2.0, 0.5, 0.6, 0.2])

    def test_standard_errors_are_those_of_least_squares(self):
        # The line through 2, 2.5, 3.5 at 2, 3, 4 is 0.75 K + 5/12; the residuals are 1/12, -1/6, 1/12.
        model = SpeedupModel.fit([2, 3, 4], 12, [6, 4, 3], [2, 2.5, 3.5])
        variance = (1 / 12) ** 2 + (1 / 6) ** 2 + (1 / 12) ** 2
        assert (model.s0, model.s1) == pytest.approx((5 / 12, 0.75))
        assert model.standard_errors["s1"] == pytest.approx(math.sqrt(variance / 2))
        assert model.standard_errors["s0"] == pytest.approx(math.sqrt(variance * (1 / 3 + 9 / 2)))

    def test_noise_makes_intervals_that_hold_the_truth_and_shrink_with_repeats(self):
        few = SpeedupModel.fit(*measured(BATCH, [1, 2, 4] * 3, noise=0.02))
        many = SpeedupModel.fit(*measured(BATCH, [1, 2, 4] * 100, noise=0.02))
        low, high = few.interval(8)
        assert low < BATCH.predict(8) < high
        narrow = many.interval(8)
        assert narrow[1] - narrow[0] < (high - low) / 2
        assert all(0 < error < np.inf for error in many.standard_errors.values())

    @pytest.mark.parametrize("coefficient", speedup.COEFFICIENTS)
    def test_intervals_follow_each_coefficient_beside_busy_neighbours_too(self, coefficient):
        model, step = BATCH.with_contention(1.5), 1e-6
        covariance = np.diag([float(name == coefficient) for name in speedup.COEFFICIENTS])
        low, high = replace(model, covariance=covariance).interval(4)
        changed = replace(model, **{coefficient: getattr(model, coefficient) + step})
        slope = (changed.predict(4) - model.predict(4)) / step
        assert (high - low) / 4 == pytest.approx(abs(slope), rel=1e-3)

    def test_as_many_measurements_as_coefficients_leave_errors_unknown(self):
        model = SpeedupModel.fit(*measured(BATCH, [2, 4]))
        assert all(math.isnan(error) for error in model.standard_errors.values())
        assert all(math.isnan(edge) for edge in model.interval(8))

    def test_one_row_count_cannot_tell_c0(self):
        model = SpeedupModel.fit([1, 1], 32, [18, 18], [0, 0])
        assert (model.c0, model.c1) == pytest.approx((0, 18 / 32))
        assert math.isnan(model.standard_errors["c0"])
        assert model.notes[0] == "c0 is taken as 0: all steps had about 32 rows."

    def test_row_counts_that_hardly_differ_cannot_either(self):
        # 11, 11 and 10 rows: a batch of 32 on three ranks
        model = SpeedupModel.fit([3, 3, 3], [33, 33, 30], [5.5, 5.6, 5.2], [1, 1, 1])
        assert model.c0 == 0

    def test_one_number_of_workers_makes_s_constant(self):
        model = SpeedupModel.fit([2, 2], 32, [10, 10], [1.0, 1.2])
        assert (model.s0, model.s1) == (pytest.approx(1.1), 0)
        assert model.notes[1] == "S is taken as constant: it was measured with 2 workers only."

    def test_one_worker_says_nothing_of_meetings(self):
        model = SpeedupModel.fit([1, 2, 4], 32, [18, 10, 6], [0.0, 1.0, 1.4])
        assert (model.s0, model.s1) == pytest.approx((0.6, 0.2))
        assert (
            SpeedupModel.fit([1], 32, [18], [0.0]).notes[-1] == "S is taken as 0: no meeting was measured."
        )

    @pytest.mark.parametrize(
        ("sync", "expected"), [([2.0, 1.0], (1.5, 0.0)), ([0.5, 2.0], (0.0, (1 + 8) / 20))]
    )
    def test_no_coefficient_becomes_negative(self, sync, expected):
        model = SpeedupModel.fit([2, 4], 32, [10, 6], sync)
        assert (model.s0, model.s1) == pytest.approx(expected)

    def test_seconds_that_were_not_measured_are_left_out(self):
        model = SpeedupModel.fit([1, 2, 4], 32, [18, 10, math.nan], [math.nan, 1.0, 1.4])
        assert (model.c0, model.s1) == pytest.approx((2.0, 0.2))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([0], 32, [1], [1]), "n_workers must be numbers >= 1"),
            (([1], 0, [1], [1]), "batch_size must be numbers >= 1"),
            (([1], 32, [-1], [1]), "compute_seconds must be seconds >= 0"),
            (([1], 32, [1], [-1]), "sync_seconds must be seconds >= 0"),
            (([1], 32, [math.nan], [1]), "compute_seconds must have at least one"),
        ],
    )
    def test_refuses_what_cannot_have_been_measured(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            SpeedupModel.fit(*arguments)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"s1": -0.1}, "s1 must be seconds >= 0, got -0.1"),
            ({"c0": 0, "c1": 0}, "c0 and c1 must not both be 0"),
            (
                {"sync_every": "never"},
                "sync_every must be 'batch', 'epoch' or an integer >= 1, got 'never'",
            ),
            ({"contention": 0.0}, "contention must be a number > 0, got 0.0"),
            ({"sync_every": 0}, "sync_every must be an integer >= 1, got 0"),
            ({"sync_every": "epoch"}, "batches_per_epoch must be a number > 0 for 'epoch', got nan"),
        ],
    )
    def test_refuses_what_is_no_model(self, changes, message):
        with pytest.raises(ValueError, match=message):
            replace(BATCH, **changes)

    @pytest.mark.parametrize("K", [0, 1.5, True, "2"])
    def test_predicts_for_whole_numbers_of_workers(self, K):
        with pytest.raises(ValueError, match="n_workers must be an integer >= 1"):
            BATCH.predict(K)


class TestFromReport:
    def test_one_fit_gives_the_reports_formula(self):
        report = report_of(2, compute=9.0, idle=1.5)
        model = SpeedupModel.from_report(report)
        assert model.predict(2) == pytest.approx(report.predicted_speedup)
        assert (model.c0, model.c1, model.s0, model.s1) == pytest.approx((0, 9 / 16, 1.5, 0))
        assert len(model.notes) == 2

    def test_fits_with_other_numbers_of_workers_tell_all_four(self):
        K, _, compute, sync = measured(BATCH, [1, 2, 4])
        reports = [report_of(int(k), compute=c, idle=s) for k, c, s in zip(K, compute, sync, strict=True)]
        model = SpeedupModel.from_report(*reports)
        assert [model.c0, model.c1, model.s0, model.s1] == pytest.approx([2.0, 0.5, 0.6, 0.2])

    def test_the_first_epoch_is_left_out_where_there_are_more(self):
        assert SpeedupModel.from_report(report_of(1, first=10.0)).c1 == pytest.approx(1 / 32)
        assert SpeedupModel.from_report(report_of(1, first=10.0, n_epochs=1)).c1 == pytest.approx(10 / 32)

    def test_epoch_mode_counts_meetings_by_epochs(self):
        model = SpeedupModel.from_report(report_of(2, "epoch", steps=100, compute=18.0, idle=30.0))
        assert model.batches_per_epoch == 200
        assert model.seconds_per_batch(2) == pytest.approx(18 / 2 + 30 / 200)

    def test_steps_between_meetings(self):
        model = SpeedupModel.from_report(report_of(2, 8, steps=100, compute=18.0, idle=4.0))
        assert model.s0 == pytest.approx(4.0)
        assert model.seconds_per_batch(2) == pytest.approx(18 / 2 + 4 / (2 * 8))

    @pytest.mark.parametrize(("K", "seconds"), [([2], [0.1, 0.2]), ([1, 2], [0.1, 0.2]), (2, [0.1])])
    def test_rounds_need_their_numbers_of_workers(self, K, seconds):
        model = SpeedupModel(c0=0, c1=1, s0=0, s1=0, batch_size=8)
        with pytest.raises(ValueError, match="numbers >= 2 with one of sync_seconds each"):
            model.with_sync(K, seconds)

    def test_rounds_that_were_measured_elsewhere_can_be_put_in(self):
        alone = SpeedupModel.from_report(
            report_of(1, compute=18.0), report_of(1, batch_size=16, compute=10.0)
        )
        model = alone.with_sync([2, 4], [1.0, 1.4])
        assert model.predict(8) == pytest.approx(BATCH.predict(8))
        assert model.notes == ()
        assert alone.s0 == 0

    def test_refuses_nothing_and_a_mixture(self):
        with pytest.raises(ValueError, match="no epoch: nothing was measured"):
            SpeedupModel.from_report(FitReport(2, "batch", 32))
        with pytest.raises(ValueError, match=r"one sync_every in common, got \['8', 'batch'\]"):
            SpeedupModel.from_report(report_of(2), report_of(2, 8))
        with pytest.raises(ValueError, match="no report to fit to"):
            SpeedupModel.from_report()


class TestText:
    def test_says_coefficients_with_errors_and_what_is_not_known(self):
        text = str(SpeedupModel.fit([2, 2, 2], 32, [0.009, 0.010, 0.011], [0.001, 0.0012, 0.0011]))
        assert text.splitlines() == [
            "c0 + c1*b/K + S(K) for a batch, b = 32, S(K) = s0 + s1*K",
            "c0 = 0 ms, c1 = 0.625 ms ± 0.036, s0 = 1.1 ms ± 0.058, s1 = 0 ms",
            "c0 is taken as 0: all steps had about 16 rows.",
            "S is taken as constant: it was measured with 2 workers only.",
        ]

    def test_says_how_much_neighbours_slow_down(self):
        assert "With K > 1, c0 and c1 are 1.2 times as large." in str(BATCH.with_contention(1.2))
        assert "times as large" not in str(BATCH)

    @pytest.mark.parametrize(("sync_every", "end"), [("epoch", "S(K)/n"), (8, "S(K)/(8K)")])
    def test_names_the_modes_formula(self, sync_every, end):
        assert f"(c0 + c1*b)/K + {end} for" in str(SpeedupModel(1, 1, 1, 1, 32, sync_every, 10))


@pytest.mark.parametrize(("sync_every", "steps", "n"), [("batch", 10, 10), ("epoch", 10, 1), (4, 10, 3)])
def test_meetings_of_an_epoch(sync_every, steps, n):
    assert n_meetings(sync_every, steps) == n


class TestExamples:
    def test_of_the_docstring_are_true(self):
        assert doctest.testmod(speedup) == (0, 3)

    def test_of_the_page_are_true(self):
        page = Path(__file__).parents[1] / "docs" / "how_many_workers.md"
        if not page.exists():
            pytest.skip("the documentation is not here")
        assert doctest.testfile(str(page), module_relative=False) == (0, 4)
