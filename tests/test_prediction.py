"""Prediction and its score with a fitted net, without a cluster."""

from __future__ import annotations

import dask.array as da
import numpy as np
import pytest
import torch
from reference import make_net
from torch import nn
from torch.utils.data import TensorDataset

from daskps import DistributedCNNClassifier, _prediction

X = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
CLASSES = np.array(["a", "b", "c"])


class Scaled(nn.Linear):
    def __init__(self, dtype=torch.float32, scale=1.0):
        super().__init__(4, 3, dtype=dtype)
        self.scale = scale

    def forward(self, X):
        return self.scale * super().forward(X)


def net_for(**options):
    torch.manual_seed(0)
    return make_net(Scaled, train_split=None, **options).initialize()


def fitted(net):
    clf = DistributedCNNClassifier(net)
    clf.net_, clf.classes_, clf.n_features_in_ = net, CLASSES, 4
    return clf


def unknown_chunks(values, chunks):
    rows = {0: chunks}
    return da.from_array(values, chunks=rows)[da.ones(len(values), dtype=bool, chunks=chunks)]


def test_empty_chunks_have_no_rows():
    clf = fitted(net_for())
    chunked = da.from_array(X, chunks=((0, 5, 0, 7), (4,)))
    probabilities = clf.predict_proba(chunked)
    assert probabilities.chunks == ((0, 5, 0, 7), (3,))
    np.testing.assert_allclose(probabilities.compute(), clf.predict_proba(X), rtol=1e-6)
    assert probabilities.blocks[0].compute().dtype == np.float32
    assert clf.predict(chunked).compute().tolist() == clf.predict(X).tolist()


def test_output_that_is_no_number_is_called_that(recwarn):
    probabilities = _prediction.probabilities(net_for(module__scale=float("nan")), 3, X)
    assert np.isnan(probabilities).all()
    (warning,) = recwarn
    assert "output is NaN" in str(warning.message)


class TestScore:
    def test_is_the_share_of_right_rows(self):
        clf = fitted(net_for())
        y = clf.predict(X)
        y[:3] = np.where(y[:3] == "a", "b", "a")
        assert clf.score(X, y) == 0.75
        assert clf.score(X, y, sample_weight=[0] * 3 + [1] * 9) == 1

    @pytest.mark.parametrize("cut", [lambda v, n: da.from_array(v, chunks={0: n}), unknown_chunks])
    def test_of_dask_arrays_with_any_chunks(self, cut):
        clf = fitted(net_for())
        y = clf.predict(X)
        assert clf.score(cut(X, 5), y) == 1
        assert clf.score(cut(X, 5), cut(y, 7), cut(np.ones(12), 3)) == 1

    def test_of_a_frame(self):
        dd = pytest.importorskip("dask.dataframe")
        pd = pytest.importorskip("pandas")
        clf = fitted(net_for())
        y = clf.predict(X)
        frame = dd.from_pandas(pd.DataFrame(X), npartitions=3)
        assert clf.score(frame, dd.from_pandas(pd.Series(y), npartitions=2)) == 1

    def test_of_a_dataset_goes_by_its_labels(self):
        clf = fitted(net_for())
        clf.classes_ = np.arange(3)
        y = torch.as_tensor(clf.predict(X))
        assert clf.score(TensorDataset(torch.as_tensor(X), y)) == 1
