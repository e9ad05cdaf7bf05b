import numpy as np
import pytest

from daskps._aggregators import CHUNK, combine


def reader(values, asked=None, name=None):
    """Gives out the values from start to stop, and notes that it was asked."""

    def read(start, stop):
        if asked is not None:
            asked.append((name, start, stop))
        return values[start:stop]

    return read


def combined(parts, divisor=1.0):
    """The result of contributions that all have the same length and dtype."""
    out = np.full(len(parts[0]), np.nan, parts[0].dtype)
    combine([reader(values) for values in parts], divisor, out)
    return out


def weighted(*parts, dtype="float64"):
    """The mean of (weight, values), each multiplied by its weight as a rank does."""
    arrays = [np.asarray(values, dtype) * np.dtype(dtype).type(weight) for weight, values in parts]
    return combined(arrays, sum(weight for weight, _ in parts))


def test_mean_is_weighted():
    result = weighted((64, [1.0, 2.0]), (6, [8.0, -5.0]))
    assert result.tolist() == [(64 * 1 + 6 * 8) / 70, (64 * 2 - 6 * 5) / 70]


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_mean_of_equal_updates_is_that_update(n_ranks):
    assert weighted(*[(40, [0.5, -3.0])] * n_ranks).tolist() == [0.5, -3.0]


def test_sum_is_not_divided():
    assert combined([np.array([1.0, 2.0]), np.array([8.0, -5.0])]).tolist() == [9.0, -3.0]


def test_one_contribution_alone_is_divided_by_its_weight():
    assert weighted((7, [3.0])).tolist() == [3.0]


def test_nan_that_counts_is_not_hidden():
    assert np.isnan(weighted((1, [np.nan]), (1, [1.0]))).all()


@pytest.mark.parametrize(
    ("values", "finite"),
    [([1, 2], True), ([], True), ([np.nan, 1], False), ([np.inf, -np.inf], False), ([1, np.inf], False)],
)
def test_it_tells_whether_the_result_is_finite(values, finite):
    readers = [reader(np.array(values, "float64"))] * 2
    assert combine(readers, 2.0, np.empty(len(values))) is finite


@pytest.mark.parametrize("place", [0, CHUNK, 2 * CHUNK])
def test_it_looks_at_every_chunk(place):
    values = np.ones(2 * CHUNK + 1, "float32")
    values[place] = np.inf
    assert combine([reader(values)], 1.0, np.empty_like(values)) is False


def test_what_the_result_held_before_does_not_count():
    out = np.array([np.nan, np.inf])
    combine([reader(np.ones(2)), reader(np.ones(2))], 2.0, out)
    assert out.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("divisor", [1.0, 7.5])
def test_bits_are_those_of_adding_in_the_given_order_and_dividing_once(dtype, divisor):
    random = np.random.default_rng(0)
    parts = [random.normal(size=1000).astype(dtype) for _ in range(4)]
    expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]) / np.dtype(dtype).type(divisor)
    assert combined(parts, divisor).tobytes() == expected.tobytes()
    assert combined(parts[::-1], divisor).tobytes() != expected.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_is_kept_and_contributions_are_not_changed(dtype):
    parts = [np.array([2.5, 5.0], dtype) for _ in range(2)]
    for part in parts:
        part.flags.writeable = False
    before = [part.copy() for part in parts]
    result = combined(parts, 5.0)
    assert result.dtype == dtype
    assert all(np.array_equal(p, b) for p, b in zip(parts, before, strict=True))
    assert not any(np.shares_memory(result, part) for part in parts)


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 7])
def test_every_value_is_combined_once_whatever_the_length(size):
    parts = [np.arange(size, dtype="float64"), np.full(size, 0.5)]
    assert np.array_equal(combined(parts, 4.0), (np.arange(size) + 0.5) / 4)


def test_ranks_are_read_one_after_the_other_chunk_by_chunk():
    """The memory that this takes is that of one chunk, and the bits depend on nobody's haste."""
    asked = []
    size = 2 * CHUNK + 1
    readers = [reader(np.ones(size), asked, rank) for rank in range(3)]
    combine(readers, 1.0, np.empty(size))
    bounds = [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, size)]
    assert asked == [(rank, *chunk) for chunk in bounds for rank in range(3)]


def test_a_reader_may_use_the_same_memory_for_every_chunk():
    scratch = np.empty(CHUNK)

    def read(start, stop):
        scratch[: stop - start] = np.arange(start, stop)
        return scratch[: stop - start]

    out = np.empty(2 * CHUNK + 3)
    combine([read, read], 2.0, out)
    assert np.array_equal(out, np.arange(len(out)))


def test_error_of_a_reader_is_not_swallowed():
    def read(start, stop):
        raise EOFError("gone")

    with pytest.raises(EOFError, match="gone"):
        combine([reader(np.ones(3)), read], 1.0, np.empty(3))
