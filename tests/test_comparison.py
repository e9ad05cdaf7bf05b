from dataclasses import replace

import pytest
from experiments import BASE_SECONDS, PLAN, outcome_of, results_of

from daskps import _comparison, _experiment
from daskps._comparison import rows
from daskps._experiment import Cell


class TestRows:
    def test_speedup_is_over_the_same_turns_baseline(self):
        turn = iter([1.0, 2.0, 3.0])

        def slower_every_turn(trial):
            if trial.sync_every is None:
                slower_every_turn.factor = next(turn)
            outcome = outcome_of(trial)
            return replace(outcome, epoch_seconds=slower_every_turn.factor * outcome.epoch_seconds)

        last = rows(results_of(PLAN, slower_every_turn))[-1]
        expected = BASE_SECONDS / outcome_of(last.trial).epoch_seconds
        assert last.speedups == pytest.approx([expected] * 3)

    def test_efficiency_is_for_each_core(self):
        by_name = {_experiment.name(row.trial): row for row in rows(results_of(PLAN))}
        for name in ("batch, 1x2", "batch, 2x1"):
            assert by_name[name].efficiency == by_name[name].speedup / 2

    def test_median_of_the_turns(self):
        times = iter([1.0, 5.0, 1.5])

        def unsteady(trial):
            outcome = outcome_of(trial)
            last = (trial.sync_every, trial.workers) == (8, 2)
            return replace(outcome, epoch_seconds=next(times)) if last else outcome

        last = rows(results_of(PLAN, unsteady))[-1]
        assert last.speedup == BASE_SECONDS / 1.5
        assert sorted(last.speedups) == pytest.approx([0.4, BASE_SECONDS / 1.5, 2.0])


class TestPrediction:
    def test_is_of_runtime_over_the_measured_baseline(self):
        for row in rows(results_of(PLAN)):
            if row.trial.sync_every is not None and row.trial.threads == 1:
                assert row.predicted == pytest.approx(row.speedup)

    def test_what_has_only_itself_to_be_predicted_from_has_none(self):
        predicted = {_experiment.name(row.trial): row.predicted for row in rows(results_of(PLAN))}
        assert [name for name, value in predicted.items() if value is None] == [
            "plain skorch",
            "batch, 1x2",
            "H=8, 1x2",
        ]

    def test_a_model_does_not_see_what_it_is_to_predict(self):
        grid = tuple(Cell(K, 1) for K in (1, 2, 4, 8, 16))

        def bent(trial):
            outcome = outcome_of(trial)
            return replace(outcome, epoch_seconds=9.0) if trial.workers > 4 else outcome

        plan = replace(PLAN, grid=grid, modes=("batch",), fit_to=(1, 2, 4))
        hidden, bent_rows = rows(results_of(plan)), rows(results_of(plan, bent))
        assert [row.predicted for row in bent_rows] == [row.predicted for row in hidden]
        assert [row.predicted for row in hidden[1:]] == pytest.approx([row.speedup for row in hidden[1:]])
        assert bent_rows[-1].speedup == BASE_SECONDS / 9

    def test_from_one_worker_half_the_batch_and_a_stand_in_alone_and_beside_another(self):
        models = _comparison.fitted(results_of(replace(PLAN, fit_to=(1,))))
        batch, local = models["batch", 1], models[8, 1]
        assert [batch.c0, batch.c1, batch.s0, batch.s1] == pytest.approx([0.002, 0.018 / 32, 0.0008, 0])
        assert [batch.contention, local.contention] == pytest.approx([1.25, 1.25])
        assert batch.predict(2) == pytest.approx(20 / (1.25 * (2 + 9) + 0.8))
        assert local.predict(2) == pytest.approx(20 / (1.25 * 20 / 2 + 0.8 / 16))

    def test_contention_is_the_median_of_turns_in_which_both_ran(self):
        slower = iter([1.0, 1.0, 3.0, 3.0, 2.0, 6.0])

        def disturbed(trial):
            outcome = outcome_of(trial)
            if trial.stand_in not in (None, 3.0):  # that of the first fit, which finds the size
                factor = next(slower)
                for entry in outcome.report["ranks"]:
                    entry["compute_seconds"] *= factor
            return outcome

        plan = replace(PLAN, modes=("batch",), fit_to=(1,))
        assert _comparison.fitted(results_of(plan, disturbed))["batch", 1].contention == pytest.approx(1.25)

    def test_where_waiting_takes_the_place_of_computing_nobody_is_in_the_way(self):
        plan = replace(PLAN, base=replace(PLAN.base, emulate=(0.002, 0.018 / 32)), fit_to=(1,))
        model = _comparison.fitted(results_of(plan))["batch", 1]
        assert model.contention == 1
        assert model.predict(2) == pytest.approx(20 / (2 + 9 + 0.8))
