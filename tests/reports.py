"""Reports of fits that never were."""

from daskps.report import FitReport, RankEpoch
from daskps.speedup import n_meetings


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
