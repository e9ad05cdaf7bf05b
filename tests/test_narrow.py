"""Values of 16 bits for the way through a connection."""

import numpy as np
import pytest
import torch
from ranks import side_by_side

from daskps._narrow import narrowed, round_in_place, widened

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, -np.nan, 3.4e38, -3.4e38, 1e-45, 1.1754944e-38,
     65504.0, 65519.9, 65520.0, 6e-8, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-11],
    dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
class TestRounding:
    def through(self, values, dtype):
        return widened(narrowed(values, dtype), dtype)

    def test_is_that_of_torch(self, dtype):
        bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype="uint32")
        values = np.concatenate([SPECIAL, bits.view("float32")])
        expected = torch.from_numpy(values).to(DTYPES[dtype]).float().numpy()
        assert np.array_equal(self.through(values, dtype), expected, equal_nan=True)

    def test_of_what_is_rounded_changes_nothing(self, dtype):
        once = self.through(np.random.default_rng(1).normal(size=1000).astype("float32"), dtype)
        assert np.array_equal(self.through(once, dtype), once)

    def test_takes_two_bytes_a_value(self, dtype):
        assert narrowed(np.ones(7, "float32"), dtype).nbytes == 14

    def test_of_nothing_is_nothing(self, dtype):
        assert self.through(np.empty(0, "float32"), dtype).size == 0

    def test_in_place_is_the_same(self, dtype):
        values = np.random.default_rng(2).normal(size=100).astype("float32")
        expected = self.through(values, dtype)
        round_in_place(values, dtype)
        assert np.array_equal(values, expected)


RELATIVE = {"bfloat16": 2**-8, "float16": 2**-11}  # half a unit in the last place


@pytest.mark.parametrize("dtype", DTYPES)
class TestRound:
    """Rounds of a run in which some ranks sit at the end of a connection."""

    N, EXACT = 70_000, 3  # more than one chunk, and flags and a loss at the end
    WEIGHTS = (3.0, 0.0, 5.0)

    def values(self, rank):
        return np.random.default_rng(rank).normal(size=self.N + self.EXACT).astype("float32")

    def results(self, dtype, kinds, reduction):
        def rank_does(rank, channel):
            weight = self.WEIGHTS[rank]
            scale = weight if reduction == "mean" else 1.0
            values = channel.allocate(self.N + self.EXACT, "float32")
            values[:] = self.values(rank) * np.float32(scale)
            return channel.push_pull(values, weight, reduction, self.N).copy()

        return side_by_side(3, rank_does, n_bytes=1 << 20, kinds=kinds, wire_dtype=dtype)

    def expected(self, rounded, reduction):
        first, last = (self.values(rank).astype("float64") for rank in (0, 2))
        if rounded is not None:
            first[: self.N] = widened(narrowed(self.values(0)[: self.N], rounded), rounded)
            last[: self.N] = widened(narrowed(self.values(2)[: self.N], rounded), rounded)
        return (3 * first + 5 * last) / 8 if reduction == "mean" else first + last

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("kinds", [("unix",), ("tcp", "shared", "shared")])
    def test_gives_all_ranks_the_same_bits(self, dtype, kinds, reduction):
        results = self.results(dtype, kinds, reduction)
        assert {result.tobytes() for result in results} == {results[0].tobytes()}

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_sums_in_float32_what_was_rounded_once_and_rounds_the_result_once(self, dtype, reduction):
        result = self.results(dtype, ("tcp",), reduction)[0]
        expected = self.expected(dtype, reduction)
        error = np.abs(result - expected)[: self.N]
        assert (error <= 1.01 * RELATIVE[dtype] * np.abs(expected[: self.N]) + 1e-6).all()
        assert error.max() > 0.1 * RELATIVE[dtype]  # it was rounded at all

    def test_leaves_flags_and_loss_alone(self, dtype):
        exact = self.results(None, ("tcp",), "mean")[0]
        result = self.results(dtype, ("tcp",), "mean")[0]
        assert np.array_equal(result[self.N :], exact[self.N :])
        assert not np.array_equal(result, exact)

    def test_is_exact_where_all_ranks_share_memory(self, dtype):
        exact = self.results(None, ("shared",), "mean")[0]
        assert self.results(dtype, ("shared",), "mean")[0].tobytes() == exact.tobytes()

    def test_does_not_overflow_with_the_weight(self, dtype):
        def rank_does(rank, channel):
            values = channel.allocate(2, "float32")
            values[:] = 60_000.0 * 1000
            return channel.push_pull(values, 1000.0, "mean", 1).tolist()

        results = side_by_side(2, rank_does, kinds=("tcp",), wire_dtype=dtype)
        assert results == [[pytest.approx(60_000.0, rel=RELATIVE[dtype]), 60_000.0]] * 2
