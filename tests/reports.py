"""Reports of fits that never were."""

from dataclasses import replace

from daskps.report import FitEvent, FitReport, RankEpoch
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


def lost_one_of_three():
    """Three ranks in two epochs, and two in the last two, where each has half as much again to do."""
    before, after = report_of(3, compute=2.0, n_epochs=2), report_of(2, compute=3.0, n_epochs=2)
    later = [replace(entry, epoch=entry.epoch + 2) for entry in after.ranks]
    report = FitReport(2, "batch", 32, ranks=[*before.ranks, *later])
    report.events.append(FitEvent(2, "tls://a-long-name.example:4127", "was lost; the epoch begins again"))
    return report
