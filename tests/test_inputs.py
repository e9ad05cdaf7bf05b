import dask.array as da
import dask.bag
import numpy as np
import pytest
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import DataConversionWarning

from daskps import _inputs


class Estimator(ClassifierMixin, BaseEstimator):
    """Stands for the classifier in messages, and takes the attributes that a check sets."""

    def __init__(self, class_weight=None):
        self.class_weight = class_weight


def check(X, y, estimator=None, classes=None, sample_weight=None):
    return _inputs.check_fit(estimator or Estimator(), X, y, classes, sample_weight, None)


def images(n_rows=6):
    return np.arange(n_rows * 4, dtype="float32").reshape(n_rows, 1, 2, 2)


LABELS = [0, 1, 2, 0, 1, 2]


class TestLabels:
    @pytest.mark.parametrize(("y", "classes"), [
        (["cat", "dog", "eel", "cat", "dog", "eel"], ["cat", "dog", "eel"]),
        ([3, 5, 7, 3, 5, 7], [3, 5, 7]),
        ([1, 2, 3, 1, 2, 3], [1, 2, 3]),
        ([1.0, 2.0, 3.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([-1, 0, 1, -1, 0, 1], [-1, 0, 1]),
    ])  # fmt: skip
    @pytest.mark.parametrize("kind", [list, np.array])
    def test_are_encoded_by_their_order(self, y, classes, kind):
        data = check(images(), kind(y))
        assert data.classes.tolist() == classes
        assert data.y.tolist() == LABELS
        assert data.y.dtype == np.int64

    @pytest.mark.parametrize("y", [
        np.array([True, False] * 3),
        np.array(["b", "a"] * 3),
        np.array(["b", "a"] * 3, object),
        np.array([1, -1] * 3, "int8"),
    ])  # fmt: skip
    def test_of_two_classes_keep_their_dtype(self, y):
        data = check(images(), y)
        assert data.classes.dtype == y.dtype
        assert data.y.tolist() == [1, 0] * 3
        assert np.array_equal(data.classes[data.y], y)

    def test_may_be_tensors_series_or_dask_arrays(self):
        pd = pytest.importorskip("pandas")
        series = pd.Series(LABELS, index=range(100, 106))
        for y in (torch.tensor(LABELS), series, da.from_array(np.array(LABELS), chunks=2)):
            assert check(images(), y).y.tolist() == LABELS

    def test_categories_are_labels(self):
        pd = pytest.importorskip("pandas")
        y = pd.Series(pd.Categorical(["dog", "cat", "eel"] * 2))
        data = check(images(), y)
        assert data.classes.tolist() == ["cat", "dog", "eel"]
        assert data.y.tolist() == [1, 0, 2] * 2

    def test_in_a_column_are_taken_with_a_warning(self):
        with pytest.warns(DataConversionWarning):
            data = check(images(), np.array(LABELS)[:, None])
        assert data.y.tolist() == LABELS

    @pytest.mark.parametrize(("y", "message"), [
        (None, "requires y to be passed"),
        ([0, 1, 2, 0, 1], r"inconsistent numbers of samples: \[6, 5\]"),
        ([1] * 6, r"at least 2 classes .* one class: \[1\]"),
        (np.eye(3)[LABELS], r"1d array.*\(6, 3\)"),
        (np.linspace(0, 1, 6), "Unknown label type: continuous"),
        ([0, 1, 0, 1, 0, np.nan], "NaN"),
    ])  # fmt: skip
    def test_that_are_none_are_one_clear_error(self, y, message):
        with pytest.raises(ValueError, match=message):
            check(images(), y)

    @pytest.mark.parametrize("y", [["a", 1, None] * 2, [1, "a", 2.5] * 2])
    def test_of_several_kinds_are_named(self, y):
        with pytest.raises(ValueError, match=r"Labels .* one kind, those of y are \[.*'int'.*'str'\]"):
            check(images(), np.array(y, object))

    def test_that_are_declared_may_be_absent(self):
        data = check(images(2), ["eel", "cat"], classes=["dog", "eel", "cat"])
        assert data.classes.tolist() == ["cat", "dog", "eel"]
        assert data.y.tolist() == [2, 0]

    def test_that_were_not_declared_are_an_error(self):
        with pytest.raises(ValueError, match=r"labels \[2\], known are \[0, 1\]"):
            check(images(), LABELS, classes=[0, 1])

    def test_of_the_caller_are_not_changed(self):
        y = np.array(LABELS)
        y.flags.writeable = False
        assert check(images(), y).y.tolist() == LABELS


class TestRows:
    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int64", "bool"])
    def test_numbers_of_any_kind_are_taken_as_they_are(self, dtype):
        X = images().astype(dtype)
        data = check(X, LABELS)
        assert data.X.dtype == dtype
        assert np.array_equal(data.X, X)

    def test_good_array_is_not_copied(self):
        X = images()
        assert check(X, LABELS).X is X

    def test_number_of_features_is_noted(self):
        estimator = Estimator()
        check(np.ones((6, 5)), LABELS, estimator)
        assert estimator.n_features_in_ == 5

    def test_names_of_features_are_noted(self):
        pd = pytest.importorskip("pandas")
        estimator = Estimator()
        data = check(pd.DataFrame(np.ones((6, 2)), columns=["a", "b"]), LABELS, estimator)
        assert estimator.feature_names_in_.tolist() == ["a", "b"]
        assert type(data.X) is np.ndarray

    @pytest.mark.parametrize("X", [
        torch.ones(6, 4),
        torch.ones(6, 4, dtype=torch.bfloat16),
        torch.ones(6, 4, requires_grad=True),
        np.ones((6, 4), object),
        [[1.0] * 4] * 6,
    ], ids=["tensor", "bfloat16", "requires grad", "object", "list"])  # fmt: skip
    def test_become_arrays(self, X):
        data = check(X, LABELS)
        assert type(data.X) is np.ndarray
        assert data.X.dtype.kind == "f"
        assert data.X.tolist() == [[1.0] * 4] * 6

    def test_integers_that_no_dtype_holds_become_doubles(self):
        data = check([[10**30, 1]] * 6, LABELS)
        assert data.X.dtype == np.float64
        assert data.X.tolist() == [[1e30, 1.0]] * 6

    def test_columns_of_strings_are_refused_with_their_dtype(self):
        pd = pytest.importorskip("pandas")
        X = pd.DataFrame({"a": pd.Categorical(["u", "v"] * 3), "b": np.ones(6)})
        with pytest.raises(ValueError, match=r"X has the dtype object, numbers are needed: .*'u'"):
            check(X, LABELS)

    @pytest.mark.parametrize("view", [
        lambda X: X[::-1], lambda X: X[..., ::-1], np.asfortranarray, lambda X: X.astype(">f4"),
    ], ids=["reversed", "mirrored", "fortran", "big-endian"])  # fmt: skip
    def test_any_layout_is_one_that_torch_takes(self, view):
        X = view(images())
        data = check(X, LABELS)
        assert torch.as_tensor(data.X).tolist() == X.tolist()

    @pytest.mark.parametrize(("X", "message"), [
        (np.empty((0, 4)), r"0 sample\(s\)"),
        (np.empty((6, 0)), r"0 feature\(s\)"),
        (np.array([[np.nan]] * 6), "NaN"),
        (np.array([[np.inf]] * 6, "float32"), "infinity"),
        (np.ones(6), "Expected 2D array"),
        (np.array([["a"]] * 6), "Convert your data to numeric values"),
        (np.array([[object()]] * 6), None),
        (np.array([[1j]] * 6), "Complex data not supported"),
    ])  # fmt: skip
    def test_that_are_no_finite_numbers_are_an_error(self, X, message):
        with pytest.raises((ValueError, TypeError), match=message):
            check(X, LABELS[: len(X)])

    def test_of_the_caller_are_not_changed(self):
        X = images()
        X.flags.writeable = False
        assert check(X, LABELS).X is X


class Items(torch.utils.data.Dataset):
    def __init__(self, *items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        return self.items[row]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(2), 0)])


class TestDatasets:
    def test_bring_their_labels_along(self):
        X = Items(*[(torch.ones(2), label) for label in LABELS])
        data = check(X, None)
        assert data.X is X
        assert data.y.tolist() == LABELS

    @pytest.mark.parametrize("y", [None, LABELS])
    @pytest.mark.parametrize(("X", "error", "message"), [
        (Stream(), TypeError, "Stream without a length"),
        (Items(), ValueError, "Items with 0 items"),
        (Items(*[(torch.ones(2),)] * 6), ValueError, r"pairs \(X, y\), those of Items are 1 part\(s\)"),
        (Items(*[torch.ones(2)] * 6), ValueError, r"pairs \(X, y\), those of Items are a Tensor"),
    ], ids=["stream", "empty", "X only", "no pair"])  # fmt: skip
    def test_whose_rows_cannot_be_dealt_are_one_clear_error(self, X, error, message, y):
        with pytest.raises(error, match=message):
            check(X, y)


def test_dict_without_an_array_is_an_error():
    with pytest.raises(ValueError, match="dict without any array"):
        check({}, LABELS)


class TestDask:
    def test_rows_stay_on_the_cluster(self):
        def fail(block):
            raise AssertionError("a block was computed")

        X = da.from_array(images(), chunks=(2, 1, 2, 2)).map_blocks(fail, meta=images(0))
        data = check(X, LABELS)
        assert _inputs.is_dask(data.X)
        assert data.X.chunks[0] == (2, 2, 2)

    @pytest.mark.parametrize("chunks", [1, 4, (2, 1, 2, 1), (6, 1, 1, 1)])
    def test_chunks_inside_a_row_are_joined(self, chunks):
        data = check(da.from_array(images(), chunks=chunks), LABELS)
        assert [len(c) for c in data.X.chunks[1:]] == [1, 1, 1]
        assert np.array_equal(data.X.compute(), images())

    def test_number_of_features_is_noted(self):
        estimator = Estimator()
        check(da.ones((6, 5), chunks=2), LABELS, estimator)
        assert estimator.n_features_in_ == 5

    @pytest.mark.parametrize(("X", "y", "message"), [
        (da.ones(6, chunks=2), LABELS, "at least 2 dimensions"),
        (da.ones((6, 4), chunks=2).astype("complex64"), LABELS, "complex64"),
        (da.ones((5, 4), chunks=2), LABELS, "inconsistent numbers of samples"),
        (da.ones((0, 4), chunks=2), [], "0 samples"),
    ])  # fmt: skip
    def test_what_is_no_training_data_is_one_clear_error(self, X, y, message):
        with pytest.raises(ValueError, match=message):
            check(X, y)

    def test_collections_of_another_kind_are_refused_by_name(self):
        with pytest.raises(TypeError, match=r"X must be an array .* got Bag"):
            check(dask.bag.from_sequence([1, 2]), LABELS)
        with pytest.raises(TypeError, match=r"X must be an array .* got Delayed"):
            check(dask.delayed(images)(), LABELS)


class TestWeights:
    def test_none_are_none(self):
        assert check(images(), LABELS).weights is None

    @pytest.mark.parametrize("value", [1.0, 0.5, 7])
    def test_constant_ones_are_none(self, value):
        assert check(images(), LABELS, sample_weight=[value] * 6).weights is None

    def test_of_rows_are_kept(self):
        weights = [0.5, 1, 2, 0, 1, 1]
        assert check(images(), LABELS, sample_weight=weights).weights.tolist() == weights

    def test_of_classes_are_those_of_their_rows(self):
        data = check(images(), ["a", "b", "c"] * 2, Estimator({"a": 1, "b": 2, "c": 5}))
        assert data.weights.tolist() == [1, 2, 5, 1, 2, 5]

    def test_of_rows_and_classes_multiply(self):
        estimator = Estimator({0: 1, 1: 2, 2: 5})
        data = check(images(), LABELS, estimator, sample_weight=[1, 1, 1, 2, 2, 2])
        assert data.weights.tolist() == [1, 2, 5, 2, 4, 10]

    def test_balanced_classes_weigh_the_same_together(self):
        data = check(images(), [0, 0, 0, 0, 1, 1], Estimator("balanced"))
        assert data.weights[:4].sum() == pytest.approx(data.weights[4:].sum())

    @pytest.mark.parametrize(("weights", "message"), [
        ([1] * 5, None),
        ([-1, 1, 1, 1, 1, 1], "[Nn]egative"),
        ([np.nan, 1, 1, 1, 1, 1], "NaN"),
        ([0] * 6, None),
        ([1, 0, 0, 1, 0, 0], "at least 2 classes"),
    ])  # fmt: skip
    def test_that_leave_nothing_to_learn_are_an_error(self, weights, message):
        with pytest.raises(ValueError, match=message):
            check(images(), LABELS, sample_weight=weights)


class TestPredict:
    def fitted(self):
        estimator = Estimator()
        check(images(), LABELS, estimator)
        return estimator

    @pytest.mark.parametrize("kind", [np.array, torch.as_tensor, da.from_array])
    def test_rows_are_those_that_were_given(self, kind):
        X = _inputs.check_X(self.fitted(), kind(images()), reset=False)
        assert _inputs.is_dask(X) == (kind is da.from_array)
        assert np.array_equal(np.asarray(X), images())

    def test_other_features_are_an_error(self):
        with pytest.raises(ValueError, match="expecting 1 features"):
            _inputs.check_X(self.fitted(), np.ones((2, 3, 2, 2)), reset=False)

    def test_what_is_not_finite_is_an_error(self):
        with pytest.raises(ValueError, match="NaN"):
            _inputs.check_X(self.fitted(), np.full((2, 1, 2, 2), np.nan), reset=False)


class TestEncode:
    def test_position_in_the_sorted_labels(self):
        encoded = _inputs.encode(np.array(["b", "a"]), np.array(["a", "b", "c"]))
        assert (encoded.tolist(), encoded.dtype) == ([1, 0], np.int64)

    def test_unknown_label_is_named(self):
        with pytest.raises(ValueError, match=r"\['z'\], known are \['a', 'b'\]"):
            _inputs.encode(np.array(["a", "z"]), np.array(["a", "b"]))
