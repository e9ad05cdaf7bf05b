from dataclasses import replace

import pytest
from experiments import BASE, PLAN, outcome_of, results_of

from daskps import _experiment
from daskps._experiment import Cell, Results, measure


class TestTurns:
    def test_every_trial_runs_once_in_each_turn_the_baseline_first(self):
        ran = []
        results_of(PLAN, lambda trial: ran.append(trial) or outcome_of(trial))
        assert ran == 3 * PLAN.trials()
        assert PLAN.trials()[:3] == [BASE, replace(BASE, sync_every="batch"), replace(BASE, sync_every=8)]
        assert [(t.workers, t.threads) for t in PLAN.trials()] == [(1, 1)] * 3 + [(1, 2)] * 2 + [(2, 1)] * 2

    def test_each_is_told_of(self):
        lines = []
        measure(replace(PLAN, repeats=1), "", outcome_of, lines.append)
        assert lines[0] == "turn 1 of 1: plain skorch                     2.00 s an epoch"
        assert lines[-1].startswith("turn 1 of 1: H=8, 2x1 ")

    def test_what_was_emulated_is_called_so(self):
        trials = replace(PLAN, base=replace(BASE, emulate=(0.002, 0.0005))).trials()
        assert all(", emulated" in _experiment.name(trial) for trial in trials)

    def test_results_survive_json(self, tmp_path):
        plan = replace(PLAN, base=replace(BASE, emulate=(0.002, 0.0005)), fit_to=(1, 2))
        results = results_of(plan)
        results.save(tmp_path / "results.json")
        assert Results.load(tmp_path / "results.json") == results


class TestBenchmark:
    def ran(self, **changes):
        ran = []
        results_of(replace(PLAN, fit_to=(1,), **changes), lambda t: ran.append(t) or outcome_of(t))
        return ran

    def test_a_stand_in_that_computes_as_long_runs_alone_and_beside_another_in_each_turn(self):
        ran = self.ran()
        n_trials = len(PLAN.trials())
        first, turn = ran.pop(n_trials), ran[-5:]
        assert ran == 3 * (PLAN.trials() + turn)
        assert (first.stand_in, first.workers) == (3, 1)
        assert [(t.sync_every, t.workers, t.batch_size, t.stand_in) for t in turn] == [
            ("batch", 1, 16, 2),
            ("batch", 2, 32, 2),
            (8, 1, 32, 2),
            (8, 2, 32, 2),
            ("batch", 1, 16, None),
        ]
        assert {(t.rows, t.threads, t.emulate) for t in turn} == {(3072, 1, None)}

    def test_what_is_emulated_waits_there_too(self):
        base = replace(BASE, emulate=(0.002, 0.0005))
        assert {(t.stand_in, t.emulate) for t in self.ran(base=base)} == {(None, base.emulate)}

    def test_a_stand_in_is_called_so(self):
        assert _experiment.name(self.ran()[-2]) == "H=8, 2x1, a stand-in"


def test_a_benchmark_of_rounds_needs_a_fit_of_one_worker():
    with pytest.raises(ValueError, match="needs 1x1 in the grid"):
        results_of(replace(PLAN, grid=(Cell(1, 2), Cell(2, 1)), fit_to=(1,)))
