"""Whether the ranks on a host compute with more threads than it has cores for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Place(NamedTuple):
    """Where a rank computes."""

    host: str
    cores: tuple[int, ...]
    """The numbers of those that its process may use."""
    threads: int


def crowding(places: Iterable[Place]) -> str:
    """What is wrong, and what helps; empty if every thread has a core."""
    threads: dict[str, int] = {}
    cores: dict[str, set[int]] = {}
    for place in places:
        threads[place.host] = threads.get(place.host, 0) + place.threads
        cores.setdefault(place.host, set()).update(place.cores)
    crowded = [
        f"{threads[host]} threads on {len(cores[host])} core(s) of {host}"
        for host in threads
        if threads[host] > len(cores[host])
    ]
    if not crowded:
        return ""
    return (
        f"The ranks compute with {', '.join(crowded)}, which slows each of them down: use fewer workers"
        " (n_workers), or workers of fewer threads."
    )
