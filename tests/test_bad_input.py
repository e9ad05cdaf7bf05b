"""Bad input: one clear error on the client, before any work is sent."""

from __future__ import annotations

import threading

import dask
import numpy as np
import pytest
import torch
from nets import CNN3, Normed
from reference import identical, make_net, xy
from sklearn.exceptions import DataConversionWarning
from sklearn.linear_model import LogisticRegression
from skorch import NeuralNetRegressor
from skorch.callbacks import Callback

from daskps import ClusterTooSmallError, DistributedCNNClassifier


@pytest.fixture
def refused(client, cluster):
    """Fit, which must raise before the scheduler hears of it; what was raised."""

    def refused(error, *, X=None, y=None, net=None, params=(), **options):
        if X is None:
            X = xy(60, 3)[0]
        if y is None:
            y = np.arange(len(X)) % 3
        before = cluster.scheduler.transition_counter
        net = net or make_net(CNN3, module__n=3)
        estimator = DistributedCNNClassifier(net, client=client, **options)
        with pytest.raises(error) as caught:
            estimator.set_params(**dict(params)).fit(X, y)
        assert cluster.scheduler.transition_counter == before
        return str(caught.value)

    return refused


def says(message, *parts):
    for part in parts:
        assert part in message
    return True


# X and y


def test_no_rows(refused):
    message = refused(ValueError, X=np.empty((0, 1, 8, 8), np.float32))
    assert says(message, "0 sample(s)", "minimum of 1 is required")


def test_different_lengths(refused):
    message = refused(ValueError, y=np.arange(59) % 3)
    assert says(message, "inconsistent numbers of samples", "60", "59")


@pytest.mark.parametrize(("value", "name"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
def test_values_that_are_not_finite(refused, value, name):
    X, _ = xy(60, 3)
    X[17, 0, 3, 3] = value
    assert says(refused(ValueError, X=X), "X contains", name)
    assert says(refused(ValueError, X=torch.as_tensor(X)), "X contains", name)


def test_one_class(refused):
    message = refused(ValueError, y=np.full(60, 7))
    assert says(message, "at least 2 classes", "only one class", "7")


def test_no_labels(client, cluster):
    before = cluster.scheduler.transition_counter
    with pytest.raises(ValueError, match="requires y to be passed, but the target y is None"):
        DistributedCNNClassifier(make_net(CNN3), client=client).fit(xy(60, 3)[0], None)
    assert cluster.scheduler.transition_counter == before


def test_one_hot_labels(refused):
    """BR-19: with the shape that y has."""
    assert says(refused(ValueError, y=np.eye(3)[np.arange(60) % 3]), "(60, 3)", "1d")


def test_labels_that_are_no_classes(refused):
    assert says(refused(ValueError, y=np.linspace(0, 1, 60)), "Unknown label type: continuous")


@pytest.mark.parametrize("kind", [str, object], ids=["str", "object"])
def test_strings(refused, kind):
    """BR-17: with the dtype."""
    X = np.full((60, 1, 8, 8), "a", dtype=kind)
    assert says(refused(ValueError, X=X), f"{X.dtype}", "numbers")


def test_complex_numbers(refused):
    assert says(refused(ValueError, X=np.ones((60, 1, 8, 8), complex)), "Complex data not supported")


@pytest.mark.parametrize("shape", [(60, 8, 8, 1), (60, 8, 8, 3), (60, 8, 8), (60, 64)], ids=str)
def test_images_of_another_layout(refused, shape):
    """BR-55: channels last, or no channels: with the shape that came."""
    message = refused(ValueError, X=np.random.RandomState(0).rand(*shape).astype(np.float32))
    assert says(message, f"cannot take rows of X, of shape {shape[1:]}", "float32")


def test_a_column_of_labels(client):
    """BR-19: labels in a column are labels."""
    X, y = xy(60, 3)
    net = make_net(CNN3, module__n=3, max_epochs=1)
    settings = {"client": client, "random_state": 0}
    with pytest.warns(DataConversionWarning):
        column = DistributedCNNClassifier(net, **settings).fit(X, y.reshape(-1, 1))
    assert identical(column, DistributedCNNClassifier(net, **settings).fit(X, y))


# Parameters of the estimator


@pytest.mark.parametrize(
    "given", [0, -1, 1.5, "step", True, False, None, [1], np.ones(2), np.nan], ids=repr
)
def test_sync_every(refused, given):
    message = refused(ValueError, sync_every=given)
    assert says(message, "'sync_every'", "'batch', 'epoch' or an integer >= 1", repr(given))


@pytest.mark.parametrize("given", ["Resume", "", None, True, ["raise"]])
def test_on_worker_lost(refused, given):
    message = refused(ValueError, on_worker_lost=given)
    assert says(message, "'on_worker_lost'", "'resume' or 'raise'", repr(given))


@pytest.mark.parametrize("given", [0, -2, 1.5, "two", True], ids=repr)
def test_n_workers(refused, given):
    message = refused(ValueError, n_workers=given)
    assert says(message, "'n_workers'", "None or an integer >= 1", repr(given))


def test_more_workers_than_came(client):
    """Nothing but a placeholder waits on the cluster meanwhile, so that an adaptive one would grow."""
    estimator = DistributedCNNClassifier(make_net(CNN3, module__n=3), n_workers=5, client=client)
    with (
        dask.config.set({"daskps.timeouts.workers": "1s"}),
        pytest.raises(ClusterTooSmallError) as caught,
    ):
        estimator.fit(*xy(200, 3))
    assert says(str(caught.value), "n_workers=5", "4 usable", "daskps.timeouts.workers (1 s)")


def test_numpy_integers_are_integers(client):
    X, y = xy(60, 3)
    net = make_net(CNN3, module__n=3, max_epochs=1)
    settings = {"sync_every": np.int64(2), "n_workers": np.int32(2), "client": client}
    assert DistributedCNNClassifier(net, **settings).fit(X, y).report_.world_size == 2


@pytest.mark.parametrize(
    "net",
    [LogisticRegression(), NeuralNetRegressor(CNN3), CNN3, CNN3(), "net", type(make_net(CNN3))],
    ids=["LogisticRegression", "NeuralNetRegressor", "module class", "module", "str", "net class"],
)
def test_net_is_no_classifier(refused, net):
    message = refused(TypeError, net=net)
    assert says(message, "'net'", "NeuralNetClassifier", repr(net)[:15])


# What the net holds


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"optimizr__momentum": 0.9}, "optimizr__momentum"),
        ({"optimizer__momentm": 0.9}, "momentm"),
        ({"module__nn": 2}, "nn"),
        ({"criterion__wight": 2}, "wight"),
        ({"iterator_train_shuffle": True}, "iterator_train_shuffle"),
        ({"iterator_train__shufle": True}, "shufle"),
        ({"iterator_valid__shufle": True}, "shufle"),
        ({"dataset__lenght": 3}, "lenght"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_parameter_of_the_net(refused, options, name):
    """BR-34: misspelt, in the net's constructor or by set_params."""
    settings = {"module__n": 3} if "module__nn" not in options else {}
    assert name in refused((TypeError, ValueError), net=make_net(CNN3, **settings, **options))
    params = {f"net__{key}": value for key, value in options.items()}
    assert name in refused((TypeError, ValueError), net=make_net(CNN3, **settings), params=params)


def test_unknown_parameter_of_the_estimator():
    with pytest.raises(TypeError, match="sync_evry"):
        DistributedCNNClassifier(sync_evry="batch")
    with pytest.raises(ValueError, match="sync_evry"):
        DistributedCNNClassifier().set_params(sync_evry="batch")
    with pytest.raises(ValueError, match="lrr"):
        DistributedCNNClassifier(make_net(CNN3)).set_params(net__lrr=1)


def test_fewer_outputs_than_classes(refused):
    message = refused(ValueError, net=make_net(CNN3, module__n=2))
    assert says(message, "2 outputs", "3 classes")


def test_module_that_cannot_take_the_rows(refused):
    message = refused(ValueError, net=make_net(Normed, module__n_in=63))
    assert says(message, "(1, 8, 8)", "float32", "shapes cannot be multiplied")


class HoldsLock(Callback):
    """Cannot be cloned: a lock cannot be copied."""

    def __init__(self, lock=None):
        self.lock = threading.Lock()


class HoldsState(Callback):
    """Cannot be cloned: what the constructor gets is not what it keeps."""

    def __init__(self, names=()):
        self.names = list(names)


@pytest.mark.parametrize("callback", [HoldsLock(), HoldsState()], ids=["lock", "changed"])
def test_callback_that_cannot_be_cloned(refused, callback):
    """BR-31: named, before any epoch."""
    for callbacks in ([("mine", callback)], [callback]):
        net = make_net(CNN3, module__n=3, callbacks=callbacks)
        message = refused(TypeError, net=net)
        assert says(message, type(callback).__name__, "cannot be cloned")
    assert "'mine'" in refused(TypeError, net=make_net(CNN3, module__n=3, callbacks=[("mine", callback)]))


def test_no_step(refused):
    net = make_net(CNN3, module__n=3, iterator_train__drop_last=True, batch_size=64, train_split=None)
    message = refused(ValueError, net=net)
    assert says(message, "60 training rows", "64", "drop_last=True", "no step")


def test_too_few_rows_for_the_validation_split(refused):
    """BR-07"""
    message = refused(ValueError, X=xy(4, 3)[0], y=[0, 0, 1, 1])
    assert says(message, "n_samples=4", "train_split=", "ValidSplit")


@pytest.mark.parametrize("option", ["sampler", "batch_sampler"])
def test_samplers(refused, option):
    net = make_net(CNN3, module__n=3, **{f"iterator_train__{option}": [[0, 1]]})
    assert says(refused(ValueError, net=net), f"iterator_train__{option}", "not possible")


def test_loader_processes(refused):
    """BR-46: Dask's workers may not have children."""
    net = make_net(CNN3, module__n=3, iterator_train__num_workers=2)
    assert says(refused(ValueError, net=net), "iterator_train__num_workers=2", "Set it to 0")


@pytest.mark.parametrize("size", [0, -2, 1.5, "32", None], ids=repr)
def test_batch_size(refused, size):
    message = refused((ValueError, TypeError), net=make_net(CNN3, module__n=3, batch_size=size))
    assert says(message, "batch_size", repr(size))


def test_own_loop(refused):
    net_class = type("Mine", (type(make_net(CNN3)),), {"fit_loop": lambda self, X, y=None: self})
    message = refused(TypeError, net=make_net(CNN3, module__n=3, net_class=net_class))
    assert says(message, "Mine", "fit_loop")
