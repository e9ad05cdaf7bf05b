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

    def test_from_one_worker_half_the_batch_and_rounds_of_two_that_wait(self):
        ran = []
        plan = replace(PLAN, fit_to=(1,))
        results = results_of(plan, lambda trial: ran.append(trial) or outcome_of(trial))
        batch, local, half = ran[-3:]
        assert ran[-9:] == 3 * [batch, local, half]
        assert [(t.sync_every, t.workers, t.threads, t.rows) for t in (batch, local)] == [
            ("batch", 2, 1, 3072),
            (8, 2, 1, 3072),
        ]
        assert batch.emulate == local.emulate == (0.0, pytest.approx(0.020 / 32))
        assert (half.sync_every, half.workers, half.batch_size, half.emulate) == ("batch", 1, 16, None)
        model = _comparison.fitted(results)["batch", 1]
        assert [model.c0, model.c1, model.s0, model.s1] == pytest.approx([0.002, 0.018 / 32, 0.0008, 0])
        assert model.predict(2) == pytest.approx(20 / (2 + 9 + 0.8))
