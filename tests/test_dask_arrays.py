"""Dask arrays: their chunks become shards on the workers, however they are cut."""

from __future__ import annotations

import warnings

import dask
import dask.array as da
import dask.bag
import numpy as np
import pytest
import torch
from distributed import Client
from nets import CNN3, Boom, Flat, Logged, read
from reference import (
    DOUBLE,
    PLAIN_SGD,
    assert_same_history,
    digits,
    distance,
    fit_daskps,
    fit_plain,
    identical,
    make_net,
    numbered,
    separable,
    state,
    xy,
)
from skorch.callbacks import GradientNormClipping

MODES = ["batch", "epoch"]


def chunked(X, rows):
    return da.from_array(X, chunks=(rows, *X.shape[1:]))


@pytest.mark.parametrize(
    "options",
    [{}, {"criterion__weight": torch.tensor([1.0, 1, 10])}, {"criterion__reduction": "sum", "lr": 0.01}],
    ids=["mean", "class weights", "sum"],
)
def test_one_step_is_one_step_on_all_rows(client, options):
    """BR-01: chunks of 64 and 6 rows, sorted by class."""
    X = np.random.RandomState(0).rand(70, 1, 4, 4).astype(np.float32)
    y = np.sort(np.arange(70) % 3)
    settings = {**PLAIN_SGD, "lr": 1.0, "batch_size": 70, "max_epochs": 1, "train_split": None}
    net = make_net(Flat, module__n_in=16, module__n_out=3, **{**settings, **options})
    plain = fit_plain(net, X, y)
    ours = fit_daskps(client, net, chunked(X, (64, 6)), y, n_workers=2)
    assert [entry.rows for entry in ours.report_.ranks] == [35, 35]
    assert distance(ours, plain) <= 1e-5
    assert ours.history_[0]["train_loss"] == pytest.approx(plain.history[0]["train_loss"], abs=1e-5)


@pytest.mark.parametrize("chunks", [60, (1, 100, 102), 203], ids=str)
def test_one_worker_is_plain_skorch(client, chunks):
    """On one worker the chunks do not matter, nor does the validation split differ."""
    X, y = digits(203)
    net = make_net(CNN3, **DOUBLE)
    plain = fit_plain(net, X, y)
    ours = fit_daskps(client, net, chunked(X, chunks), da.from_array(y, chunks=50), n_workers=1)
    assert distance(ours, plain) <= 1e-10
    for row, expected in zip(ours.history_, plain.history, strict=True):
        assert row.keys() == expected.keys()
        assert row["valid_acc"] == expected["valid_acc"]
        assert row["valid_loss"] == pytest.approx(expected["valid_loss"], abs=1e-10)


@pytest.mark.parametrize("sync_every", MODES)
def test_how_the_array_is_cut_does_not_matter(client, sync_every):
    """Ranks hold the same rows, in the same order, whatever the chunks of X and of y."""
    X, y = digits(203)
    net = make_net(CNN3, **DOUBLE, max_epochs=2)
    forms = [
        (chunked(X, 100), y),
        (chunked(X, (1, 2, 150, 50)), da.from_array(y, chunks=30)),
        (chunked(X, 203), da.from_array(y, chunks=203)),
        (da.from_array(X, chunks=(100, 1, 3, 8)), y),
        (with_unknown_chunks(X, 90), da.from_array(y, chunks=70)),
        (chunked(X, 77), with_unknown_chunks(y, 70)),
    ]
    fits = [fit_daskps(client, net, *form, sync_every=sync_every, n_workers=3) for form in forms]
    assert fits[0].report_.world_size == 3
    assert all(identical(fits[0], other) for other in fits[1:])
    for other in fits[1:]:
        assert_same_history(other, fits[0], 0)


def with_unknown_chunks(values, rows):
    array = da.from_array(values, chunks=(rows, *values.shape[1:]))
    array = array[da.from_array(np.ones(len(values), bool), chunks=rows)]
    assert np.isnan(array.shape[0])
    return array


def test_chunks_inside_a_sample(client):
    """BR-43: an integer as chunk size cuts rows, too; the columns of a row are put together again."""
    X, y = digits(100, np.float32)
    net = make_net(CNN3, train_split=None)
    whole = fit_daskps(client, net, chunked(X, 25), y, n_workers=2)
    for chunks in (4, (25, 1, 8, 4)):
        cut = da.from_array(X, chunks=chunks)
        ours = fit_daskps(client, net, cut, y, n_workers=2)
        assert identical(ours, whole)
        with client.as_current():
            np.testing.assert_array_equal(ours.predict(cut), whole.predict(X))


@pytest.mark.parametrize("n_workers", [2, 3])
@pytest.mark.parametrize("sync_every", MODES)
def test_every_row_once_an_epoch(client, tmp_path, sync_every, n_workers):
    """BR-08: chunks of 100, 37 and 5 rows. Rows are balanced, and all ranks make as many steps."""
    X, y = numbered(142)
    log = str(tmp_path / "log")
    net = make_net(Logged, module__path=log, batch_size=16, max_epochs=2, train_split=None)
    settings = {"sync_every": sync_every, "n_workers": n_workers}
    ours = fit_daskps(client, net, chunked(X, (100, 37, 5)), y, **settings)
    seen = [int(row) for line in read(log) for row in line["rows"]]
    assert sorted(seen) == sorted([*range(142)] * 2)
    held = [entry.rows for entry in ours.report_.ranks if entry.epoch == 0]
    assert sum(held) == 142
    assert max(held) - min(held) <= 1
    steps = {entry.steps for entry in ours.report_.ranks}
    assert steps == {9 if sync_every == "batch" else -(-max(held) // 16)}
    for row in ours.history_:
        assert sum(batch["train_batch_size"] for batch in row["batches"]) == 142


@pytest.mark.parametrize("sync_every", MODES)
def test_validation_split_is_made_once_for_all_rows(client, sync_every):
    """BR-07: with chunks of 3, 3, 3 and 1 rows nobody could split inside a chunk."""
    X, y = xy(10, 2)
    net = make_net(CNN3, module__n=2)
    with dask.config.set({"daskps.min-rows-per-rank": 1}):
        for rows in (X, chunked(X, (3, 3, 3, 1))):
            ours = fit_daskps(client, net, rows, y, sync_every=sync_every, n_workers=4)
            for row in ours.history_:
                assert sum(batch.get("train_batch_size", 0) for batch in row["batches"]) == 8
                assert sum(batch.get("valid_batch_size", 0) for batch in row["batches"]) == 2


def test_too_few_rows_for_the_split(client):
    """BR-07: said on the client, with the number of rows and the split."""
    X, y = xy(4, 2)
    net = make_net(CNN3, module__n=2)
    for rows in (X, chunked(X, 2)):
        with pytest.raises(ValueError, match=r"train_split=.*ValidSplit.* cannot split n_samples=4"):
            fit_daskps(client, net, rows, y)


def test_few_rows(client):
    """BR-07: 3 rows on 4 workers."""
    X, y = xy(3, 3)
    net = make_net(CNN3, module__n=3, train_split=None)
    ours = fit_daskps(client, net, chunked(X, 1), y, n_workers=4)
    assert ours.report_.world_size == 1
    with dask.config.set({"daskps.min-rows-per-rank": 1}):
        ours = fit_daskps(client, net, chunked(X, 1), y, n_workers=4)
    assert ours.report_.world_size == 3
    assert distance(ours, fit_plain(net, X, y)) <= 1e-5


def test_the_array_is_never_gathered(client, session_client, monkeypatch):
    """What the client gathers are results of epochs and y, never X."""
    X, y = digits(203, np.float32)
    array = da.from_array(X, chunks=(50, 1, 8, 8)).map_blocks(refuse_in_this_process, dtype=X.dtype)
    net = make_net(CNN3)
    sizes = []
    gather = Client._gather

    async def measured(self, *args, **kwargs):
        values = await gather(self, *args, **kwargs)
        sizes.extend(dask.sizeof.sizeof(value) for value in values)
        return values

    monkeypatch.setattr(Client, "_gather", measured)
    ours = fit_daskps(client, net, array, y, n_workers=2)
    monkeypatch.undo()
    assert sizes
    assert distance(ours, fit_daskps(client, net, chunked(X, 50), y, n_workers=2)) == 0


def test_many_rows(client):
    """BR-49: neither labels nor row numbers are sent in a graph."""
    array = da.random.random((1_500_000, 2), chunks=(300_000, 2))
    y = np.arange(1_500_000) % 3
    net = make_net(Flat, module__n_in=2, module__n_out=3, max_epochs=0, train_split=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Sending large graph")
        assert fit_daskps(client, net, array, y, n_workers=1).report_.world_size == 1


def refuse_in_this_process(block):
    from distributed import get_worker

    get_worker()
    return block


def test_rows_stay_in_the_workers_memory(client, session_client):
    """Chunks that are computed already are used where they are; the user's stay theirs."""
    X, y = digits(203, np.float32)
    array = session_client.persist(chunked(X, 50))
    ours = fit_daskps(client, make_net(CNN3), array, y, n_workers=2)
    assert ours.report_.world_size == 2
    np.testing.assert_array_equal(session_client.compute(array).result(), X)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.uint8, np.int32])
def test_dtypes(client, dtype):
    """BR-17: any numbers, for a net in single precision."""
    X, y = digits(203, np.float32)
    X = (X * 16).astype(dtype)
    net = make_net(CNN3)
    ours = fit_daskps(client, net, chunked(X, 50), y, n_workers=2)
    expected = fit_daskps(client, net, chunked(X.astype(np.float32), 50), y, n_workers=2)
    assert identical(ours, expected)
    with client.as_current():
        np.testing.assert_array_equal(ours.predict(chunked(X, 50)), expected.predict(X))


def test_drop_last(client):
    X, y = numbered(100)
    net = make_net(CNN3, iterator_train__drop_last=True, train_split=None)
    ours = fit_daskps(client, net, chunked(X, 30), y, n_workers=2)
    assert sum(entry.rows for entry in ours.report_.ranks if entry.epoch == 0) == 96


def test_not_a_number_in_one_chunk(client):
    """Only a shard's reader can see it; the error reaches the client before the first step."""
    X, y = digits(203, np.float32)
    X[170, 0, 3, 3] = np.nan
    with pytest.raises(ValueError, match="X contains NaN or infinity"):
        fit_daskps(client, make_net(CNN3), chunked(X, 50), y, n_workers=2)


@pytest.mark.parametrize("retries", [0, 1])
def test_a_chunk_that_cannot_be_computed(client, tmp_path, retries):
    """It is tried once, or as often as the user asks Dask to."""
    X, y = digits(203, np.float32)
    tries = tmp_path / "tries"
    array = chunked(X, 50).map_blocks(fail_late, tries=str(tries), dtype=X.dtype, meta=X[:0])
    with dask.annotate(retries=retries), pytest.raises(OSError, match="the disk is gone"):
        fit_daskps(client, make_net(CNN3), array, y, n_workers=2)
    assert tries.read_text() == "tried\n" * (retries + 1)


def fail_late(block, tries, block_info=None):
    if block_info[0]["chunk-location"][0] == 3:  # of one rank only
        with open(tries, "a") as file:
            file.write("tried\n")
        raise OSError("the disk is gone")
    return block


def test_collections_that_are_no_arrays(client):
    """BR-29: one error that names what is accepted."""
    bag = dask.bag.from_sequence(range(10), npartitions=2)
    with pytest.raises(TypeError, match=r"X must be an array.*numpy.*got Bag"):
        fit_daskps(client, make_net(CNN3), bag, np.arange(10) % 2)


def test_different_lengths(client):
    X, y = digits(203, np.float32)
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples.*203.*202"):
        fit_daskps(client, make_net(CNN3), chunked(X, 50), y[:-1])


def test_boom(client):
    """BR-16: one rank raises in its second batch, and the client has it at once."""
    X, y = xy(90, 3)
    X[45, 0, 0, 0] = 99
    net = make_net(Boom, module__n=3, batch_size=30, train_split=None)
    with pytest.raises(ValueError, match="boom") as caught:
        fit_daskps(client, net, chunked(X, 30), y, n_workers=3)
    assert "Raised on rank 1 of 3, epoch 1, step 2 of 3." in caught.value.__notes__
    X[45, 0, 0, 0] = 0
    ours = fit_daskps(client, net, chunked(X, 30), y, n_workers=3)
    assert all(torch.isfinite(value).all() for value in state(ours).values())


@pytest.mark.parametrize("sync_every", MODES)
def test_rows_sorted_by_label(client, sync_every):
    """BR-44: each worker has the one chunk of one class, and learns the others through the rounds."""
    X, y = separable(200, 4, by=1.0)
    by_label = np.argsort(y, kind="stable")
    net = make_net(
        CNN3, module__n=4, max_epochs=10, batch_size=20, train_split=None,
        iterator_train__shuffle=True, optimizer=torch.optim.SGD, lr=0.2,
    )  # fmt: skip
    settings = {"sync_every": sync_every, "n_workers": 4, "random_state": 0}
    ordered = fit_daskps(client, net, chunked(X[by_label], 50), y[by_label], **settings)
    mixed = fit_daskps(client, net, chunked(X, 50), y, **settings)
    assert ordered.score(X, y) >= mixed.score(X, y) - 0.05


def test_names_on_the_dashboard(client, cluster):
    """All tasks of a fit are in a span of their own, and those of daskps begin with its name."""
    X, y = digits(203, np.float32)
    spans = cluster.scheduler.extensions["spans"].spans_search_by_name
    before = len(spans.get(("daskps",), []))
    clip = GradientNormClipping(1.0)  # runs on the ranks, which end a training of their own
    net = make_net(CNN3, callbacks=[("clip", clip)])
    ours = fit_daskps(client, net, chunked(X, 50), da.from_array(y, chunks=50), n_workers=2)
    (span,) = spans[("daskps",)][before:]
    names = {group.prefix.name for group in span.groups}
    assert {name for name in names if name.startswith("daskps")} == {
        "daskps-shard",
        "daskps-epoch",
        "daskps-end",
    }
    with client.as_current():
        predicted = ours.predict(chunked(X, 50))
        assert {"daskps-predictor", "daskps-predict-block", "daskps-label-block"} <= {
            dask.utils.key_split(key) for key in dict(predicted.__dask_graph__())
        }


def test_a_frame_warns_of_nothing(client, monkeypatch):
    """Its own computations ignore the span of a fit, and dask would say so."""
    dd = pytest.importorskip("dask.dataframe")
    pd = pytest.importorskip("pandas")
    X, y = digits(60, np.float32)
    frame = dd.from_pandas(pd.DataFrame(X.reshape(60, -1)), npartitions=3)
    net = make_net(Flat, module__n_in=64, module__n_out=10, train_split=None, max_epochs=1)
    monkeypatch.setattr("dask.dataframe.dask_expr._collection._WARN_ANNOTATIONS", True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dask annotations")
        ours = fit_daskps(client, net, frame, dd.from_pandas(pd.Series(y), npartitions=2), n_workers=2)
    assert sum(entry.rows for entry in ours.report_.ranks) == 60


def test_names_of_what_is_sent(client, monkeypatch):
    X, y = digits(203, np.float32)
    sent = []
    scatter = Client.scatter

    def noted(self, data, *args, **kwargs):
        sent.extend(map(dask.utils.key_split, data))
        return scatter(self, data, *args, **kwargs)

    monkeypatch.setattr(Client, "scatter", noted)
    for rows in (X, chunked(X, 50)):
        fit_daskps(client, make_net(CNN3), rows, y, n_workers=2)
    assert set(sent) == {"daskps-shard", "daskps-rows", "daskps-state"}
