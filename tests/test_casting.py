import numpy as np
import pytest
import torch
from torch import nn

from daskps._casting import InputCast


def linear(dtype=torch.float32):
    return nn.Linear(2, 2, dtype=dtype)


class TestOf:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_dtype_is_the_modules(self, dtype):
        assert InputCast.of(linear(dtype)) == InputCast(dtype, integers=True)

    def test_module_without_parameters_takes_what_comes(self):
        assert InputCast.of(nn.Flatten()) == InputCast(None, integers=True)

    @pytest.mark.parametrize("embedding", [nn.Embedding, nn.EmbeddingBag])
    def test_integers_are_indices_to_an_embedding(self, embedding):
        module = nn.Sequential(embedding(5, 2), linear())
        assert InputCast.of(module) == InputCast(torch.float32, integers=False)


class TestTensor:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool])
    def test_numbers_get_the_modules_dtype(self, dtype):
        values = torch.tensor([0, 1], dtype=dtype)
        converted = InputCast.of(linear()).tensor(values)
        assert (converted.dtype, converted.tolist()) == (torch.float32, [0.0, 1.0])

    def test_what_fits_is_not_copied(self):
        values = torch.ones(2)
        assert InputCast.of(linear()).tensor(values) is values

    def test_pixels_are_not_scaled(self):
        values = torch.tensor([0, 255], dtype=torch.uint8)
        assert InputCast.of(linear()).tensor(values).tolist() == [0.0, 255.0]

    def test_indices_stay_integers_while_floats_are_cast(self):
        cast = InputCast(torch.float32, integers=False)
        assert cast.tensor(torch.tensor([1])).dtype == torch.int64
        assert cast.tensor(torch.ones(1, dtype=torch.float64)).dtype == torch.float32

    def test_complex_numbers_and_other_things_stay(self):
        cast = InputCast.of(linear())
        values = torch.tensor([1j])
        assert cast.tensor(values) is values
        assert cast.tensor("text") == "text"

    def test_module_without_parameters_changes_nothing(self):
        values = torch.ones(2, dtype=torch.float64)
        assert InputCast.of(nn.Flatten()).tensor(values) is values

    def test_collections_are_converted_one_by_one(self):
        cast = InputCast.of(linear())
        wide = torch.ones(1, dtype=torch.float64)
        converted = cast.tensor({"a": wide, "b": [wide, (wide, "text")]})
        assert converted["a"].dtype == torch.float32
        assert type(converted["b"]) is list
        assert type(converted["b"][1]) is tuple
        assert converted["b"][1][0].dtype == torch.float32
        assert converted["b"][1][1] == "text"


class TestArray:
    @pytest.mark.parametrize(
        "dtype", ["float16", "float64", "uint8", "uint16", "uint32", "int8", "int64", "bool"]
    )
    def test_numbers_get_the_modules_dtype(self, dtype):
        converted = InputCast.of(linear()).array(np.array([[0, 1]], dtype))
        assert (converted.dtype, converted.tolist()) == (np.float32, [[0.0, 1.0]])

    def test_what_fits_is_not_copied(self):
        values = np.ones((2, 2), np.float32)
        assert InputCast.of(linear()).array(values) is values

    @pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
    def test_reversed_and_fortran_ordered_views_are_taken(self, dtype):
        values = np.arange(24).reshape(4, 2, 3).astype(dtype)
        for view in (values[::-1], values[:, :, ::-1], np.asfortranarray(values), values[::2]):
            converted = InputCast.of(linear()).array(view)
            assert torch.as_tensor(converted).tolist() == view.tolist()

    def test_array_that_may_not_be_written_is_taken_without_a_warning(self):
        values = np.ones((2, 2))
        values.flags.writeable = False
        assert InputCast.of(linear()).array(values).tolist() == values.tolist()

    @pytest.mark.parametrize("dtype", [">f4", ">f8", ">i2", "<f4"])
    def test_bytes_may_be_in_any_order(self, dtype):
        values = np.array([[1.0, 2.0]], dtype)
        assert InputCast.of(linear()).array(values).tolist() == [[1.0, 2.0]]

    def test_indices_stay_integers_that_torch_can_work_with(self):
        cast = InputCast(torch.float32, integers=False)
        for dtype in ("uint16", "uint32", ">i8", "int64"):
            assert cast.array(np.array([[3]], dtype)).dtype == np.int64
        assert cast.array(np.array([[3]], "uint8")).dtype == np.uint8
        assert cast.array(np.array([[3.0]])).dtype == np.float32

    def test_module_in_bfloat16_can_predict(self):
        module = linear(torch.bfloat16)
        values = InputCast.of(module).array(np.array([[0.5, 2.0]]))
        rows = InputCast.of(module).tensor(torch.as_tensor(values))
        assert rows.tolist() == [[0.5, 2.0]]
        assert module(rows).dtype == torch.bfloat16


class TestShrunk:
    def test_doubles_travel_as_the_floats_that_the_module_takes(self):
        values = np.array([[1 / 3]])
        shrunk = InputCast.of(linear()).shrunk(values)
        assert shrunk.dtype == np.float32
        assert shrunk.tolist() == values.astype("float32").tolist()

    @pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "int64"])
    def test_what_is_as_small_travels_as_it_is(self, dtype):
        values = np.ones((2, 2), dtype)
        assert InputCast.of(linear()).shrunk(values) is values

    def test_doubles_stay_for_a_module_that_takes_them(self):
        values = np.ones((2, 2))
        assert InputCast.of(linear(torch.float64)).shrunk(values) is values
