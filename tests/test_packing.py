import numpy as np
import pytest
import torch
from ranks import combined

from daskps._packing import FlatBuffer, bytes_of, wire_dtype

MIXED = [
    torch.tensor([[1.5, -2.0], [3.0, 0.1]]),
    torch.tensor([1 / 3, -1e-300], dtype=torch.float64),
    torch.tensor([1.5, -0.007], dtype=torch.bfloat16),
    torch.tensor([65504.0, 6e-8], dtype=torch.float16),
    torch.tensor([1 + 2j, -3j], dtype=torch.complex64),
    torch.tensor([1 / 3 + 2j], dtype=torch.complex128),
    torch.tensor(2.5),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.ones(2, 1).expand(2, 3),
    torch.empty(0, 3),
    torch.sparse_coo_tensor([[0, 2, 0]], [1.0, 2.0, 3.0], (4,), check_invariants=True),
]


def dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


def same(a, b):
    """Equal in shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def through(like, *ranks, reduction="mean"):
    """What a rank unpacks after each has packed its (tensors, loss, weight)."""
    contributions = []
    for tensors, loss, weight in ranks:
        scale = weight if reduction == "mean" else 1.0
        packed = FlatBuffer(like).pack(tensors, loss, scale)
        contributions.append((packed, weight, reduction))
    return FlatBuffer(like).unpack(combined(*contributions))


class TestWireDtype:
    @pytest.mark.parametrize(("dtypes", "expected"), [
        ([torch.float32], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.complex64], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.complex128], torch.float64),
        ([], torch.float32),
    ])  # fmt: skip
    def test_is_as_wide_as_the_widest_tensor(self, dtypes, expected):
        assert wire_dtype([torch.zeros(1, dtype=dtype) for dtype in dtypes]) == expected


class TestMemory:
    def test_is_that_of_whoever_allocates_it(self):
        rooms = []

        def allocate(size, dtype):
            rooms.append(np.full(size, 9.0, dtype))
            return rooms[-1]

        flat = FlatBuffer([torch.zeros(2), torch.zeros((), dtype=torch.float64)], allocate)
        packed = flat.pack([torch.tensor([1.0, 2.0]), None], 0.5, 2.0)
        assert packed is flat.array is rooms[0]
        assert rooms[0].dtype == "float64"
        assert rooms[0].tolist() == [2.0, 4.0, 0.0, 2.0, 0.0, 1.0]

    @pytest.mark.parametrize("tensors", [MIXED, MIXED[:1], MIXED[2:5], MIXED[9:], []])
    def test_is_as_much_as_is_said_before(self, tensors):
        assert bytes_of(tensors) == FlatBuffer(tensors).array.nbytes


class TestOneRank:
    @pytest.mark.parametrize("tensor", MIXED, ids=lambda t: f"{t.dtype} {tuple(t.shape)}")
    def test_every_kind_of_tensor_comes_back_bit_for_bit(self, tensor):
        (restored,), _ = through([tensor], ([tensor], 0.0, 1.0))
        assert same(restored, dense(tensor))

    def test_mixed_tensors_come_back_bit_for_bit(self):
        restored, loss = through(MIXED, (MIXED, 0.125, 1.0))
        assert all(same(r, dense(t)) for r, t in zip(restored, MIXED, strict=True))
        assert loss == 0.125

    def test_parameters_that_require_grad_are_packed(self):
        parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        (restored,), _ = through([parameter], ([parameter], 0.0, 1.0))
        assert restored.tolist() == [1.0, 2.0]
        assert not restored.requires_grad

    def test_nan_and_infinity_are_kept(self):
        tensor = torch.tensor([float("nan"), float("inf"), -float("inf")])
        (restored,), loss = through([tensor], ([tensor], float("nan"), 1.0))
        assert restored[0].isnan()
        assert restored[1:].tolist() == [float("inf"), -float("inf")]
        assert np.isnan(loss)

    def test_absent_stays_absent(self):
        restored, _ = through(MIXED, ([None] * len(MIXED), 0.5, 3.0))
        assert restored == [None] * len(MIXED)

    def test_absent_is_not_zero(self):
        like = [torch.zeros(2), torch.zeros(2)]
        (first, second), _ = through(like, ([torch.zeros(2), None], 0.0, 3.0))
        assert first.tolist() == [0.0, 0.0]
        assert second is None

    def test_nothing_is_left_of_the_last_pack(self):
        flat = FlatBuffer([torch.zeros(2)])
        flat.pack([torch.tensor([float("nan"), 1.0])], 1.0, 2.0)
        packed = flat.pack([None], 2.0, 1.0)
        assert packed.tolist() == [0.0, 0.0, 0.0, 2.0]

    def test_what_is_packed_is_not_changed(self):
        tensors = [t.clone() for t in MIXED]
        FlatBuffer(MIXED).pack(tensors, 1.0, 7.0)
        assert all(same(dense(a), dense(b)) for a, b in zip(tensors, MIXED, strict=True))

    def test_no_tensors_carry_the_loss_alone(self):
        assert through([], ([], 0.5, 3.0)) == ([], 0.5)

    @pytest.mark.parametrize("tensors", [[], [torch.zeros(1)] * 2])
    def test_another_number_of_tensors_is_an_error(self, tensors):
        with pytest.raises(ValueError, match="zip"):
            FlatBuffer([torch.zeros(1)]).pack(tensors, 0.0, 1.0)

    @pytest.mark.parametrize("size", [4, 6])
    def test_result_of_another_length_is_an_error(self, size):
        with pytest.raises(ValueError, match="zip"):
            FlatBuffer([torch.zeros(3)]).unpack(np.zeros(size, "float32"))


class TestManyRanks:
    def test_tensors_and_loss_are_weighted_means(self):
        like = [torch.zeros(2, dtype=torch.float64), torch.zeros((), dtype=torch.float64)]
        first = [torch.tensor([1.0, 2.0]), torch.tensor(3.0)]
        second = [torch.tensor([5.0, -2.0]), torch.tensor(-1.0)]
        (vector, scalar), loss = through(like, (first, 0.5, 3.0), (second, 2.5, 1.0))
        assert vector.tolist() == [2.0, 1.0]
        assert scalar.item() == 2.0
        assert loss == 1.0

    def test_sums_are_sums(self):
        like = [torch.zeros(2)]
        ranks = (([torch.ones(2)], 0.5, 3.0), ([torch.ones(2)], 2.0, 5.0))
        (vector,), loss = through(like, *ranks, reduction="sum")
        assert vector.tolist() == [2.0, 2.0]
        assert loss == 2.5

    def test_absent_on_one_rank_counts_as_zero_with_that_ranks_weight(self):
        like = [torch.zeros(1, dtype=torch.float64)]
        (tensor,), _ = through(like, ([torch.tensor([4.0])], 0.0, 1.0), ([None], 0.0, 3.0))
        assert tensor.tolist() == [1.0]

    def test_complex_and_narrow_tensors_are_averaged_in_their_own_dtype(self):
        like = [torch.zeros(1, dtype=torch.complex64), torch.zeros(1, dtype=torch.bfloat16)]
        first = [torch.tensor([2 + 4j]), torch.tensor([1.5])]
        second = [torch.tensor([0j]), torch.tensor([0.5])]
        (imaginary, narrow), _ = through(like, (first, 0.0, 8.0), (second, 0.0, 8.0))
        assert (imaginary.tolist(), imaginary.dtype) == ([1 + 2j], torch.complex64)
        assert (narrow.tolist(), narrow.dtype) == ([1.0], torch.bfloat16)

    def test_complex_tensors_may_begin_at_any_place(self):
        like = [torch.zeros(1), torch.zeros(2, dtype=torch.complex64)]
        values = [torch.tensor([1.0]), torch.tensor([1 + 2j, -3j])]
        (_, imaginary), _ = through(like, (values, 0.0, 1.0), (values, 0.0, 1.0))
        assert imaginary.tolist() == [1 + 2j, -3j]
