"""What stands in front of the estimator: transformers, and X of every kind."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from nets import CNN3, Flat
from reference import digits, identical, make_net, xy
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, MinMaxScaler, OneHotEncoder, StandardScaler

from daskps import DistributedCNNClassifier

N_FEATURES = 64


def est(client, module=CNN3, **options):
    net = make_net(module, train_split=None, **options)
    return DistributedCNNClassifier(net, client=client, n_workers=2, random_state=0)


def flat_est(client, n_in=N_FEATURES):
    return est(client, Flat, module__n_in=n_in, module__n_out=10)


def as_images(X):
    return np.asarray(X).reshape(-1, 1, 8, 8)


class TestPipeline:
    @pytest.fixture
    def data(self):
        X, y = digits(100)
        return X.reshape(100, 64), y

    def test_scaler_and_images(self, client, data):
        X, y = data
        pipe = make_pipeline(StandardScaler(), FunctionTransformer(as_images), est(client)).fit(X, y)
        scaled = as_images(StandardScaler().fit_transform(X))
        alone = est(client).fit(scaled, y)
        assert identical(pipe[-1], alone)
        np.testing.assert_array_equal(pipe.predict(X), alone.predict(scaled))
        np.testing.assert_array_equal(pipe.predict_proba(X), alone.predict_proba(scaled))
        assert pipe.score(X, y) == alone.score(scaled, y)
        assert pipe.classes_.tolist() == list(range(10))

    def test_parameters_of_all_steps(self, client, data):
        X, y = data
        pipe = Pipeline([("scale", MinMaxScaler()), ("clf", flat_est(client))])
        grid = {"scale__feature_range": [(0, 1), (-1, 1)], "clf__net__lr": [0.01, 0.05]}
        search = GridSearchCV(pipe, grid, cv=2, error_score="raise").fit(X, y)
        best = search.best_params_
        alone = flat_est(client).set_params(net__lr=best["clf__net__lr"])
        alone.fit(MinMaxScaler(best["scale__feature_range"]).fit_transform(X), y)
        assert identical(search.best_estimator_[-1], alone)

    def test_representation(self, client):
        assert "DistributedCNNClassifier" in make_pipeline(StandardScaler(), flat_est(client))._repr_html_()


class TestFramesOfTransformers:
    @pytest.fixture
    def table(self):
        rng = np.random.RandomState(0)
        X = pd.DataFrame(
            {"colour": rng.choice(["red", "green"], 60), "size": rng.rand(60), "age": range(60)}
        )
        return X, np.arange(60) % 2

    def columns(self):
        return ColumnTransformer(
            [
                ("number", StandardScaler(), ["size", "age"]),
                ("name", OneHotEncoder(sparse_output=False), ["colour"]),
            ]
        )

    def test_names_come_through(self, client, table):
        X, y = table
        pipe = make_pipeline(self.columns(), flat_est(client, 4)).set_output(transform="pandas").fit(X, y)
        names = ["number__size", "number__age", "name__colour_green", "name__colour_red"]
        assert pipe[-1].feature_names_in_.tolist() == names
        assert pipe[-1].n_features_in_ == 4
        alone = flat_est(client, 4).fit(self.columns().fit_transform(X), y)
        assert identical(pipe[-1], alone)
        np.testing.assert_array_equal(pipe.predict(X), alone.predict(self.columns().fit_transform(X)))

    def test_names_of_polars_come_through(self, client, table):
        pytest.importorskip("polars")
        X, y = table
        pipe = make_pipeline(self.columns(), flat_est(client, 4)).set_output(transform="polars").fit(X, y)
        assert pipe[-1].feature_names_in_[0] == "number__size"


def images_of_bytes():
    """Images that any numeric dtype holds exactly, and labels."""
    X, y = digits(60, np.float32)
    return X * 16, y


@pytest.fixture(scope="module")
def of_images(session_client):
    return est(session_client).fit(*images_of_bytes())


@pytest.fixture(scope="module")
def of_rows(session_client):
    X, y = images_of_bytes()
    return flat_est(session_client).fit(X.reshape(60, 64), y)


def memory_mapped(X, folder):
    np.save(folder / "X.npy", X)
    return np.load(folder / "X.npy", mmap_mode="r")


def read_only(X, folder):
    X = X.copy()
    X.flags.writeable = False
    return X


ARRAYS = {
    **{
        dtype: lambda X, folder, dtype=dtype: X.astype(dtype)
        for dtype in ("float16", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
    },
    "other byte order": lambda X, folder: X.astype(">f4"),
    "other byte order of doubles": lambda X, folder: X.astype(">f8"),
    "long double": lambda X, folder: X.astype(np.longdouble),
    "objects": lambda X, folder: X.astype(object),
    "nested lists": lambda X, folder: X.tolist(),
    "read-only": read_only,
    "memory-mapped": memory_mapped,
    "fortran order": lambda X, folder: np.asfortranarray(X),
    "reversed rows": lambda X, folder: X[::-1].copy()[::-1],
    "reversed sides": lambda X, folder: X[:, :, ::-1, ::-1].copy()[:, :, ::-1, ::-1],
    "every second row": lambda X, folder: np.repeat(X, 2, axis=0)[::2],
    "transposed": lambda X, folder: np.ascontiguousarray(X.transpose(3, 2, 1, 0)).transpose(3, 2, 1, 0),
    "broadcast channel": lambda X, folder: np.broadcast_to(X[:, 0][:, None], X.shape),
    "tensor": lambda X, folder: torch.as_tensor(X),
    "tensor of doubles": lambda X, folder: torch.as_tensor(X).double(),
    "tensor of bytes": lambda X, folder: torch.as_tensor(X).byte(),
    "tensor of bfloat16": lambda X, folder: torch.as_tensor(X).bfloat16(),
    "tensor with a gradient": lambda X, folder: torch.as_tensor(X).requires_grad_(),
    "tensor of turned memory": lambda X, folder: (
        torch.as_tensor(X).transpose(2, 3).contiguous().transpose(2, 3)
    ),
}


class TestArrays:
    """The same numbers in other clothes give the same net."""

    @pytest.mark.parametrize("kind", ARRAYS)
    def test_any_kind(self, client, tmp_path, of_images, kind):
        X, y = images_of_bytes()
        dressed = ARRAYS[kind](X, tmp_path)
        ours = est(client).fit(dressed, y)
        assert identical(ours, of_images)
        np.testing.assert_array_equal(ours.predict_proba(dressed), of_images.predict_proba(X))
        np.testing.assert_array_equal(ours.predict(dressed), of_images.predict(X))

    @pytest.mark.parametrize("kind", ["reversed sides", "fortran order", "uint8", "read-only"])
    def test_nothing_is_written_into(self, client, tmp_path, kind):
        X, y = images_of_bytes()
        dressed = ARRAYS[kind](X, tmp_path)
        before, labels = dressed.copy(), y.copy()
        est(client).fit(dressed, y).predict(dressed)
        np.testing.assert_array_equal(dressed, before)
        np.testing.assert_array_equal(y, labels)

    def test_bytes_are_numbers_up_to_255(self, client):
        X, y = xy(60, 10)
        pixels = (X * 255).astype(np.uint8)
        ours = est(client, lr=0.001).fit(pixels, y)
        assert identical(ours, est(client, lr=0.001).fit(pixels.astype(np.float32), y))

    def test_booleans(self, client):
        X, y = images_of_bytes()
        ours = est(client).fit(X > 8, y)
        assert identical(ours, est(client).fit((X > 8).astype(np.float32), y))

    def test_doubles_in_a_net_of_doubles(self, client):
        X, y = digits(60)
        X = X / 3
        ours = est(client, module__dtype=torch.float64).fit(X, y)
        assert ours.predict_proba(X).dtype == np.float64
        rounded = X.astype(np.float32).astype(np.float64)
        assert not identical(est(client, module__dtype=torch.float64).fit(rounded, y), ours)


class TestFrames:
    @pytest.fixture
    def data(self):
        X, y = images_of_bytes()
        return X.reshape(60, 64), y

    def frame(self, X, names, **options):
        return pd.DataFrame(X, columns=names, **options)

    @pytest.mark.parametrize("names", [[f"pixel {i}" for i in range(64)], range(64), range(100, 36, -1)])
    @pytest.mark.parametrize("index", [range(60), range(100, 160), np.arange(60)[::-1], [7] * 60])
    def test_rows_are_paired_by_position(self, client, data, of_rows, names, index):
        X, y = data
        frame = self.frame(X, names, index=index)
        ours = flat_est(client).fit(frame, pd.Series(y, index=np.roll(index, 13)))
        assert identical(ours, of_rows)
        np.testing.assert_array_equal(ours.predict_proba(frame), of_rows.predict_proba(X))
        assert hasattr(ours, "feature_names_in_") == isinstance(names, list)

    @pytest.mark.parametrize("dtype", ["float64", "int64", "uint8", "Int64", "Float32", "mixed"])
    def test_columns_of_any_dtype(self, client, data, of_rows, dtype):
        X, y = data
        names = [f"pixel {i}" for i in range(64)]
        dtypes = dict(zip(names, ["int8", "float32", "uint16", "float64"] * 16, strict=True))
        frame = self.frame(X, names).astype(dtypes if dtype == "mixed" else dtype)
        ours = flat_est(client).fit(frame, y)
        assert identical(ours, of_rows)
        np.testing.assert_array_equal(ours.predict_proba(frame), of_rows.predict_proba(X))

    def test_polars(self, client, data, of_rows):
        polars = pytest.importorskip("polars")
        X, y = data
        frame = polars.DataFrame(X, schema=[f"pixel {i}" for i in range(64)])
        ours = flat_est(client).fit(frame, polars.Series(y))
        assert identical(ours, of_rows)
        np.testing.assert_array_equal(ours.predict_proba(frame), of_rows.predict_proba(X))
        assert ours.feature_names_in_[0] == "pixel 0"

    def test_a_frame_of_images_is_reshaped_by_the_module(self, client, data):
        X, y = data
        frame = self.frame(X, [f"pixel {i}" for i in range(64)])
        ours = est(client, Square).fit(frame, y)
        assert identical(ours, est(client).fit(as_images(X), y))


class Square(CNN3):
    def forward(self, X):
        return super().forward(X.reshape(-1, 1, 8, 8))
