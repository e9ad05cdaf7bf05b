"""The estimator."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from numbers import Integral
from time import perf_counter
from typing import Any

import cloudpickle
import numpy as np
from distributed import Client, span
from sklearn.base import BaseEstimator, ClassifierMixin, clone
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from skorch import NeuralNetClassifier

from daskps import _folds, _hooks, _inputs, _master, _prediction, config
from daskps._claims import claimed
from daskps._cluster import client_for
from daskps._freezing import copied, freeze, thaw
from daskps._inputs import TrainingData
from daskps._late import unpickled
from daskps._launch import open_run
from daskps._preparation import Start, prepare
from daskps._training import Job, Training, fit
from daskps.report import FitReport

_NETS = {"net", "net_"}


class DistributedCNNClassifier(ClassifierMixin, BaseEstimator):
    """Train one neural network on the workers of a Dask cluster.

    The rows are cut into shards, one for each worker. Every worker computes gradients on its own
    rows, a parameter server in the scheduler combines them, and all workers make the same step.

    Parameters
    ----------
    net : skorch.NeuralNetClassifier, optional
        The net to train; `fit` never changes it. Its parameters are nested ones of the estimator:
        ``net__lr``, ``net__module__width``. Without one, a convolutional net is made to fit the data.
    sync_every : {'batch', 'epoch'} or int, default='batch'
        When workers meet. 'batch': at every step, on the combined gradient of a batch that they
        share: the steps of training in one process and, without shuffling, dropout and BatchNorm,
        its parameters up to rounding. 'epoch': every worker makes steps of ``batch_size`` rows on
        its own shard, and parameters are averaged when the epoch ends. An integer H: the same,
        averaged after every H steps.
    n_workers : int, optional
        How many workers train. By default one for every usable worker process.
    client : distributed.Client or str, optional
        A client or the address of a scheduler. By default the current client and, if there is none,
        a private ``LocalCluster`` with a process for every core that this process may use.
    class_weight : None, 'balanced' or dict, default=None
        What the rows of a class count in the training loss, as in scikit-learn.
    on_worker_lost : {'resume', 'raise'}, default='resume'
        What to do when a worker leaves the cluster during a fit. 'resume': the epoch begins again, at
        once, on the workers that are left, with all rows and in the state that it had begun with; a
        replacement joins at the next epoch. 'raise': `fit` raises `WorkerLostError`.
    random_state : int, RandomState instance or None, default=None
        Fixes initial weights, the cut of the data, shuffling and dropout: the same seed and number
        of workers give the same bits. Without it torch's global seed decides.

    Attributes
    ----------
    classes_ : ndarray of shape (n_classes,)
        The labels.
    n_features_in_ : int
        Size of the second axis of X; missing if X was a dict or a ``Dataset``.
    feature_names_in_ : ndarray of shape (n_features,), dtype object
        Names of the columns, if X was a data frame whose columns have strings for names.
    net_ : skorch.NeuralNetClassifier
        The trained net. It works on its own, without a cluster, on labels 0 to n_classes - 1.
    history_ : skorch.history.History
        The net's history.
    report_ : FitReport
        Where the time went.

    Examples
    --------
    >>> from daskps import DistributedCNNClassifier, datasets
    >>> X_train, X_test, y_train, y_test = datasets.load_digits_images()
    >>> clf = DistributedCNNClassifier(random_state=0).fit(X_train, y_train)  # doctest: +SKIP
    >>> clf.score(X_test, y_test) > 0.95  # doctest: +SKIP
    True
    """

    def __init__(
        self,
        net: NeuralNetClassifier | None = None,
        *,
        sync_every: str | int = "batch",
        n_workers: int | None = None,
        client: Client | str | None = None,
        class_weight: dict | str | None = None,
        on_worker_lost: str = "resume",
        random_state: Any = None,
    ) -> None:
        self.net = net
        self.sync_every = sync_every
        self.n_workers = n_workers
        self.client = client
        self.class_weight = class_weight
        self.on_worker_lost = on_worker_lost
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> DistributedCNNClassifier:
        """Train on X and y, from new weights.

        With ``net__warm_start=True`` training goes on from the last fit, or from the state of an
        initialised ``net``.

        Parameters
        ----------
        X : array of shape (n_samples, ...), of any real dtype
            Of numpy, torch or dask, whose chunks stay on the cluster; a data frame of pandas, polars or
            dask; a list of rows; a dict of arrays; or a torch ``Dataset`` of pairs (X, y). Floats, and
            integers unless the module takes them, are converted to the module's own dtype.
        y : array of shape (n_samples,)
            Labels of any kind that scikit-learn takes for classification. Only a ``Dataset`` brings
            its own along.
        sample_weight : array of shape (n_samples,), optional
            What a row counts in the training loss: 2 is as good as having it twice in its batch.
            The validation loss is not weighted.

        Returns
        -------
        DistributedCNNClassifier
            This object.

        Raises
        ------
        ValueError, TypeError
            If an argument is not what it has to be; before any work is sent.
        ClusterTooSmallError
            If fewer than ``n_workers`` came within ``daskps.timeouts.workers``.
        InstallationError
            If daskps is missing, or of another version, on the scheduler or on a worker.
        WorkerLostError
            If a worker left during the fit and ``on_worker_lost='raise'``, or if the same epoch lost
            workers more often than ``distributed.scheduler.allowed-failures``.
        WorkerBusyError, RoundTimeoutError
            If a worker could not begin an epoch within ``daskps.timeouts.start``; if ranks waited for
            another one for longer than ``daskps.timeouts.round``.
        DivergenceError
            If something became NaN or infinite, with ``daskps.on-divergence: raise``.
        DaskpsError
            If the client cannot be used, or the cluster or a callback is in the way.
        Exception
            What a rank raised, with notes that name the rank, its worker, the epoch and the step.
        """
        goes_on = bool(getattr(self.net, "warm_start", False))
        earlier = getattr(self, "net_", self.net) if goes_on else self.net
        initialised = bool(getattr(earlier, "initialized_", False))
        self._fit(self._start(earlier, goes_on and initialised), X, y, None, sample_weight)
        return self

    def partial_fit(
        self, X: Any, y: Any = None, classes: Any = None, sample_weight: Any = None
    ) -> DistributedCNNClassifier:
        """Train for ``max_epochs`` more, from where the last fit ended.

        The first call starts from the state of ``net`` if that is initialised, else from new weights.

        Parameters
        ----------
        X, y, sample_weight
            As in `fit`.
        classes : array of shape (n_classes,), optional
            All labels that will ever come; of the first call. Without it those of its y.

        Returns
        -------
        DistributedCNNClassifier
            This object.

        Raises
        ------
        ValueError
            If y has a label that was not announced, or with ``class_weight='balanced'``; and what `fit`
            raises.
        """
        if isinstance(self.class_weight, str) and self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' is not supported for partial_fit, which sees a part of the rows."
                " Pass a dict of the weights that sklearn.utils.class_weight.compute_class_weight"
                "('balanced', ...) finds for all rows."
            )
        known = getattr(self, "classes_", None)
        if known is not None and classes is not None and not np.array_equal(known, np.unique(classes)):
            raise ValueError(f"classes={classes!r} is not the same as at the first call: {known!r}.")
        earlier = getattr(self, "net_", self.net)
        initialised = bool(getattr(earlier, "initialized_", False))
        start = self._start(earlier, initialised)
        self._fit(start, X, y, classes if known is None else known, sample_weight)
        return self

    def predict(self, X: Any) -> Any:
        """The most probable label of every row.

        Parameters
        ----------
        X : array of shape (n_samples, ...)
            What `fit` takes. A dask array or data frame is predicted where its chunks are.

        Returns
        -------
        ndarray or dask.array.Array of shape (n_samples,)
            Of the dtype of the labels in ``fit``; lazy if X is.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError, TypeError
            If X has another number of features, or values that no net takes.
        RuntimeError
            Whatever the module raises for rows of another shape than those that it was trained on.
        """
        probabilities = self.predict_proba(X)
        if _inputs.is_dask(probabilities):
            return _prediction.lazy_labels(self.net_, probabilities, self.classes_)
        return _prediction.labels(self.net_, probabilities, self.classes_)

    def predict_proba(self, X: Any) -> Any:
        """The probability of every label, whatever the net's criterion.

        Parameters
        ----------
        X : array of shape (n_samples, ...)
            What `fit` takes. A dask array or data frame is predicted where its chunks are.

        Returns
        -------
        ndarray or dask.array.Array of shape (n_samples, n_classes)
            Of the net's dtype, mostly float32. Rows sum to 1; columns are in the order of ``classes_``.
            Lazy if X is.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError, TypeError
            If X has another number of features, or values that no net takes.
        RuntimeError
            Whatever the module raises for rows of another shape than those that it was trained on.
        """
        check_is_fitted(self)
        X = _inputs.check_X(self, X, reset=False)
        if _inputs.is_dask(X):
            return _prediction.lazy_probabilities(self.net_, len(self.classes_), X)
        return _prediction.probabilities(self.net_, len(self.classes_), X)

    def score(self, X: Any, y: Any = None, sample_weight: Any = None) -> float:
        """The accuracy of `predict`. Dask collections are computed, by ``client`` if it is a ``Client``.

        Parameters
        ----------
        X, y
            As in `fit`.
        sample_weight : array of shape (n_samples,), optional
            What a row counts.

        Returns
        -------
        float
            From 0 to 1.

        Raises
        ------
        NotFittedError
            Before `fit`.
        ValueError, TypeError
            If X has another number of features, or values that no net takes, or y does not belong to it.
        RuntimeError
            Whatever the module raises for rows of another shape than those that it was trained on.
        """
        with self.client.as_current() if isinstance(self.client, Client) else nullcontext():
            predicted, y, sample_weight = map(_inputs.local, (self.predict(X), y, sample_weight))
        return float(accuracy_score(_inputs.labels_of(X, y), predicted, sample_weight=sample_weight))

    def _fit(self, start: Start, X: Any, y: Any, classes: Any, sample_weight: Any) -> None:
        """Everything that `fit` and `partial_fit` share."""
        clock = Stopwatch()
        every = steps_between_rounds(self.sync_every)
        _check_n_workers(self.n_workers)
        resume = resumes(self.on_worker_lost)
        with ExitStack() as stack:
            stack.enter_context(_folds.fitting())
            in_span = span("daskps")  # how Dask's dashboard calls a fit
            frames = _inputs.is_frame(X) or _inputs.is_frame(y)
            if not frames:  # in a span they warn that they ignore it
                stack.enter_context(in_span)
            on_cluster = _inputs.is_dask(X) or _inputs.is_dask(y)
            client = stack.enter_context(client_for(self.client)) if on_cluster else None
            data = _inputs.check_fit(self, X, y, classes, sample_weight, client)
            if frames:
                stack.enter_context(in_span)
            job = replace(prepare(start, data, every), resume=resume)
            clock.lap("checks")
            client = client or stack.enter_context(client_for(self.client))
            clock.lap("cluster")
            stack.enter_context(claimed(_hooks.files(job.net), config.seconds("timeouts.files")))
            self._train(client, job, data, clock)

    def _train(self, client: Client, job: Job, data: TrainingData, clock: Stopwatch) -> None:
        most = max(1, len(job.source.dataset_train) // config.count("min-rows-per-rank"))
        with open_run(client, self.n_workers, most) as run:
            clock.lap("lease")
            report = FitReport(run.world_size, self.sync_every, job.batch_size)
            training = Training(job, run, report)
            training.place()
            clock.lap("scatter")
            report.startup_seconds.update(clock.laps)
            fit(training, data.X, data.y)
        self.classes_ = data.classes
        self.net_, self.history_, self.report_ = job.net, job.net.history, report
        self.__dict__.pop("_changes", None)

    def _start(self, net: Any, goes_on: bool) -> Start:
        """From a net, or from its state with what `set_params` has changed since."""
        return Start(net, goes_on, self._seed(), getattr(self, "_changes", {}))

    def _seed(self) -> int | None:
        if self.random_state is None:
            return None
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def set_params(self, **params: Any) -> DistributedCNNClassifier:
        """Set parameters of this estimator, and those of the net as ``net__...``.

        Those of the net are set on ``net`` itself, the object that was passed.

        Parameters
        ----------
        **params : object
            Values by name.

        Returns
        -------
        DistributedCNNClassifier
            This object.

        Raises
        ------
        ValueError
            If a name is wrong, or there is no net.
        """
        names = [name.removeprefix("net__") for name in params if name.startswith("net__")]
        _master.check_names(params.get("net", self.net), names)
        if hasattr(self, "net_"):
            changes = {name: params[f"net__{name}"] for name in names}
            self._changes = {**getattr(self, "_changes", {}), **changes}
        return super().set_params(**params)

    # A client cannot be copied or pickled, and none of this needs it to be.

    def __sklearn_clone__(self) -> DistributedCNNClassifier:
        others = {k: v for k, v in self.get_params(deep=False).items() if k != "client"}
        copied = {name: clone(value, safe=False) for name, value in others.items()}
        new = type(self)(**copied, client=self.client)
        if hasattr(self, "_metadata_request"):
            new._metadata_request = copy.deepcopy(self._metadata_request)
        return new

    def __copy__(self) -> DistributedCNNClassifier:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __deepcopy__(self, memo: dict) -> DistributedCNNClassifier:
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in vars(self).items():
            setattr(new, name, self._copied(name, value, memo))
        if "net_" in vars(new):
            new.history_ = new.net_.history
        return new

    @staticmethod
    def _copied(name: str, value: Any, memo: dict) -> Any:
        if name == "client":
            return value
        return copied(value) if name == "net_" else copy.deepcopy(value, memo)

    def __reduce__(self) -> tuple:
        return unpickled, (cloudpickle.dumps((type(self), self.__getstate__())),)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        if isinstance(self.client, Client):
            state["client"] = self.client.scheduler.address if self.client.scheduler else None
        for name in _NETS & vars(self).keys():
            state[name] = None if state[name] is None else freeze(state[name])
        state.pop("history_", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nets = {k: thaw(v) for k, v in state.items() if k in _NETS and isinstance(v, bytes)}
        super().__setstate__({**state, **nets})
        if "net_" in nets:
            self.history_ = self.net_.history


class Stopwatch:
    """Named stretches of time, in seconds."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        """End the current stretch."""
        now = perf_counter()
        self.laps[name], self._last = now - self._last, now


def steps_between_rounds(sync_every: str | int) -> int | None:
    """Local steps between two averages: 0 in batch mode, None for one average an epoch.

    Raises
    ------
    ValueError
        If ``sync_every`` is not 'batch', 'epoch' or an integer >= 1.
    """
    if isinstance(sync_every, str) and sync_every in ("batch", "epoch"):
        return 0 if sync_every == "batch" else None
    if _is_count(sync_every):
        return int(sync_every)
    raise ValueError(
        "The 'sync_every' parameter must be 'batch', 'epoch' or an integer >= 1, got"
        f" {sync_every!r} instead."
    )


def resumes(on_worker_lost: str) -> bool:
    """Whether a fit goes on after it has lost a worker.

    Raises
    ------
    ValueError
        If ``on_worker_lost`` is neither 'resume' nor 'raise'.
    """
    if isinstance(on_worker_lost, str) and on_worker_lost in ("resume", "raise"):
        return on_worker_lost == "resume"
    raise ValueError(
        f"The 'on_worker_lost' parameter must be 'resume' or 'raise', got {on_worker_lost!r} instead."
    )


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 1


def _check_n_workers(n_workers: Any) -> None:
    if n_workers is not None and not _is_count(n_workers):
        raise ValueError(
            f"The 'n_workers' parameter must be None or an integer >= 1, got {n_workers!r} instead."
        )
