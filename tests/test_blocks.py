from collections.abc import Mapping

import dask.array as da
import numpy as np
import pytest
import torch
from nets import CNN3
from reference import assert_same_history, digits, fit_daskps, identical, make_net
from skorch import NeuralNetClassifier
from skorch.callbacks import Callback, EpochScoring

from daskps import DistributedCNNClassifier, _sources, on_ranks
from daskps._blocks import Blocks, readable
from daskps._loading import train_batches, validation_batches
from daskps._partitions import Layout, Shard, epoch_order, pieces
from daskps.exceptions import DaskpsError

BOUNDS = np.array([0, 5, 6, 6, 13, 20])
X = np.random.RandomState(0).rand(20, 2, 3).astype(np.float32)


class Data(Mapping):
    """A worker's data, which notes what is read."""

    def __init__(self, values):
        self.values = values
        self.read = []

    def __getitem__(self, key):
        value = self.values[key]
        self.read.append(key)
        return value

    def __iter__(self):
        return iter(self.values)

    def __len__(self):
        return len(self.values)


def data_of(X, bounds=BOUNDS):
    return Data({f"block-{n}": X[bounds[n] : bounds[n + 1]] for n in range(len(bounds) - 1)})


def shard_of(rows, valid=(), window=2, X=X, bounds=BOUNDS):
    keys = [f"block-{n}" for n in range(len(bounds) - 1)]
    blocks = [Blocks(keys, bounds, window, np.array(r, int), X[:0]) for r in (rows, valid)]
    y = np.arange(len(X)) % 3
    sizes = np.array([len(rows)]), np.array([len(valid)] if len(valid) else [], int)
    layout = Layout(np.searchsorted(rows, bounds), window)
    return Shard(blocks[0], y[list(rows)], sizes[0], blocks[1], y[list(valid)], sizes[1], None, layout)


ROWS = [0, 3, 4, 5, 8, 12, 13, 19]


class TestBlockRows:
    @pytest.mark.parametrize("index", [
        0, -1, np.int64(4), slice(2, 6), slice(None), [5, 1, 1, 6], np.array([7, 0]), [],
        np.arange(8) % 2 == 0, ([3, 2], Ellipsis),
    ], ids=str)  # fmt: skip
    def test_are_taken_as_from_an_array(self, index):
        expected = X[ROWS][index]
        with readable(shard_of(ROWS), data_of(X)) as shard:
            taken = shard.X[index]
            assert (len(shard.X), shard.X.shape, shard.X.ndim) == (8, (8, 2, 3), 3)
        assert taken.dtype == X.dtype
        np.testing.assert_array_equal(taken, expected)

    def test_only_whole_rows_are_taken(self):
        with (
            readable(shard_of(ROWS), data_of(X)) as shard,
            pytest.raises(IndexError, match="only whole ones"),
        ):
            shard.X[0, 1]

    def test_have_the_dtype_that_the_blocks_have(self):
        """And not the one that a dask array claims."""
        held = shard_of(ROWS)
        held = held._replace(X=held.X._replace(like=X[:0].astype(int)))
        with readable(held, data_of(X)) as shard:
            np.testing.assert_array_equal(shard.X[2:4], X[ROWS[2:4]])

    def test_are_copies(self):
        """A view would keep its block in memory."""
        data = data_of(X)
        with readable(shard_of(ROWS), data) as shard:
            assert not any(np.shares_memory(shard.X[row], X) for row in range(8))

    def test_shard_in_memory_is_left_alone(self):
        held = Shard(X, np.arange(20), np.array([20]), None, None, np.array([]))
        with readable(held, {}) as shard:
            assert shard is held

    @pytest.mark.parametrize("window", [1, 2])
    def test_of_an_epoch_read_every_block_once(self, window):
        """Batches that reach over the border of two windows too, and validation rows after them."""
        rows, valid = [*range(4), *range(6, 20)], [4, 5]
        layout = shard_of(rows, window=window).layout
        data = data_of(X)
        for epoch in range(3):
            data.read.clear()
            order = epoch_order(0, epoch, 0, len(rows), window > 1, layout)
            with readable(shard_of(rows, valid, window), data) as shard:
                for piece in pieces(order, np.array([4, 4, 4, 4, 2])):
                    np.testing.assert_array_equal(shard.X[piece], X[rows][piece])
                assert sorted(data.read) == ["block-0", "block-3", "block-4"]
                np.testing.assert_array_equal(shard.X_valid[:], X[valid])

    def test_are_read_from_disk_if_they_are_there(self):
        """The worker's data would take a spilled block back into memory, and spill another."""
        data = data_of(X)
        data.disk = Data({"block-0": data.values.pop("block-0")})
        with readable(shard_of([0, 19]), data) as shard:
            np.testing.assert_array_equal(shard.X[:], X[[0, 19]])
        assert (data.disk.read, data.read) == (["block-0"], ["block-4"])

    def test_of_a_block_that_is_gone(self):
        data = data_of(X)
        del data.values["block-3"]
        with (
            readable(shard_of([0, 7]), data) as shard,
            pytest.raises(DaskpsError, match="block-3 of X is no longer"),
        ):
            shard.X[:]

    def test_blocks_are_let_go_with_the_task(self):
        with readable(shard_of([0, 7]), data_of(X)) as shard:
            shard.X[:]
            reader = shard.X._reader
            assert reader._held
        assert not reader._held

    @pytest.mark.parametrize(
        "collate", [{}, {"iterator_train__collate_fn": torch.utils.data.default_collate}]
    )
    def test_come_in_the_batches_of_an_array(self, collate):
        net = NeuralNetClassifier(torch.nn.Linear, module__in_features=3, module__out_features=3, **collate)
        rows, valid = [0, 1, 4, 5, 7, 8, 14, 15, 19], [2, 3, 18]
        held = shard_of(rows, valid)
        in_memory = held._replace(X=X[rows], X_valid=X[valid])
        order = pieces(np.random.default_rng(0).permutation(9), np.array([4, 4, 1]))
        with readable(held, data_of(X)) as shard:
            for ours, expected in [
                (train_batches(net, shard, order), train_batches(net, in_memory, order)),
                (validation_batches(net, shard), validation_batches(net, in_memory)),
            ]:
                for batch, other in zip(ours, expected, strict=True):
                    assert all(map(torch.equal, batch, other))


@pytest.fixture
def in_blocks(monkeypatch):
    """No stretch is small against its worker's memory."""

    def switch(on):
        monkeypatch.setattr(_sources, "_TOGETHER", -1.0 if on else np.inf)

    switch(True)
    return switch


class TestFit:
    """The same bits as with the rows in one array on each worker."""

    @pytest.mark.parametrize("n_workers", [1, 3])
    @pytest.mark.parametrize("shuffle", [False, True])
    @pytest.mark.parametrize("sync_every", ["batch", "epoch"])
    def test_is_that_on_arrays(self, client, in_blocks, monkeypatch, sync_every, shuffle, n_workers):
        monkeypatch.setattr(_sources, "_WINDOW", 2 * 30 * 64 * 4)  # two blocks of some more
        X, y = digits(203, np.float32)
        array = da.from_array(X, chunks=((30, 3, 30, 30, 30, 30, 30, 20), 1, 8, 8))
        net = make_net(
            CNN3,
            max_epochs=2,
            iterator_train__shuffle=shuffle,
            callbacks=[("train", EpochScoring("accuracy", on_train=True, name="train_acc"))],
        )
        weight = np.random.RandomState(0).rand(203)
        fits = []
        for on in (True, False):
            in_blocks(on)
            clf = DistributedCNNClassifier(
                net, client=client, random_state=0, sync_every=sync_every, n_workers=n_workers
            )
            fits.append(clf.fit(array, y, sample_weight=weight))
        assert identical(*fits)
        assert_same_history(*fits, 0)
        assert fits[0].history_[:, "train_acc"] == fits[1].history_[:, "train_acc"]

    def test_finds_values_that_are_not_finite(self, client, in_blocks):
        X, y = digits(203, np.float32)
        X[170, 0, 3, 3] = np.inf
        with pytest.raises(ValueError, match="X contains NaN or infinity"):
            fit_daskps(client, make_net(CNN3), da.from_array(X, chunks=(50, 1, 8, 8)), y, n_workers=2)

    def test_gives_callbacks_on_ranks_rows_to_take(self, client, in_blocks):
        X, y = digits(203, np.float32)
        with client.as_current():
            array = da.from_array(X, chunks=(50, 1, 8, 8)).persist()
        net = make_net(CNN3, train_split=None, callbacks=[("looks", on_ranks(Looks()))])
        ours = fit_daskps(client, net, array, y, n_workers=2)
        for seen in dict(ours.net_.callbacks_)["looks"].callback.seen_:
            np.testing.assert_array_equal(seen, X[:102])


class Looks(Callback):
    """Takes all rows of X when the training begins and ends."""

    def on_train_begin(self, net, X=None, y=None, **kwargs):
        self.seen_ = [X[np.arange(len(y))]]

    def on_train_end(self, net, X=None, y=None, **kwargs):
        self.seen_.append(X[:])
