import asyncio
import gc
from types import SimpleNamespace

import dask.array as da
import numpy as np
import pytest
import torch
from probes import leftovers, wait_until, workers_of
from skorch import NeuralNetClassifier
from skorch.dataset import Dataset, ValidSplit
from skorch.helper import predefined_split
from torch import nn
from torch.utils.data import TensorDataset

from daskps._inputs import TrainingData
from daskps._partitions import pieces, step_rows
from daskps._sources import ArraySource, DaskSource, LazyBatch, assemble, scatter

LABELS = np.array([0, 1, 2])


def net_for(**options):
    defaults = {"module__in_features": 1, "module__out_features": 3, "batch_size": 16}
    return NeuralNetClassifier(nn.Linear, **{**defaults, **options}).initialize()


def data_of(n_rows, weights=None, X=None):
    """Rows that hold their own number."""
    numbers = np.arange(n_rows, dtype="float32")[:, None] if X is None else X
    return TrainingData(numbers, np.arange(n_rows) % 3, LABELS, weights)


def array_source(net, data):
    return ArraySource(net, data.X, data)


def shards_of(source, cut):
    return [source._shard(cut, rank) for rank in range(cut.world_size)]


def halves(dataset, y):
    """A split that makes datasets of its own."""
    parts = (slice(len(y) // 2), slice(len(y) // 2, None))
    return [Dataset(dataset.X[part], dataset.y[part]) for part in parts]


class TestArraySource:
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("local", [False, True])
    @pytest.mark.parametrize("split", [None, ValidSplit(5), ValidSplit(0.2, stratified=True)])
    def test_every_row_is_on_one_rank_for_training_or_for_validation(self, world_size, local, split):
        net = net_for(train_split=split)
        source = array_source(net, data_of(203))
        shards = shards_of(source, source.cut(net, world_size, local, seed=0))
        train = np.concatenate([shard.X[:, 0] for shard in shards])
        valid = [shard.X_valid[:, 0] for shard in shards if shard.X_valid is not None]
        valid = np.concatenate(valid) if valid else np.empty(0)
        assert sorted([*train, *valid]) == list(range(203))
        assert len(train) == len(source.dataset_train)
        for shard in shards:
            assert np.array_equal(shard.X[:, 0] % 3, shard.y)
            assert shard.sizes.sum() == len(shard.X) == len(shard.y)

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    def test_ranks_batches_together_are_those_of_the_serial_split(self, world_size):
        net = net_for()
        data = data_of(203)
        train, valid = net.get_split_datasets(data.X, data.y)
        source = array_source(net, data)
        cut = source.cut(net, world_size, False, seed=0)
        shards = shards_of(source, cut)
        by_rank = [pieces(shard.X[:, 0], shard.sizes) for shard in shards]
        ours = [np.concatenate(parts).tolist() for parts in zip(*by_rank, strict=True)]
        assert ours == [X[:, 0].tolist() for X, _ in net.get_iterator(train, training=True)]
        held = [iter(pieces(shard.X_valid[:, 0], shard.valid_sizes)) for shard in shards]
        ours = [next(held[rank]).tolist() for rank, _ in cut.validation]
        assert ours == [X[:, 0].tolist() for X, _ in net.get_iterator(valid, training=False)]

    def test_shuffled_cut_repeats_itself_for_a_seed_only(self):
        net = net_for(iterator_train__shuffle=True)
        source = array_source(net, data_of(100))
        rows = [source.cut(net, 2, False, seed).training.rows[0].tolist() for seed in (1, 1, 2)]
        assert rows[0] == rows[1] != rows[2]

    def test_rank_without_validation_batches_has_no_validation_rows(self):
        net = net_for()
        source = array_source(net, data_of(80))
        shards = shards_of(source, source.cut(net, 2, False, seed=0))
        assert shards[0].valid_sizes.tolist() == [16]
        assert shards[1].valid_sizes.tolist() == []
        assert shards[1].X_valid is None

    def test_weights_stay_with_their_rows(self):
        net = net_for(iterator_train__shuffle=True)
        source = array_source(net, data_of(203, weights=np.arange(203) + 0.5))
        for shard in shards_of(source, source.cut(net, 3, False, seed=0)):
            assert np.array_equal(shard.weights, shard.X[:, 0] + 0.5)

    def test_without_weights_there_are_none(self):
        net = net_for()
        source = array_source(net, data_of(30))
        assert source._shard(source.cut(net, 2, False, 0), 1).weights is None

    def test_one_rank_holds_the_rows_themselves(self):
        net = net_for(train_split=None)
        data = data_of(50)
        source = array_source(net, data)
        assert source._shard(source.cut(net, 1, False, seed=0), 0).X is data.X

    @pytest.mark.parametrize("X", [
        np.arange(40, dtype="float32").reshape(20, 2)[::-1],
        np.asfortranarray(np.arange(40, dtype="float32").reshape(20, 2)),
        torch.arange(40.0).reshape(20, 2),
    ], ids=["reversed", "fortran", "tensor"])  # fmt: skip
    def test_any_layout_of_rows_is_cut(self, X):
        net = net_for(train_split=None, module__in_features=2)
        source = array_source(net, data_of(20, X=X))
        shards = shards_of(source, source.cut(net, 2, False, seed=0))
        parts = [pieces(np.asarray(shard.X), shard.sizes) for shard in shards]
        rows = np.concatenate([np.concatenate(step) for step in zip(*parts, strict=True)])
        assert rows.tolist() == np.asarray(X).tolist()

    def test_validation_set_of_the_user_is_used_with_its_labels_encoded(self):
        labels = np.array(["a", "b", "c"])
        valid = Dataset(np.array([[500.0], [501.0]], "float32"), np.array(["c", "a"]))
        net = net_for(train_split=predefined_split(valid))
        data = TrainingData(data_of(40).X, data_of(40).y, labels, None)
        source = array_source(net, data)
        shard = source._shard(source.cut(net, 2, False, seed=0), 0)
        assert shard.X_valid[:, 0].tolist() == [500.0, 501.0]
        assert shard.y_valid.tolist() == [2, 0]
        assert len(source.dataset_train) == 40

    @pytest.mark.parametrize("labels", [[3, 5, 7], [0, 1, 2], [1, 2, 3]])
    def test_split_of_the_user_that_makes_datasets_of_encoded_rows_is_left_alone(self, labels):
        net = net_for(train_split=halves)
        data = TrainingData(data_of(40).X, data_of(40).y, np.array(labels), None)
        source = array_source(net, data)
        shard = source._shard(source.cut(net, 1, False, seed=0), 0)
        assert shard.y_valid.tolist() == (np.arange(20, 40) % 3).tolist()

    def test_weights_of_rows_that_a_split_makes_are_refused(self):
        with pytest.raises(ValueError, match="weights are not possible"):
            array_source(net_for(train_split=halves), data_of(40, weights=np.arange(40.0)))

    def test_dataset_without_rows_to_deal_is_refused(self):
        def split(dataset, y):
            return TensorDataset(torch.zeros(3, 1), torch.zeros(3)), None

        with pytest.raises(TypeError, match="TensorDataset without the attributes X and y"):
            array_source(net_for(train_split=split), data_of(10))


class TestBatch:
    def test_is_what_the_serial_iterator_yields(self):
        net = net_for()
        data = data_of(203)
        source = array_source(net, data)
        cut = source.cut(net, 3, False, seed=0)
        serial = list(net.get_iterator(source.dataset_train, training=True))
        for rows, (X, y) in zip(step_rows(cut.training, 0, 0, False), serial, strict=True):
            ours = source.batch(rows, training=True)
            assert torch.equal(ours[0], X)
            assert torch.equal(ours[1], y)
            assert ours[0].dtype == X.dtype

    def test_of_validation_rows_is_the_serial_one(self):
        net = net_for()
        source = array_source(net, data_of(203))
        serial = list(net.get_iterator(source.dataset_valid, training=False))
        cut = source.cut(net, 2, False, seed=0)
        for (_, rows), (X, y) in zip(cut.validation, serial, strict=True):
            ours_X, ours_y = source.batch(rows, training=False)
            assert torch.equal(ours_X, X)
            assert torch.equal(ours_y, y)

    def test_is_gathered_when_it_is_looked_at_and_once(self):
        calls = []

        def make():
            calls.append(1)
            return "X", "y"

        batch = LazyBatch(make)
        assert len(batch) == 2
        assert calls == []
        assert (batch[0], batch[1], list(batch)) == ("X", "y", ["X", "y"])
        X, y = batch
        assert (X, y) == ("X", "y")
        assert calls == [1]


def dask_data(n_rows, chunks):
    numbers = np.arange(n_rows, dtype="float32")[:, None]
    return TrainingData(da.from_array(numbers, chunks=(chunks, 1)), np.arange(n_rows) % 3, LABELS)


def held_rows(source, cut):
    """What each rank's block holds, with the rows of it that train and validate."""
    for rank in range(cut.world_size):
        batches = cut.validation_of(rank)
        valid = np.concatenate(batches) if batches else np.empty(0, int)
        yield (
            range(source._bounds[rank], source._bounds[rank + 1]),
            source._rows[True][cut.training.rows[rank]],
            source._rows[False][valid],
        )


class TestDaskSource:
    @pytest.mark.parametrize("local", [False, True])
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("split", [None, ValidSplit(5), ValidSplit(5, stratified=True)])
    def test_every_row_is_used_once_by_the_rank_that_holds_it(self, split, world_size, local):
        net = net_for(train_split=split)
        source = DaskSource(net, dask_data(203, 50))
        cut = source.cut(net, world_size, local, seed=0)
        used = []
        for block, train, valid in held_rows(source, cut):
            used += [*train, *valid]
            assert {*train, *valid} <= set(block)
        assert sorted(used) == list(range(203))

    @pytest.mark.parametrize("split", [ValidSplit(2), ValidSplit(5), ValidSplit(5, stratified=True)])
    @pytest.mark.parametrize("local", [False, True])
    def test_ranks_are_balanced_in_training_rows_wherever_validation_rows_lie(self, split, local):
        net = net_for(train_split=split)
        source = DaskSource(net, dask_data(200, 50))
        lengths = [len(rows) for rows in source.cut(net, 3, local, seed=0).training.rows]
        assert sum(lengths) == len(source.dataset_train)
        assert max(lengths) - min(lengths) <= 1

    def test_rows_that_validate_are_those_of_the_serial_split(self):
        net = net_for()
        X = np.arange(203, dtype="float32")[:, None]
        _, valid = net.get_split_datasets(X, np.arange(203) % 3)
        source = DaskSource(net, dask_data(203, 50))
        assert source._rows[False].tolist() == sorted(valid.indices)

    def test_rows_are_never_computed_for_the_cut(self):
        def fail(block):
            raise AssertionError("a block was computed")

        data = dask_data(100, 20)
        X = data.X.map_blocks(fail, meta=np.empty((0, 1), "float32"))
        net = net_for()
        source = DaskSource(net, TrainingData(X, data.y, LABELS))
        assert source.cut(net, 2, False, seed=0).world_size == 2

    def test_callbacks_see_the_labels_of_a_batch(self):
        net = net_for(train_split=None)
        source = DaskSource(net, dask_data(100, 20))
        X, y = source.batch(np.array([4, 2, 0]), training=True)
        assert X is None
        assert y.tolist() == [1, 2, 0]

    def test_validation_rows_of_the_users_own_are_refused(self):
        valid = Dataset(np.zeros((5, 1), "float32"), np.zeros(5, int))
        with pytest.raises(ValueError, match="rows of its own"):
            DaskSource(net_for(train_split=predefined_split(valid)), dask_data(100, 20))


class TestAssemble:
    def test_shard_of_several_blocks(self):
        X = np.arange(10, dtype="float32")[:, None]
        shard = assemble(
            [X[:4], X[4:]],
            rows=(np.array([1, 5, 9]), np.array([0, 4])),
            labels=(np.array([1, 2, 0]), np.array([0, 1])),
            sizes=(np.array([2, 1]), np.array([2])),
            weights=np.array([0.5, 1.0, 2.0]),
        )
        assert shard.X[:, 0].tolist() == [1, 5, 9]
        assert shard.y.tolist() == [1, 2, 0]
        assert shard.sizes.tolist() == [2, 1]
        assert shard.X_valid[:, 0].tolist() == [0, 4]
        assert shard.y_valid.tolist() == [0, 1]
        assert shard.valid_sizes.tolist() == [2]
        assert shard.weights.tolist() == [0.5, 1.0, 2.0]

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_what_is_not_finite_is_refused(self, value):
        X = np.array([[0.0], [value]])
        rows = np.arange(2)
        with pytest.raises(ValueError, match="NaN or infinity"):
            assemble([X], (rows, rows[:0]), (rows, rows[:0]), (np.array([2]), rows[:0]), None)

    def test_integers_are_taken(self):
        X, rows = np.array([[0], [255]], "uint8"), np.arange(2)
        shard = assemble([X], (rows, rows[:0]), (rows, rows[:0]), (np.array([2]), rows[:0]), None)
        assert shard.X.dtype == np.uint8
        assert len(shard.X_valid) == 0

    def test_shard_of_a_rank_does_not_share_memory_with_its_blocks(self):
        X, rows = np.zeros((3, 1)), np.arange(3)
        shard = assemble([X], (rows, rows[:0]), (rows, rows[:0]), (np.array([3]), rows[:0]), None)
        assert not np.shares_memory(shard.X, X)


def test_what_has_arrived_is_let_go_if_something_else_cannot_be_sent(client, session_client):
    """Without a collection of garbage, which may not come for long."""
    good, *_ = workers_of(session_client)
    before = leftovers(session_client)
    gc.disable()
    try:
        with pytest.raises(KeyError):
            scatter(session_client, "x", [1, 2, 3], [good, "tcp://127.0.0.1:1", good])
        wait_until(lambda: leftovers(session_client) <= before)
    finally:
        gc.enable()


def test_a_scatter_that_is_given_up_says_nothing_of_its_failure_later():
    """The worker is gone, as the fit knows already: asyncio would print an error that nobody looks at."""
    complaints = []

    async def scenario():
        loop, gate = asyncio.get_running_loop(), asyncio.Event()
        loop.set_exception_handler(lambda loop, context: complaints.append(context["message"]))

        async def fail(*args, **kwargs):
            await gate.wait()
            raise KeyError("tcp://gone")

        client = SimpleNamespace(sync=lambda function: function(), scatter=fail)
        sending = asyncio.ensure_future(scatter(client, "shard", [1, 2], ["tcp://a", "tcp://b"]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait([sending])
        gate.set()
        for _ in range(5):
            await asyncio.sleep(0)
        del sending
        gc.collect()

    asyncio.run(scenario())
    assert complaints == []
