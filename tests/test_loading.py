import numpy as np
import pytest
import torch
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset
from torch import nn
from torch.utils.data import DataLoader

from daskps import _loading
from daskps._partitions import Batching, Shard, pieces, plan_batches


def net_for(**options):
    defaults = {"module__in_features": 1, "module__out_features": 3, "batch_size": 4}
    return NeuralNetClassifier(nn.Linear, **{**defaults, **options}).initialize()


def shard_of(n_rows, sizes=(), n_valid=0, valid_sizes=()):
    X_valid = 100 + np.arange(n_valid, dtype="float32")[:, None] if n_valid else None
    return Shard(
        X=np.arange(n_rows, dtype="float32")[:, None],
        y=np.arange(n_rows) % 3,
        sizes=np.array(sizes, int),
        X_valid=X_valid,
        y_valid=np.arange(n_valid) % 3 if n_valid else None,
        valid_sizes=np.array(valid_sizes, int),
    )


def rows_of(batches):
    """The numbers of the rows in every batch; X holds them."""
    return [X[:, 0].int().tolist() for X, _ in batches]


class Doubling(Dataset):
    def transform(self, X, y):
        X, y = super().transform(X, y)
        return 2 * X, y


class Reporting(DataLoader):
    options = None

    def __init__(self, dataset, **options):
        type(self).options = options
        super().__init__(dataset, **options)


class Plain(NeuralNetClassifier):
    def get_dataset(self, X, y=None):
        return super().get_dataset(X, y)


class TestSlices:
    """Batches that are taken out of the arrays are those that skorch collates row by row."""

    ROWS = (np.array([4, 0, 2]), np.array([], int), np.array([1]), np.array([3, 5]))

    def collated(self, X, y):
        return [
            next(iter(DataLoader(Dataset(X, y), batch_sampler=[r.tolist()]))) for r in self.ROWS if len(r)
        ]

    @pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "uint8", "int16", "int64", "bool"])
    @pytest.mark.parametrize("y_dtype", ["int64", "float32"])
    @pytest.mark.parametrize("shape", [(6, 2), (6, 1, 2, 3), (6,)])
    def test_are_equal_in_values_dtypes_and_shapes(self, dtype, y_dtype, shape):
        X = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
        shard = shard_of(6)._replace(X=X, y=np.arange(6).astype(y_dtype))
        batches = _loading.train_batches(net_for(), shard, self.ROWS)
        assert isinstance(batches, _loading.Slices)
        for ours, theirs in zip(batches, self.collated(X, shard.y), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert torch.equal(a, b)

    def test_of_validation_too(self):
        batches = _loading.validation_batches(net_for(), shard_of(6, n_valid=5, valid_sizes=[2, 2, 1]))
        assert isinstance(batches, _loading.Slices)
        assert rows_of(batches) == [[100, 101], [102, 103], [104]]

    def test_are_the_batchs_own(self):
        X = np.zeros((6, 1), "float32")
        X.flags.writeable = False
        for Xi, _ in _loading.train_batches(net_for(), shard_of(6)._replace(X=X), self.ROWS):
            Xi += 1
        assert not X.any()

    @pytest.mark.parametrize("net", [
        net_for(dataset=Doubling),
        net_for(iterator_train=Reporting),
        net_for(iterator_train__collate_fn=torch.utils.data.default_collate),
        net_for(iterator_train__pin_memory=False),
        net_for(dataset__length=6),
        Plain(nn.Linear, module__in_features=1, module__out_features=3).initialize(),
    ], ids=["dataset", "iterator", "collate_fn", "option", "dataset option", "get_dataset"])  # fmt: skip
    def test_are_not_made_where_the_user_has_a_say(self, net):
        assert not isinstance(_loading.train_batches(net, shard_of(6), self.ROWS), _loading.Slices)

    @pytest.mark.parametrize("X", [torch.zeros(6, 1), {"X": np.zeros((6, 1))}, np.array([["a"]] * 6)])
    def test_are_not_made_of_anything_but_numbers_in_arrays(self, X):
        batches = _loading.train_batches(net_for(), shard_of(6)._replace(X=X), self.ROWS)
        assert not isinstance(batches, _loading.Slices)


class TestTrainBatches:
    def test_are_the_pieces_that_are_not_empty(self):
        rows = [np.array([4, 0, 2]), np.array([], int), np.array([1]), np.array([3, 5])]
        batches = list(_loading.train_batches(net_for(), shard_of(6), rows))
        assert rows_of(batches) == [[4, 0, 2], [1], [3, 5]]
        assert [y.tolist() for _, y in batches] == [[1, 0, 2], [1], [0, 2]]

    def test_alone_are_those_of_the_serial_iterator(self):
        net = net_for(batch_size=4)
        shard = shard_of(10)
        serial = net.get_iterator(net.get_dataset(shard.X, shard.y), training=True)
        plan = plan_batches(10, _loading.batching(net, True), 1, seed=0)
        ours = _loading.train_batches(net, shard, pieces(plan.rows[0], plan.sizes[0]))
        for (X, y), (X_serial, y_serial) in zip(ours, serial, strict=True):
            assert torch.equal(X, X_serial)
            assert torch.equal(y, y_serial)

    def test_of_a_shard_without_rows_are_none(self):
        rows = [np.array([], int)] * 3
        assert list(_loading.train_batches(net_for(), shard_of(0), rows)) == []

    @pytest.mark.parametrize("planned", ["batch_size", "shuffle", "drop_last"])
    def test_what_the_plan_decides_does_not_reach_the_iterator(self, planned):
        value = {"batch_size": 2, "shuffle": True, "drop_last": True}[planned]
        net = net_for(**{f"iterator_train__{planned}": value})
        batches = _loading.train_batches(net, shard_of(6), [np.arange(3), np.arange(3, 6)])
        assert rows_of(batches) == [[0, 1, 2], [3, 4, 5]]

    def test_other_options_reach_the_users_own_iterator(self):
        net = net_for(iterator_train=Reporting, iterator_train__pin_memory=False)
        assert rows_of(_loading.train_batches(net, shard_of(2), [np.arange(2)])) == [[0, 1]]
        assert Reporting.options["pin_memory"] is False
        assert Reporting.options["batch_sampler"] == [[0, 1]]

    def test_users_own_dataset_is_used(self):
        net = net_for(dataset=Doubling)
        assert rows_of(_loading.train_batches(net, shard_of(3), [np.arange(3)])) == [[0, 2, 4]]


class TestValidationBatches:
    def test_are_cut_as_planned_and_in_order(self):
        shard = shard_of(2, n_valid=7, valid_sizes=[4, 3])
        batches = _loading.validation_batches(net_for(), shard)
        assert rows_of(batches) == [[100, 101, 102, 103], [104, 105, 106]]

    def test_of_a_rank_without_any_are_none(self):
        assert list(_loading.validation_batches(net_for(), shard_of(2))) == []

    def test_options_of_the_validation_iterator_are_used(self):
        net = net_for(iterator_valid=Reporting, iterator_valid__batch_size=2)
        shard = shard_of(2, n_valid=4, valid_sizes=[2, 2])
        assert rows_of(_loading.validation_batches(net, shard)) == [[100, 101], [102, 103]]
        assert "batch_size" not in Reporting.options


class TestBatching:
    def test_net_without_options(self):
        assert _loading.batching(net_for(batch_size=7), True) == Batching(7)

    @pytest.mark.filterwarnings("ignore:You set iterator_valid__shuffle")
    def test_only_training_rows_are_shuffled(self):
        net = net_for(iterator_train__shuffle=True, iterator_valid__shuffle=True)
        assert _loading.batching(net, True).shuffle
        assert not _loading.batching(net, False).shuffle

    def test_all_rows_at_once(self):
        assert _loading.batching(net_for(batch_size=-1), True).sizes(9).tolist() == [9]
