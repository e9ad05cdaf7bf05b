"""Rounds between workers and the scheduler, over a real cluster's connections."""

from __future__ import annotations

import dask
import numpy as np
import pytest
from distributed import get_worker

from daskps import RoundTimeoutError
from daskps._connecting import open_channel
from daskps._launch import open_run
from daskps._spec import SCHEDULER_PLUGIN, Ticket
from daskps.exceptions import InvalidMessageError, RunAbortedError, StaleMessageError


@pytest.fixture
def open_ranks(session_client, client):
    """An open run, and a function that lets every rank talk on a channel of its own."""
    opened = []

    def open_ranks(n):
        run = open_run(session_client, n, n)
        opened.append(run)
        return Ranks(session_client, run.__enter__())

    yield open_ranks
    for run in opened:
        run.__exit__(None, None, None)


class Ranks:
    def __init__(self, client, run):
        self.client = client
        self.run = run

    def start(self, *scripts):
        """For every rank the rounds (buffer, weight, reduction) that it pushes."""
        capacity = max(push[0].nbytes for script in scripts for push in script)
        return [
            self.client.submit(
                talk,
                self.run.ticket(rank),
                script,
                capacity,
                self.run.rules,
                workers=[self.run.addresses[rank]],
                pure=False,
            )
            for rank, script in enumerate(scripts)
        ]

    def talk(self, *scripts):
        return self.client.gather(self.start(*scripts))


def talk(ticket, script, capacity, rules):
    channel = open_channel(get_worker(), ticket, capacity, rules)
    try:
        results = [channel.push_pull(*push).copy() for push in script]
        return results, channel.traffic
    finally:
        channel.close()


def error_of(future, kind):
    """What a task raised. Not raised again here, where a traceback would keep the future."""
    error = future.exception(timeout=20)
    assert type(error) is kind
    return str(error)


def buffers(n_ranks, dtype, size=1000):
    return [np.random.default_rng(rank).normal(size=size).astype(dtype) for rank in range(n_ranks)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4])
def test_mean_and_sum(open_ranks, n_ranks, dtype):
    """Every rank gets the same bits: those of adding in rank order and dividing once."""
    pushed = buffers(n_ranks, dtype)
    weights = [float(rank + 1) for rank in range(n_ranks)]
    scripts = [
        [(buffer, weight, "mean"), (buffer, 1.0, "sum")]
        for buffer, weight in zip(pushed, weights, strict=True)
    ]
    found = open_ranks(n_ranks).talk(*scripts)
    total = pushed[0].copy()
    for buffer in pushed[1:]:
        total += buffer
    for (mean, added), _ in found:
        assert mean.dtype == added.dtype == dtype
        np.testing.assert_array_equal(added, total)
        np.testing.assert_array_equal(mean, total / np.dtype(dtype).type(sum(weights)))


def test_weight_0_is_left_out(open_ranks):
    """Also where the buffer holds what is no number; and nobody may have any weight."""
    one, two = buffers(2, "float32")
    two[:] = np.nan
    (first, _), (second, _) = open_ranks(2).talk(
        [(one, 2.0, "mean"), (one, 0.0, "mean"), (one, 1.0, "mean")],
        [(two, 0.0, "mean"), (two, 0.0, "mean"), (one, 1.0, "mean")],
    )
    for results in (first, second):
        np.testing.assert_array_equal(results[0], one / 2)
        assert results[1].size == 0
        np.testing.assert_array_equal(results[2], one)


def test_large_buffers(open_ranks):
    """Larger than what any socket holds, on both ends at once."""
    pushed = buffers(3, "float32", 2_000_000)
    found = open_ranks(3).talk(*[[(buffer, 1.0, "mean")] * 2 for buffer in pushed])
    expected = (pushed[0] + pushed[1] + pushed[2]) / np.float32(3)
    for results, traffic in found:
        for result in results:
            np.testing.assert_array_equal(result, expected)
        assert traffic.rounds == 2
        assert traffic.bytes == 2 * 2 * 8_000_000
        assert traffic.wait_seconds >= 0
        assert traffic.sync_seconds > 0


def test_a_run_that_is_over(session_client, client):
    with open_run(session_client, 1, 1) as run:
        ticket, address, rules = run.ticket(0), run.addresses[0], run.rules
    future = session_client.submit(talk, ticket, [], 64, rules, workers=[address], pure=False)
    assert ticket.run_id in error_of(future, StaleMessageError)


def test_another_generation(session_client, client):
    with open_run(session_client, 1, 1) as run:
        ticket = run.ticket(0)
        old = Ticket(ticket.run_id, ticket.generation + 1, 0, 1)
        future = session_client.submit(talk, old, [], 64, run.rules, workers=run.addresses, pure=False)
        assert error_of(future, StaleMessageError)


def test_ranks_that_do_not_fit_together(open_ranks):
    """The first error poisons the run: every rank gets it, also the one that was waiting."""
    ranks = open_ranks(2)
    buffer = np.ones(10, "float32")
    futures = ranks.start([(buffer, 1.0, "mean")], [(buffer[:9], 1.0, "mean")])
    for future in futures:
        assert " in round 0, rank " in error_of(future, InvalidMessageError)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none(open_ranks, weight):
    values = np.ones(3, "float32")
    futures = open_ranks(2).start([(values, weight, "mean")], [(values, 1.0, "mean")])
    for future in futures:
        assert f"weight {weight} of rank 0" in error_of(future, InvalidMessageError)


def test_a_rank_that_never_comes(open_ranks):
    """A round has a deadline, and the error names who is missing."""
    with dask.config.set({"daskps.timeouts.round": "100ms"}):
        ranks = open_ranks(2)
        (future,) = ranks.start([(np.ones(3, "float32"), 1.0, "mean")])
        message = error_of(future, RoundTimeoutError)
    assert "ranks [1]" in message
    assert "daskps.timeouts.round" in message


def test_the_end_of_a_run_releases_who_waits(session_client, client):
    with open_run(session_client, 2, 2) as run:
        (future,) = Ranks(session_client, run).start([(np.ones(3, "float32"), 1.0, "mean")])
        wait_for_rank(session_client, run.run_id)
    assert error_of(future, RunAbortedError)


def wait_for_rank(client, run_id):
    from probes import wait_until

    def joined(dask_scheduler):
        return len(dask_scheduler.plugins[SCHEDULER_PLUGIN].runs[run_id].rounds.kinds())

    wait_until(lambda: client.run_on_scheduler(joined) == 1)
