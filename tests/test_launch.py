"""A fit on a cluster: side by side with others, inside tasks, interrupted, refused, and ended."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import dask
import dask.array as da
import joblib
import numpy as np
import pytest
import torch
from conftest import local_cluster
from distributed import Client, SubprocessCluster
from nets import CNN3, Boom, Gated, Leaves, Logged, read
from probes import failures_logged, leftovers, wait_until, workers_of
from reference import identical, make_net, separable, state, xy
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from skorch.callbacks import Callback

import daskps
from daskps import (
    ClusterTooSmallError,
    DaskpsError,
    DistributedCNNClassifier,
    InstallationError,
    WorkerLostError,
    config,
    on_ranks,
)
from daskps._answers import Left
from daskps._launch import Run, open_run
from daskps._sources import scatter
from daskps._spec import HELLO, SCHEDULER_PLUGIN, WORKER_PLUGIN
from daskps._watch import Watch
from daskps.exceptions import RunAbortedError

MODES = ["batch", "epoch"]


def small_net(**options):
    module = options.pop("module", CNN3)
    return make_net(module, **{"module__n": 3, "batch_size": 16, "train_split": None, **options})


def fit_seeded(client, net, X, y, **options):
    return DistributedCNNClassifier(net, client=client, random_state=0, **options).fit(X, y)


# Several fits at once


class Meets(Callback):
    """In each epoch, two fits wait for each other: neither can end before the other has begun."""

    barrier = threading.Barrier(2)

    def on_epoch_begin(self, net, **kwargs):
        self.barrier.wait(timeout=100)


@pytest.mark.parametrize("sync_every", MODES)
def test_two_clients_side_by_side(client, cluster, sync_every):
    """BR-11: each of two fits has its own data, its own parameters and its own number of rows."""
    data = {60: xy(60, 3, seed=0), 90: xy(90, 3, seed=5)}
    settings = {"n_workers": 2, "sync_every": sync_every}
    alone = {n: fit_seeded(client, small_net(), *data[n], **settings) for n in data}

    def fit(n):
        with Client(cluster, set_as_default=False) as own:
            return fit_seeded(own, small_net(callbacks=[("meets", Meets())]), *data[n], **settings)

    with ThreadPoolExecutor(2) as pool:
        together = dict(zip(data, pool.map(fit, data), strict=True))
    for n in data:
        assert identical(together[n], alone[n])
        for row in together[n].history_:
            assert sum(batch["train_batch_size"] for batch in row["batches"]) == n


@pytest.mark.parametrize("sync_every", MODES)
def test_six_threads(client, sync_every):
    """BR-13: more fits than the cluster can hold queue up, and end as they would alone."""
    X, y = xy(60, 3)
    rates = [0.1, 0.05, 0.02, 0.01, 0.005, 0.001]

    def fit(lr):
        settings = {"n_workers": 2, "sync_every": sync_every}
        return fit_seeded(client, small_net(lr=lr, max_epochs=2), X, y, **settings)

    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(fit, rates))
    for lr, fitted in zip(rates, together, strict=True):
        assert fitted.report_.world_size == 2
        assert identical(fitted, fit(lr))


def test_every_worker_in_turn(client):
    """Fits that all want the whole cluster."""
    X, y = xy(80, 4)
    with ThreadPoolExecutor(3) as pool:
        fits = [pool.submit(fit_seeded, client, small_net(module__n=4), X, y) for _ in range(3)]
        fitted = [fit.result() for fit in fits]
    assert [fit.report_.world_size for fit in fitted] == [4, 4, 4]
    assert identical(fitted[0], fitted[1])
    assert identical(fitted[0], fitted[2])


# Inside tasks


def fit_in_a_task(n, lr, **options):
    """Fit with the client that a task has; what came out, as plain values."""
    X, y = xy(n, 3)
    fitted = DistributedCNNClassifier(small_net(lr=lr), random_state=0, **options).fit(X, y)
    return fitted.report_.world_size, {name: value.numpy() for name, value in state(fitted).items()}


def test_inside_a_task(client):
    world_size, values = client.submit(fit_in_a_task, 80, 0.1, pure=False).result(timeout=60)
    assert world_size == 4
    X, y = xy(80, 3)
    expected = fit_seeded(client, small_net(lr=0.1), X, y)
    for name, value in state(expected).items():
        np.testing.assert_array_equal(values[name], value.numpy())


@pytest.mark.parametrize(("sync_every", "n_workers"), [("batch", None), ("epoch", 2)])
def test_six_tasks(client, sync_every, n_workers):
    """BR-13: fits inside tasks wait for each other, and none for a thread that it holds itself."""
    rates = [0.1, 0.05, 0.02, 0.01, 0.005, 0.001]
    settings = {"sync_every": sync_every, "n_workers": n_workers}
    found = client.gather([client.submit(fit_in_a_task, 60, lr, pure=False, **settings) for lr in rates])
    X, y = xy(60, 3)
    for lr, (world_size, values) in zip(rates, found, strict=True):
        expected = fit_seeded(client, small_net(lr=lr), X, y, **settings)
        assert world_size == expected.report_.world_size
        for name, value in state(expected).items():
            np.testing.assert_array_equal(values[name], value.numpy())


def test_inside_a_task_on_the_only_thread(client):
    """The fit needs the very thread that waits for it."""
    with (
        local_cluster(n_workers=1, threads_per_worker=1, processes=False) as cluster,
        Client(cluster, set_as_default=False) as other,
    ):
        futures = [other.submit(fit_in_a_task, 60, 0.1, pure=False) for _ in range(2)]
        found = [future.result(timeout=60) for future in futures]
    assert [world_size for world_size, _ in found] == [1, 1]
    X, y = xy(60, 3)
    expected = fit_seeded(client, small_net(lr=0.1), X, y, n_workers=1)
    np.testing.assert_array_equal(found[0][1]["layers.4.weight"], state(expected)["layers.4.weight"])


# Errors


@pytest.mark.parametrize("sync_every", MODES)
def test_one_rank_raises(client, session_client, sync_every):
    """BR-16: its own type and text, with rank, worker, epoch and step; at once, not in an hour."""
    X, y = xy(90, 3)
    net = make_net(Boom, module__n=3, batch_size=30, train_split=None)
    clean = fit_seeded(client, net, X, y, sync_every=sync_every, n_workers=3)
    # The second piece of the second serial batch, and of every third row the second: rank 1's.
    bad = X.copy()
    bad[40, 0, 0, 0] = 99
    rank, step = (1, 2) if sync_every == "batch" else (1, 1)
    earlier = set(failures_logged(client))
    with pytest.raises(ValueError, match="boom") as caught:
        fit_seeded(client, net, bad, y, sync_every=sync_every, n_workers=3)
    steps = 3 if sync_every == "batch" else 1
    notes = caught.value.__notes__
    assert f"Raised on rank {rank} of 3, epoch 1, step {step} of {steps}." in notes
    named = [note for note in notes if note.startswith("From worker ")]
    assert named[0].removeprefix("From worker ").rstrip(".") in workers(session_client)
    wait_until(lambda: not leftovers(client))
    (failure,) = set(failures_logged(client)) - earlier  # the other ranks only left
    assert "boom" in failure
    assert identical(clean, fit_seeded(client, net, X, y, sync_every=sync_every, n_workers=3))


def workers(client):
    return list(workers_of(client))


def test_ranks_that_left_without_news_are_an_error(client):
    """All of them out, and nobody says why: the fit ends with what they say."""
    with dask.config.set({"daskps.timeouts.close": "10ms"}), open_run(client, 2, 2) as run:
        futures = [client.submit(Left, "gone", pure=False) for _ in range(2)]
        for future in futures:
            future.add_done_callback(lambda done: run.watch.put({"done": done.key}))
        with pytest.raises(RunAbortedError, match="gone"):
            run._collect(futures, print)


def test_all_ranks_raise(client):
    X, y = xy(90, 3)
    X[:, 0, 0, 0] = 99
    net = make_net(Boom, module__n=3, batch_size=30, train_split=None)
    # On the client one row is tried, which must pass.
    X[0, 0, 0, 0] = 0
    with pytest.raises(ValueError, match="boom"):
        fit_seeded(client, net, X, y, n_workers=3)


def test_a_rank_that_would_leave_its_process(client, session_client):
    """The worker lives on, and the error says what happened there."""
    X, y = xy(90, 3)
    before = set(workers(session_client))
    X[40, 0, 0, 0] = 99
    with pytest.raises(DaskpsError, match=r"left by SystemExit\(3\)") as caught:
        fit_seeded(client, small_net(module=Leaves), X, y, n_workers=2)
    assert any(note.startswith("Raised on rank") for note in caught.value.__notes__)
    assert set(workers(session_client)) == before


class FailsAtTheBeginning(Callback):
    def on_epoch_begin(self, net, **kwargs):
        raise ValueError("boom")


def test_a_rank_that_raises_before_its_first_step(client):
    X, y = xy(90, 3)
    net = small_net(callbacks=[("c", on_ranks(FailsAtTheBeginning()))])
    with pytest.raises(ValueError, match="boom") as caught:
        fit_seeded(client, net, X, y, n_workers=1)
    assert "Raised on rank 0 of 1, epoch 1, before the first step." in caught.value.__notes__


@pytest.mark.parametrize("send", [
    lambda watch, address: scatter(watch, "shard", [np.ones(3)], [address]),
    lambda watch, address: Run(watch, watch, "run", [address], config.rules())._send(b"state"),
], ids=["rows", "state"])  # fmt: skip
@pytest.mark.parametrize(("direct", "operation"), [(False, "scatter"), (True, "update_data")])
def test_what_is_cut_off_on_its_way_is_not_left_on_the_cluster(
    client, cluster, monkeypatch, send, direct, operation
):
    """The scheduler places values although nobody waits for them any more."""
    events, cut, placed = queue.SimpleQueue(), threading.Event(), threading.Event()
    lost = {"lost": "worker left", "worker": "tcp://a", "run_id": "run", "round": 0, "allowed_failures": 0}
    place = cluster.scheduler.handlers[operation]

    async def slow(*args, **kwargs):
        events.put(lost)
        await asyncio.to_thread(cut.wait, 20)
        result = place(*args, **kwargs)
        result = await result if asyncio.iscoroutine(result) else result
        placed.set()
        return result

    before = leftovers(client)
    monkeypatch.setitem(cluster.scheduler.handlers, operation, slow)
    with Client(cluster, set_as_default=False, direct_to_workers=direct) as user:
        with pytest.raises(WorkerLostError):
            send(Watch(user, events), workers(client)[0])
        cut.set()
        wait_until(placed.is_set)
        wait_until(lambda: leftovers(client) <= before, what=lambda: f"left: {leftovers(client) - before}")


class Interrupts(Callback):
    """Ctrl-C, in the middle of an epoch."""

    def __init__(self, epoch, batch=2):
        self.epoch = epoch
        self.batch = batch

    def on_batch_end(self, net, training=False, **kwargs):
        row = net.history[-1]
        if training and row["epoch"] == self.epoch and len(row["batches"]) == self.batch:
            raise KeyboardInterrupt


@pytest.mark.parametrize("sync_every", MODES)
def test_interrupt_keeps_the_last_whole_epoch(client, sync_every):
    X, y = xy(120, 3)
    settings = {"sync_every": sync_every, "n_workers": 2}
    net = small_net(max_epochs=5, callbacks=[("interrupts", Interrupts(3))])
    ours = fit_seeded(client, net, X, y, **settings)
    expected = fit_seeded(client, small_net(max_epochs=2), X, y, **settings)
    assert len(ours.history_) == 2
    assert identical(ours, expected)
    assert "train_loss" in ours.history_[-1]


def test_interrupt_while_the_ranks_train(client, tmp_path):
    """Reports come while an epoch runs: the ranks stop before its end."""
    X, y = xy(400, 3)
    log = str(tmp_path / "log")
    net = make_net(
        Logged, module__n=3, module__path=log, batch_size=4, max_epochs=1000, train_split=None,
        callbacks=[("interrupts", Interrupts(1, batch=1))],
    )  # fmt: skip
    with dask.config.set({"daskps.report-interval": "1ms"}):
        ours = fit_seeded(client, net, X, y, n_workers=2)
    assert len(ours.history_) == 0
    assert len(read(log)) <= 2 * 100
    torch.manual_seed(0)


@pytest.fixture
def heeds_ctrl_c():
    """A shell without job control lets what it starts in the background ignore the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c(client, tmp_path):
    """The signal itself, while the client waits for its ranks."""
    X, y = xy(120, 3)
    log, gate = tmp_path / "log", tmp_path / "gate"
    net = small_net(module=Gated, module__path=str(log), module__gate=str(gate))

    def interrupt():
        wait_until(log.exists)
        os.kill(os.getpid(), signal.SIGINT)
        gate.touch()

    with ThreadPoolExecutor(1) as pool:
        interrupting = pool.submit(interrupt)
        ours = fit_seeded(client, net, X, y, n_workers=2)
        interrupting.result()
    assert len(ours.history_) == 0
    assert len(read(log)) < 2 * 3 * 8


class Raises(Callback):
    def on_epoch_end(self, net, **kwargs):
        raise LookupError("my own")


def test_a_callback_raises(client):
    """The run ends, and the error is the callback's."""
    X, y = xy(120, 3)
    with pytest.raises(LookupError, match="my own"):
        fit_seeded(client, small_net(callbacks=[Raises()]), X, y)


def test_a_net_that_changes_in_a_replay_is_an_error(client):
    """A change that no rank would know of."""

    class Clamps(Callback):
        def on_batch_end(self, net, **kwargs):
            for parameter in net.module_.parameters():
                parameter.data.clamp_(-0.01, 0.01)

    X, y = xy(120, 3)
    with pytest.raises(daskps.DaskpsError, match="on_batch_end"):
        fit_seeded(client, small_net(callbacks=[Clamps()]), X, y, n_workers=2)


# Which workers


def on_some(client, resource, addresses, value):
    async def set_resource(dask_worker):
        await dask_worker.set_resources(**{resource: value})

    client.run(set_resource, workers=addresses)


def test_annotated_workers(client, session_client, tmp_path):
    X, y = xy(120, 3)
    some = sorted(workers(session_client))[1:3]
    pids = session_client.run(pid, workers=some)
    log = str(tmp_path / "log")
    net = make_net(Logged, module__n=3, module__path=log, train_split=None)
    for allowed in (some, tuple(some), some[0]):
        with dask.annotate(workers=allowed):
            ours = fit_seeded(client, net, X, y)
        assert ours.report_.world_size == (1 if allowed is some[0] else 2)
    assert {line["pid"] for line in read(log)} == set(pids.values())


def pid():
    return os.getpid()


def test_annotated_resources(client, session_client):
    X, y = xy(120, 3)
    some = sorted(workers(session_client))[2:]
    on_some(session_client, "SHELF", some, 2)
    try:
        with dask.annotate(resources={"SHELF": 1}), open_run(session_client, None, 8) as run:
            assert sorted(run.addresses) == some
        with dask.annotate(resources={"SHELF": 1}):
            ours = fit_seeded(client, small_net(), X, y)
        assert ours.report_.world_size == 2
        assert not any(session_client.run_on_scheduler(used_resources, "SHELF"))
    finally:
        on_some(session_client, "SHELF", some, 0)


def used_resources(name, dask_scheduler):
    return [ws.used_resources.get(name, 0) for ws in dask_scheduler.workers.values()]


def test_annotated_priority_and_retries(client):
    """Annotations that a rank must not have, or has already, do not get in the way."""
    X, y = xy(120, 3)
    with dask.annotate(priority=-5, retries=3, allow_other_workers=True):
        ours = fit_seeded(client, small_net(), X, y, n_workers=2)
    assert identical(ours, fit_seeded(client, small_net(), X, y, n_workers=2))


# How a run ends


def test_a_client_that_closes_frees_its_workers(client, cluster, session_client):
    gone = Client(cluster, set_as_default=False)
    with open_run(gone, 4, 4) as run:
        assert len(run.addresses) == 4
        gone.close()
        with open_run(session_client, 4, 4) as after:
            assert len(after.addresses) == 4


@pytest.mark.parametrize("hook", ["on_epoch_end", "on_batch_end"])
def test_a_client_that_closes_in_the_middle_of_a_fit(client, cluster, hook):
    """Its ranks leave, and the fit ends with an error instead of never."""
    gone = Client(cluster, set_as_default=False)
    closing = []

    def close(self, net, **kwargs):
        if not closing:
            closing.append(gone.close())

    callback = type("Closes", (Callback,), {hook: close})()
    X, y = xy(120, 3)
    with pytest.raises(DaskpsError, match="the client lost its scheduler, it is 'closed' now"):
        fit_seeded(gone, small_net(callbacks=[callback]), X, y)
    assert fit_seeded(client, small_net(), X, y).report_.world_size == 4


def test_a_request_that_is_taken_back(client, session_client, cluster):
    """Whoever waits for workers can give up; the next in the queue gets them."""
    other = Client(cluster, set_as_default=False)
    errors = []

    def wait_in_vain():
        try:
            with open_run(other, 4, 4):
                pass
        except Exception as error:
            errors.append(error)

    with open_run(session_client, 4, 4):
        waiting = threading.Thread(target=wait_in_vain)
        waiting.start()
        wait_until(lambda: any(kind == "waiting" for _, kind, _ in leftovers(session_client)))
        other.close()
        waiting.join(20)
        assert not waiting.is_alive()
    assert errors
    with open_run(session_client, 4, 4) as run:
        assert len(run.addresses) == 4


# Versions


def test_worker_of_another_version(client, session_client):
    """The worker is named, and how to repair it."""
    X, y = xy(120, 3)
    fit_seeded(client, small_net(max_epochs=1), X, y)
    old = sorted(workers(session_client))[0]
    session_client.run(say_hello, "0.0.1", workers=[old])
    try:
        with pytest.raises(InstallationError) as caught:
            fit_seeded(client, small_net(max_epochs=1), X, y)
        for part in (old, "0.0.1", daskps.__version__, "install"):
            assert part in str(caught.value)
    finally:
        session_client.run(say_hello, daskps.__version__, workers=[old])
    assert fit_seeded(client, small_net(max_epochs=1), X, y).report_.world_size == 4


async def say_hello(version, dask_worker):
    from daskps._worker_plugin import process_id

    dask_worker.batched_send({"op": HELLO, "process": process_id(), "version": version})


# A scheduler of its own


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    """A scheduler and two workers, all processes of their own, on ports that the system chooses."""
    folder = str(tmp_path_factory.mktemp("subprocesses"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
        with (
            SubprocessCluster(
                n_workers=2,
                threads_per_worker=1,
                dashboard_address=":0",
                worker_class="distributed.Worker",
                worker_kwargs={"local_directory": folder},
            ) as cluster,
            Client(cluster, set_as_default=False) as client,
        ):
            client.wait_for_workers(2, timeout=60)
            yield client


def test_the_scheduler_imports_neither_torch_nor_skorch(two_workers):
    """Nor while it unpickles the graphs of fits and predictions on dask arrays."""
    X, y = separable(120, 3)
    chunked = da.from_array(X, chunks=(50, 1, 8, 8))
    net = small_net(max_epochs=1)
    for sync_every in MODES:
        for rows, given in ((X, net), (chunked, net), (chunked, None)):
            ours = fit_seeded(two_workers, given, rows, y, sync_every=sync_every)
            assert ours.report_.world_size == 2
            assert ours.report_.ranks[0].rounds > 0
    with two_workers.as_current():
        np.testing.assert_array_equal(np.asarray(ours.predict(chunked)), ours.predict(X))
    loaded = two_workers.run_on_scheduler(lambda: sorted(__import__("sys").modules))
    assert "daskps._scheduler_plugin" in loaded
    assert not {"torch", "skorch", "sklearn"} & set(loaded)


def test_the_scheduler_does_not_import_torch_for_estimators_in_tasks(two_workers):
    """Which travel through it in joblib's tasks; scikit-learn it does import for these."""
    X, y = separable(120, 3)
    estimator = DistributedCNNClassifier(small_net(max_epochs=1), n_workers=1, random_state=0)
    # A function of this module would bring torch along by itself.
    task = two_workers.submit(lambda clf, X, y: clf.fit(X, y).predict(X), estimator, X, y, pure=False)
    found = task.result(timeout=60)
    np.testing.assert_array_equal(
        found, clone(estimator).set_params(client=two_workers).fit(X, y).predict(X)
    )
    with joblib.parallel_config("dask", client=two_workers):
        search = GridSearchCV(
            make_pipeline(FunctionTransformer(), estimator),
            {"distributedcnnclassifier__net__lr": [0.01, 0.02]},
            cv=2,
            refit=False,
            error_score="raise",
        ).fit(X, y)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    loaded = two_workers.run_on_scheduler(lambda: sorted(__import__("sys").modules))
    assert "sklearn" in loaded
    assert not {"torch", "skorch", "daskps.classifier"}.intersection(loaded)


def test_the_scheduler_is_of_another_version(two_workers, monkeypatch):
    X, y = xy(120, 3)
    version = daskps.__version__
    monkeypatch.setattr(daskps, "__version__", "9.9.9")
    with pytest.raises(InstallationError) as caught:
        fit_seeded(two_workers, small_net(), X, y)
    for part in ("scheduler", version, "9.9.9", "install"):
        assert part in str(caught.value)
    monkeypatch.undo()
    assert fit_seeded(two_workers, small_net(), X, y).report_.world_size == 2


def test_the_clients_patience_counts(two_workers):
    """The setting is the client's, who waits, wherever the scheduler runs."""
    X, y = xy(120, 3)
    with (
        dask.config.set({"daskps.timeouts.workers": "200ms"}),
        pytest.raises(ClusterTooSmallError) as caught,
    ):
        fit_seeded(two_workers, small_net(), X, y, n_workers=3)
    assert "daskps.timeouts.workers (0.2 s)" in str(caught.value)


def test_the_scheduler_keeps_nothing(two_workers):
    X, y = xy(120, 3)
    fit_seeded(two_workers, small_net(), X, y)

    def rest(dask_scheduler):
        plugin = dask_scheduler.plugins[SCHEDULER_PLUGIN]
        return len(plugin.runs) + len(plugin.leaving.awaited) + len(plugin.lender.leases.held())

    def seats(dask_worker):
        return len(dask_worker.plugins[WORKER_PLUGIN].seats)

    wait_until(lambda: two_workers.run_on_scheduler(rest) == 0)
    wait_until(lambda: not any(two_workers.run(seats).values()))


def test_when_a_fit_returns_the_scheduler_has_let_go_of_its_keys(client):
    """Not a moment later: a cluster may be closed in the next line."""

    def ours(dask_scheduler):
        return [key for key in dask_scheduler.tasks if "daskps" in str(key)]

    X, y = xy(40, 3)
    for _ in range(10):
        net = make_net(CNN3, module__n=3, max_epochs=1, train_split=None)
        DistributedCNNClassifier(net, client=client, n_workers=2).fit(X, y)
        assert client.run_on_scheduler(ours) == []
