import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris, load_wine, make_blobs
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from sklearn.utils import shuffle

from daskps import modules
from daskps.datasets import load_digits_images
from daskps.modules import CNN, default_net, input_statistics

SHAPES = [
    (28, 28),
    (1, 28, 28),
    (3, 32, 32),
    (8, 8),
    (4, 4),
    (1, 1, 1),
    (3, 5),
    (2, 1, 40),
    (3, 65, 90),
    (1,),
    (2,),
    (3,),
    (64,),
    (257,),
    (10_000,),
]


@pytest.fixture(autouse=True)
def one_thread_and_a_fixed_seed():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def n_parameters(module):
    return sum(p.numel() for p in module.parameters())


def rows(shape, n=3, dtype=torch.float32, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# --- CNN ---


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cnn_returns_finite_logits_for_every_shape(shape, dtype):
    module = CNN(shape, 5, dtype=dtype)
    logits = module(rows(shape, dtype=dtype))
    assert logits.shape == (3, 5)
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()
    assert isinstance(module.layers[-1], torch.nn.Linear)  # no softmax
    logits.sum().backward()
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("shape", [(28, 28), (1, 28, 28)], ids=str)
def test_cnn_for_28_by_28_is_the_net_of_the_design(shape):
    module = CNN(shape, 10)
    assert n_parameters(module) == 421_642
    kinds = " ".join(type(layer).__name__ for layer in module.layers)
    assert kinds == (
        "Conv2d ReLU MaxPool2d Conv2d ReLU MaxPool2d Flatten Dropout Linear ReLU Dropout Linear"
    )


@pytest.mark.parametrize(
    ("shape", "most"),
    [((10_000,), 1_200_000), ((3, 224, 224), 600_000), ((1, 1, 5000), 200_000), ((1,), 6_000)],
    ids=str,
)
def test_cnn_stays_small_for_large_inputs(shape, most):
    assert n_parameters(CNN(shape, 10)) < most


@pytest.mark.parametrize("features", [1, 2, 3, 255, 256, 257, 600, 10_000])
def test_cnn_looks_at_every_feature(features):
    X = rows((features,), n=1, dtype=torch.float64).requires_grad_()
    CNN((features,), 3, dtype=torch.float64)(X).square().sum().backward()
    assert (X.grad != 0).all()


def test_cnn_image_without_channel_axis_is_an_image_with_one_channel():
    torch.manual_seed(0)
    with_axis = CNN((1, 8, 8), 3).eval()
    without = CNN((8, 8), 3).eval()
    without.load_state_dict(with_axis.state_dict())
    X = rows((1, 8, 8))
    torch.testing.assert_close(without(X[:, 0]), with_axis(X), rtol=0, atol=0)


def test_cnn_has_dropout_on_images_and_none_on_features():
    images, features = CNN((8, 8), 3), CNN((8,), 3)
    X = rows((8, 8))
    assert not torch.equal(images(X), images(X))
    assert torch.equal(features(X[:, 0]), features(X[:, 0]))


def test_cnn_without_dropout_repeats_itself():
    module = CNN((8, 8), 3, dropout=0.0)
    assert torch.equal(module(rows((8, 8))), module(rows((8, 8))))


def test_cnn_width_scales_all_layers():
    sizes = [p.shape[0] for n, p in CNN((8, 8), 7, width=4).named_parameters() if "weight" in n]
    assert sizes == [4, 8, 16, 7]


@pytest.mark.parametrize("shape", [(1, 8, 8), (6,)], ids=str)
def test_cnn_output_of_a_row_does_not_depend_on_other_rows(shape):
    module = CNN(shape, 3, dtype=torch.float64, dropout=0.0)
    X = rows(shape, n=20, dtype=torch.float64)
    alone = torch.cat([module(row) for row in X.split(1)])
    torch.testing.assert_close(module(X), alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "mean", "std"),
    [
        ((8, 8), 7.5, 3.0),
        ((2,), np.array([1.0, -5.0]), np.array([2.0, 100.0])),
        ((3, 4, 4), np.arange(3.0).reshape(3, 1, 1), 2),
    ],
    ids=["image", "features", "channels"],
)
def test_cnn_standardises_its_input(shape, mean, std):
    torch.manual_seed(0)
    raw = CNN(shape, 3, mean=mean, std=std, dtype=torch.float64).eval()
    torch.manual_seed(0)
    standardised = CNN(shape, 3, dtype=torch.float64).eval()
    X = rows(shape, dtype=torch.float64)
    torch.testing.assert_close(raw(X * torch.as_tensor(std) + torch.as_tensor(mean)), standardised(X))


@pytest.mark.parametrize("std", [0.0, 1e-60])
def test_cnn_survives_a_std_that_is_zero_in_its_dtype(std):
    module = CNN((2,), 3, mean=[5.0, 5.0], std=[std, 1.0])
    assert module.std.tolist() == [1, 1]
    assert torch.isfinite(module(torch.full((1, 2), 5.0))).all()


def test_cnn_statistics_are_buffers_of_its_dtype_and_copies():
    mean = np.array([1.0, 2.0])
    module = CNN((2,), 3, mean=mean, std=torch.tensor([0.1, 1.0]), dtype=torch.float64)
    mean[0] = 99
    assert module.state_dict()["mean"].tolist() == [1, 2]
    assert module.std.dtype == torch.float64
    assert {name for name, _ in module.named_buffers()} == {"mean", "std"}


def test_cnn_float64_statistics_keep_their_digits():
    assert CNN((1,), 2, mean=0.1, dtype=torch.float64).mean.item() == 0.1


@pytest.mark.parametrize("given", [torch.uint8, torch.int64, torch.float16, torch.float64], ids=str)
def test_cnn_casts_its_input(given):
    module = CNN((8, 8), 3, mean=8, std=5).eval()
    X = torch.randint(0, 17, (4, 8, 8)).to(given)
    assert torch.equal(module(X), module(X.to(torch.float32)))


def test_cnn_same_seed_gives_the_same_weights_in_both_dtypes():
    torch.manual_seed(3)
    single = CNN((4,), 2)
    torch.manual_seed(3)
    double = CNN((4,), 2, dtype=torch.float64)
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert torch.equal(a.double(), b)


def test_cnn_pickles():
    module = CNN((8, 8), 3, mean=8, std=5).eval()
    again = pickle.loads(pickle.dumps(module))
    assert torch.equal(module(rows((8, 8))), again(rows((8, 8))))


@pytest.mark.parametrize("shape", [(), (0,), (8, 0), (1, 2, 3, 4)], ids=str)
def test_cnn_refuses_other_shapes(shape):
    with pytest.raises(ValueError, match=r"input_shape must be .* got"):
        CNN(shape, 3)


# --- input_statistics ---


def test_statistics_of_features_are_per_feature():
    X = np.random.default_rng(0).normal([3, -50, 1e6], [0.1, 7, 2], (500, 3))
    mean, std = input_statistics(X)
    assert mean.dtype == std.dtype == np.float64
    np.testing.assert_allclose(mean, X.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, X.std(0), rtol=1e-12)


@pytest.mark.parametrize("shape", [(40, 8, 8), (40, 3, 8, 8)], ids=str)
def test_statistics_of_images_are_scalars(shape):
    X = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    mean, std = input_statistics(X)
    assert isinstance(mean, float)
    assert isinstance(std, float)
    assert mean == pytest.approx(X.mean(dtype=float), rel=1e-12)
    assert std == pytest.approx(X.std(dtype=float), rel=1e-12)


@pytest.mark.parametrize("shape", [(101, 7), (101, 4, 4)], ids=str)
def test_statistics_do_not_depend_on_the_chunks(shape, monkeypatch):
    X = np.random.default_rng(0).normal(100, 3, shape)
    whole = input_statistics(X)
    monkeypatch.setattr(modules, "CHUNK_VALUES", 50)
    for a, b in zip(input_statistics(X), whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_statistics_replace_a_std_of_zero():
    X = np.column_stack([np.full(1000, 0.1), np.arange(1000.0), np.full(1000, -1e9 / 3)])
    mean, std = input_statistics(X)
    np.testing.assert_array_equal(std, [1, X[:, 1].std(), 1])
    np.testing.assert_array_equal(mean, [0.1, 499.5, -1e9 / 3])


def test_statistics_of_constant_images():
    assert input_statistics(np.full((5, 4, 4), 7, dtype=np.uint8)) == (7.0, 1.0)


@pytest.mark.parametrize("shape", [(60, 5), (60, 4, 4)], ids=str)
@pytest.mark.parametrize("chunk_values", [30, 2**20])
def test_statistics_integer_weights_are_repeated_rows(shape, chunk_values, monkeypatch):
    monkeypatch.setattr(modules, "CHUNK_VALUES", chunk_values)
    rng = np.random.default_rng(0)
    X, weights = rng.normal(10, 2, shape), rng.integers(0, 5, 60)
    weights[:7] = 0
    X[:2] = np.nan  # without weight, so without influence
    weighted = input_statistics(X, weights)
    repeated = input_statistics(X.repeat(weights, axis=0))
    for a, b in zip(weighted, repeated, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_statistics_weights_of_one_change_nothing():
    X = np.random.default_rng(0).normal(size=(60, 5))
    for a, b in zip(input_statistics(X, np.ones(60)), input_statistics(X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_statistics_of_a_tensor_and_of_integers():
    X = np.random.default_rng(0).integers(-(2**40), 2**40, (50, 3))
    for given in (X, torch.tensor(X), X.astype(np.float64)):
        np.testing.assert_allclose(input_statistics(given)[1], X.std(0), rtol=1e-12)


@pytest.mark.parametrize("weights", [None, np.zeros(4)])
def test_statistics_without_rows_are_an_error(weights):
    X = np.ones((4 if weights is not None else 0, 3))
    with pytest.raises(ValueError, match="no row"):
        input_statistics(X, weights)


def test_statistics_weights_of_another_length_are_an_error():
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(4,\)"):
        input_statistics(np.ones((4, 2)), np.ones(3))


@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((101, 6), (10, 6)),
        ((101, 6), (40, 2)),
        ((101, 6), (1, 6)),
        ((101, 6), (101, 6)),
        ((101, 4, 4), (30, 2, 4)),
        ((101, 2, 4, 4), (30, 1, 4, 4)),
    ],
    ids=str,
)
def test_statistics_of_a_dask_array_are_those_of_the_array(shape, chunks):
    da = pytest.importorskip("dask.array")
    X = np.random.default_rng(0).normal(10, 2, shape)
    w = np.random.default_rng(1).integers(0, 3, 101)
    lazy = da.from_array(X, chunks=chunks)
    weightings = [(None, None), (w, w), (w, da.from_array(w, chunks=33))]
    for weights, lazy_weights in weightings:
        expected = input_statistics(X, weights)
        got = input_statistics(lazy, lazy_weights)
        for a, b in zip(got, expected, strict=True):
            assert type(a) is type(b)
            np.testing.assert_allclose(a, b, rtol=1e-12)


def test_statistics_of_a_dask_array_with_unknown_and_empty_chunks():
    da = pytest.importorskip("dask.array")
    X = np.arange(60.0).reshape(20, 3)
    lazy = da.from_array(X, chunks=(5, 3))
    kept = lazy[lazy[:, 0] > 20]
    expected = X[X[:, 0] > 20]
    weights = kept[:, 0]
    np.testing.assert_allclose(input_statistics(kept), input_statistics(expected), rtol=1e-12)
    np.testing.assert_allclose(
        input_statistics(kept, weights), input_statistics(expected, expected[:, 0]), rtol=1e-12
    )
    with pytest.raises(ValueError, match=r"unknown.*1 chunks, X has 4"):
        input_statistics(kept, np.ones(13))


def test_statistics_of_a_dask_array_read_every_chunk_once():
    da = pytest.importorskip("dask.array")
    seen = []

    def chunk(block_info):
        seen.append(block_info[None]["chunk-location"])
        return np.ones((10, 3))

    X = da.map_blocks(chunk, chunks=((10,) * 5, (3,)), dtype=float, meta=np.ones((0, 0)))
    input_statistics(X)
    assert sorted(seen) == [(i, 0) for i in range(5)]


# --- default_net ---


def net_for(X, y, dtype=torch.float32, seed=0, **settings):
    torch.manual_seed(seed)
    mean, std = input_statistics(X)
    net = default_net(X.shape[1:], len(np.unique(y)), dtype=dtype, mean=mean, std=std)
    return net.set_params(**settings)


def split(X, y):
    return train_test_split(X, y, test_size=0.25, stratify=y, random_state=0)


def test_default_net_has_the_promised_settings():
    net = default_net((8, 8), 10, dtype=torch.float32, mean=0.0, std=1.0)
    assert not net.initialized_
    assert net.module is CNN
    assert net.criterion is torch.nn.CrossEntropyLoss
    assert net.train_split is None
    assert net.batch_size == 128
    assert net.max_epochs <= 10
    assert net.get_params()["iterator_train__shuffle"] is True


def test_default_net_clones_and_pickles():
    net = default_net((3,), 2, dtype=torch.float64, mean=np.arange(3.0), std=np.arange(1.0, 4.0))
    for copy in (clone(net), pickle.loads(pickle.dumps(net))):
        module = copy.initialize().module_
        assert module.mean.tolist() == [0, 1, 2]
        assert module.std.tolist() == [1, 2, 3]
        assert module.mean.dtype == torch.float64


def test_default_net_parameters_are_nested():
    net = default_net((8, 8), 10, dtype=torch.float32, mean=0.0, std=1.0)
    net.set_params(module__width=4, module__dropout=0.5).initialize()
    assert net.module_.layers[0].out_channels == 4
    assert net.module_.layers[7].p == 0.5


@pytest.mark.parametrize(("shape", "lr"), [((4,), 0.01), ((8, 8), 0.01), ((28, 28), 0.08 / 28)])
def test_default_net_takes_smaller_steps_for_larger_inputs(shape, lr):
    net = default_net(shape, 2, dtype=torch.float32, mean=0.0, std=1.0)
    assert net.lr == pytest.approx(lr)


def test_default_net_learns_digit_images():
    X_train, X_test, y_train, y_test = load_digits_images()
    net = net_for(X_train, y_train).fit(X_train, y_train)
    assert (net.predict(X_test) == y_test).mean() > 0.95


def test_default_net_learns_raw_digits_as_features():
    X_train, X_test, y_train, y_test = split(*load_digits(return_X_y=True))
    net = net_for(X_train, y_train, torch.float64).fit(X_train, y_train)
    assert net.module_(torch.tensor(X_test[:1])).dtype == torch.float64
    assert (net.predict(X_test) == y_test).mean() > 0.95


@pytest.mark.parametrize("load", [load_iris, load_wine])
def test_default_net_learns_small_tables(load):
    X_train, X_test, y_train, y_test = split(*load(return_X_y=True))
    net = net_for(X_train, y_train, torch.float64).fit(X_train, y_train)
    assert (net.predict(X_test) == y_test).mean() > 0.9


@pytest.mark.parametrize("seed", range(3))
def test_default_net_learns_blobs_in_thirty_steps(seed):
    X, y = shuffle(*make_blobs(n_samples=300, random_state=0), random_state=7)
    X = StandardScaler().fit_transform(X)
    net = net_for(X, y, torch.float64, seed).fit(X, y)
    assert (net.predict(X) == y).mean() > 0.9


class WeightedRows(torch.nn.CrossEntropyLoss):
    """Cross entropy in which every row carries its weight, next to its label."""

    def forward(self, logits, target):
        label, weight = target[:, 0].long(), target[:, 1]
        losses = torch.nn.functional.cross_entropy(logits, label, reduction="none")
        return (losses * weight).sum() / weight.sum()


@pytest.mark.parametrize("seed", range(3))
def test_default_net_integer_weights_are_repeated_rows(seed):
    rng = np.random.RandomState(seed)
    X, y, weights = rng.rand(15, 30), rng.randint(0, 3, 15), rng.randint(0, 5, 15)
    y[:3] = range(3)

    def probabilities(X_fit, y_fit, sample_weight):
        torch.manual_seed(seed)
        mean, std = input_statistics(X_fit, sample_weight)
        net = default_net((30,), 3, dtype=torch.float64, mean=mean, std=std)
        net.set_params(criterion=WeightedRows, classes=[0, 1, 2], callbacks=None)
        net.set_params(predict_nonlinearity=lambda logits: logits.softmax(1))
        net.fit(X_fit, np.column_stack([y_fit, sample_weight]).astype(np.float64))
        return net.predict_proba(X)

    repeated = X.repeat(weights, axis=0), y.repeat(weights), np.ones(weights.sum())
    np.testing.assert_allclose(
        probabilities(X, y, weights), probabilities(*repeated), rtol=1e-9, atol=1e-12
    )
