"""What to change, in one or two sentences, from where a fit's time went."""

from __future__ import annotations

from collections import Counter
from typing import Any

# From these shares on, something is worth a sentence.
_MUCH_IDLE = 0.25
_MUCH_BOUNDARY = 0.25
_SLOWER = 1.25


def advice(report: Any) -> str:
    """The largest loss of a fit's time, and what helps against it."""
    if not report.ranks:
        return "Nothing was measured: no epoch ended."
    sentences = [_of_boundaries(report) or "", _of_idling(report)]
    return " ".join(sentence for sentence in sentences if sentence)


def _of_boundaries(report: Any) -> str | None:
    share = report.boundary_share
    if share < _MUCH_BOUNDARY:
        return None
    return (
        f"{share:.0%} of the epochs' time passed on the client, between the ranks' last step and their"
        " next first one: validation, callbacks, and the way of the net's state. Epochs with more rows"
        " help, and fewer or cheaper callbacks."
    )


def _of_idling(report: Any) -> str:
    if report.world_size == 1:
        return (
            f"One worker has nobody to wait for. A batch takes {1000 * report.C:.3g} ms of computing:"
            " more workers pay if meeting the others takes far less."
        )
    slow = _slow_rank(report)
    if report.idle_share < _MUCH_IDLE:
        share = 1 - report.idle_share
        return f"Compute-bound: {share:.0%} of a rank's time is computing, so more workers pay."
    if slow is not None:
        rank, times = slow
        return (
            f"Rank {rank} computes {times:.1f} times as long as the others, and they wait for it: look at"
            " what else runs on its worker's machine, or leave that worker out."
        )
    return f"Communication-bound{_beyond(report)}: {_remedy(report)}."


def _beyond(report: Any) -> str:
    """Where as much time goes into S as into C/K."""
    most = int(report.C / report.S)
    if most < 2:
        return ""
    return f" beyond {most} workers" if most < report.world_size else f" from about {most + 1} workers on"


def _remedy(report: Any) -> str:
    if report.sync_every == "batch":
        return "use sync_every='epoch' or a larger batch_size"
    if report.sync_every == "epoch":
        return "use fewer workers, or more rows in an epoch"
    return f"use sync_every='epoch' or a larger number than {report.sync_every}"


def _slow_rank(report: Any) -> tuple[int, float] | None:
    """The rank that the others wait for, if one computes much longer than they do.

    Epochs that had other ranks, before one was lost or joined, do not count: their shards differ.
    """
    n_ranks = Counter(entry.epoch for entry in report.ranks)
    seconds: dict[int, float] = {}
    for entry in report.ranks:
        if n_ranks[entry.epoch] == report.world_size:
            seconds[entry.rank] = seconds.get(entry.rank, 0.0) + entry.compute_seconds
    if len(seconds) < 2:
        return None
    *others, longest = sorted(seconds.values())
    times = longest / (sum(others) / len(others))
    return (max(seconds, key=seconds.__getitem__), times) if times >= _SLOWER else None
