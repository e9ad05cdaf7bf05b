"""The task of a rank that only tries how its values would travel."""

from __future__ import annotations

from contextlib import closing
from statistics import median
from time import perf_counter

from distributed import get_worker

from daskps._connecting import open_channel
from daskps._findings import Trip
from daskps._spec import Rules, Ticket

_N_VALUES = 1000
_N_ROUNDS = 20


def probe(ticket: Ticket, rules: Rules) -> Trip:
    """Join a run, contribute to a few rounds and see that the sums are right.

    Raises
    ------
    RuntimeError
        If a sum is wrong.
    """
    with closing(open_channel(get_worker(), ticket, 8 * _N_VALUES, rules)) as channel:
        values = channel.allocate(_N_VALUES, "float64")
        values[:] = 1.0
        seconds = []
        for _ in range(_N_ROUNDS):
            begun = perf_counter()
            total = channel.push_pull(values, 1.0, "sum")
            seconds.append(perf_counter() - begun)
            if set(total.tolist()) != {float(ticket.world_size)}:
                raise RuntimeError(f"the sum of {ticket.world_size} ones is {set(total.tolist())}")
        return Trip(channel.kind, median(seconds))
