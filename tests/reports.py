"""Reports of fits, and outcomes of trials, that never were."""

from daskps._trial import Outcome
from daskps.report import FitReport, RankEpoch
from daskps.speedup import SpeedupModel, n_meetings

BATCHES = 96
BASE_SECONDS = 2.0


def report_of(
    n_workers, sync_every="batch", batch_size=32, steps=100, compute=1.0, idle=0.25, n_epochs=3, first=1.0
):
    """A fit whose ranks all took the same; the first epoch computes `first` times as long."""
    rows = batch_size // n_workers if sync_every == "batch" else batch_size
    ranks = [
        RankEpoch(
            epoch=epoch,
            rank=rank,
            rows=rows * steps,
            steps=steps,
            rounds=steps + 1,
            compute_seconds=steps * compute * (first if epoch == 0 else 1.0),
            wait_seconds=n_meetings(sync_every, steps) * idle / 4,
            sync_seconds=n_meetings(sync_every, steps) * idle * 3 / 4,
            bytes=1,
            transport="shared-memory",
        )
        for epoch in range(n_epochs)
        for rank in range(n_workers)
    ]
    return FitReport(n_workers, sync_every, batch_size, ranks=ranks)


def outcome_of(trial):
    """What a trial comes to if C is 20 ms at 32 rows, a tenth of it fixed, and S(K) is 0.4 + 0.2 K ms."""
    rows, memory = 32 * BATCHES, {"client": 400_000_000}
    accuracy = {} if trial.emulate else {"train": 0.75, "test": 0.5}
    if trial.sync_every is None:
        return Outcome(trial, rows, BASE_SECONDS, 0.0, accuracy, memory)
    K, mode = trial.workers, trial.sync_every
    model = SpeedupModel(0.002, 0.018 / 32 / trial.threads, 0.0004, 0.0002, 32, mode, BATCHES)
    steps = BATCHES if mode == "batch" else BATCHES // K
    compute = model.c0 + model.c1 * (32 / K if mode == "batch" else 32)
    idle = model.s0 + model.s1 * K if K > 1 else 0.0
    report = report_of(K, mode, steps=steps, compute=compute, idle=idle, n_epochs=1)
    memory |= {"scheduler": 60_000_000, "worker": 500_000_000}
    seconds = BATCHES * model.seconds_per_batch(K)
    return Outcome(trial, rows, seconds, 3.25, accuracy, memory, report.to_dict())
