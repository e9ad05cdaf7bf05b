import itertools

import numpy as np
import pytest

from daskps._aggregators import combine
from daskps._spec import Contribution


def contribution(rank, weight, values, reduction="mean", dtype="float64"):
    """A rank's message: already multiplied by its weight for a mean, empty for weight 0."""
    values = np.asarray(values, dtype)
    buffer = values * values.dtype.type(weight) if reduction == "mean" else values
    return Contribution("run", 0, rank, 0, weight, reduction, buffer)


def test_mean_is_weighted():
    combined = combine([contribution(0, 64, [1.0, 2.0]), contribution(1, 6, [8.0, -5.0])])
    assert combined.tolist() == [(64 * 1 + 6 * 8) / 70, (64 * 2 - 6 * 5) / 70]


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_mean_of_equal_updates_is_that_update(n_ranks):
    combined = combine([contribution(rank, 40, [0.5, -3.0]) for rank in range(n_ranks)])
    assert combined.tolist() == [0.5, -3.0]


def test_sum_is_not_divided():
    parts = [contribution(0, 64, [1.0, 2.0], "sum"), contribution(1, 6, [8.0, -5.0], "sum")]
    assert combine(parts).tolist() == [9.0, -3.0]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weight_0_is_left_out_even_if_it_is_nan(reduction):
    counted = contribution(1, 3.0, [2.0], reduction)
    ignored = Contribution("run", 0, 0, 0, 0.0, reduction, np.array([np.nan]))
    assert combine([ignored, counted]).tolist() == [2.0]


def test_weight_0_may_come_without_values():
    empty = Contribution("run", 0, 0, 0, 0.0, "mean", np.empty(0))
    assert combine([empty, contribution(1, 3.0, [2.0])]).tolist() == [2.0]


def test_nan_that_counts_is_not_hidden():
    assert np.isnan(combine([contribution(0, 1, [np.nan]), contribution(1, 1, [1.0])])).all()


def test_nobody_contributed():
    empty = Contribution("run", 0, 0, 0, 0.0, "mean", np.empty(0))
    assert combine([]).size == 0
    assert combine([empty]).size == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_order_of_arrival_does_not_change_the_bits(dtype, reduction):
    random = np.random.default_rng(0)
    parts = [
        contribution(rank, float(random.integers(1, 99)), random.normal(size=50), reduction, dtype)
        for rank in range(4)
    ]
    results = [combine(order) for order in itertools.permutations(parts)]
    assert {result.tobytes() for result in results} == {results[0].tobytes()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_is_kept_and_contributions_are_not_changed(dtype):
    parts = [contribution(rank, 2.5, [1.0, 2.0], dtype=dtype) for rank in range(2)]
    for part in parts:
        part.buffer.flags.writeable = False
    before = [part.buffer.copy() for part in parts]
    combined = combine(parts)
    assert combined.dtype == dtype
    assert all(np.array_equal(p.buffer, b) for p, b in zip(parts, before, strict=True))
    assert not any(np.shares_memory(combined, part.buffer) for part in parts)


def test_one_contribution_alone_is_divided_by_its_weight():
    assert combine([contribution(0, 7, [3.0])]).tolist() == [3.0]
