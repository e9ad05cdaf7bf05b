"""Experiments that never were."""

from reports import report_of

from daskps._experiment import Cell, Plan, measure
from daskps._trial import Outcome, Trial
from daskps.speedup import SpeedupModel

BATCHES = 96
BASE_SECONDS = 2.0
BASE = Trial("fashion-mnist", None, 32, 1)
PLAN = Plan(BASE, (Cell(1, 1), Cell(1, 2), Cell(2, 1)), ("batch", 8), repeats=3)


def outcome_of(trial):
    """What a trial comes to if C is 20 ms at 32 rows, a tenth of it fixed, and S(K) is 0.4 + 0.2 K ms.

    Two images of a stand-in take as long as a row, and a quarter longer beside another worker.
    """
    b, rows, memory = trial.batch_size, trial.batch_size * BATCHES, {"client": 400_000_000}
    accuracy = {} if trial.emulate or trial.stand_in else {"train": 0.75, "test": 0.5}
    if trial.sync_every is None:
        return Outcome(trial, rows, BASE_SECONDS, 0.0, accuracy, memory)
    K, mode = trial.workers, trial.sync_every
    model = SpeedupModel(0.002, 0.018 / 32 / trial.threads, 0.0004, 0.0002, b, mode, BATCHES)
    steps = BATCHES if mode == "batch" else BATCHES // K
    compute = model.c0 + model.c1 * (b / K if mode == "batch" else b)
    if trial.stand_in is not None:
        compute *= trial.stand_in / 2 * (1.25 if K > 1 else 1.0)
    idle = model.s0 + model.s1 * K if K > 1 else 0.0
    report = report_of(K, mode, b, steps=steps, compute=compute, idle=idle, n_epochs=1)
    memory |= {"scheduler": 60_000_000, "worker": 500_000_000}
    seconds = BATCHES * model.seconds_per_batch(K)
    return Outcome(trial, rows, seconds, 3.25, accuracy, memory, report.to_dict())


def results_of(plan, run=outcome_of):
    return measure(plan, "daskps speedup", run, lambda line: None)
