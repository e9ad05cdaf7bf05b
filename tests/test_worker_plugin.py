"""What a worker keeps between epochs, on real workers: replicas, and the process as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import CNN3, Built, GatedBoom, read
from probes import leftovers, wait_until
from ranks import RULES
from reference import distance, fit_daskps, fit_plain, make_net, xy
from skorch.callbacks import Callback

from daskps._late import Late
from daskps._launch import open_run
from daskps._partitions import Shard
from daskps._replica import Opening
from daskps._spec import Order, Ticket
from daskps._sync import Alone, GradientSync, LocalSGD
from daskps._transport import NoChannel
from daskps._worker_plugin import make_sync, process_id


@pytest.mark.parametrize(("world_size", "every", "kind"), [
    (1, 0, Alone), (1, None, Alone), (1, 3, Alone),
    (2, 0, GradientSync), (2, None, LocalSGD), (2, 3, LocalSGD),
])  # fmt: skip
def test_the_exchange_is_that_of_sync_every(world_size, every, kind):
    net = make_net(CNN3, module__n=3).initialize()
    opening = Opening(b"", b"", every, b"", b"", RULES)
    assert type(make_sync(net, NoChannel(), Ticket("run", 0, 0, world_size), opening)) is kind


def test_a_replica_is_built_once(client, tmp_path):
    X, y = xy(60, 3)
    log = str(tmp_path / "log")
    net = make_net(Built, module__n=3, module__path=log, max_epochs=4)
    for sync_every in ("batch", "epoch"):
        before = len(read(log)) if sync_every == "epoch" else 0
        fit_daskps(client, net, X, y, n_workers=2, sync_every=sync_every)
        assert len({line["pid"] for line in read(log)[before:]}) == 3
        assert len(read(log)) - before == 3


class Halves(Callback):
    """Changes the parameters between epochs."""

    def on_epoch_end(self, net, **kwargs):
        with torch.no_grad():
            for parameter in net.module_.parameters():
                parameter /= 2


class Slows(Callback):
    """Changes the learning rate between epochs."""

    def on_epoch_begin(self, net, **kwargs):
        net.set_params(optimizer__lr=0.1 / len(net.history))


def test_what_a_callback_changes_between_epochs_reaches_the_ranks(client):
    X, y = xy(120, 3)
    for callback in (Halves(), Slows()):
        net = make_net(CNN3, module__n=3, module__dtype=torch.float64, callbacks=[callback])
        plain = fit_plain(net, X.astype(np.float64), y)
        for k in (1, 2):
            assert distance(fit_daskps(client, net, X, y, n_workers=k), plain) <= 1e-7


def test_no_replica_no_epoch(client, session_client):
    """A replica is a cache: without one of exactly this run and epoch, a rank asks for the state."""
    rows = np.zeros((2, 1, 8, 8), np.float32)
    none = np.empty(0, np.intp)
    shard = Shard(rows, np.zeros(2, np.int64), np.array([2]), rows[:0], none, none)
    with open_run(session_client, 1, 1) as run:
        order = Order(run.ticket(0), epoch=3, first=False, seed=0, shuffle=False, settings=b"")
        task = Late("daskps._tasks", "run_epoch")
        future = session_client.submit(task, order, shard, None, workers=run.addresses, pure=False)
        assert type(future.result(timeout=20)).__name__ == "StateNeeded"


def test_the_process_is_as_it_was(client, session_client):
    """Generators, threads and the allocator of a worker."""
    X, y = xy(120, 3)
    net = make_net(CNN3, module__n=3, module__dropout=0.5, iterator_train__shuffle=True)
    fit_daskps(client, net, X, y, n_workers=4)
    session_client.run(seed_all)
    before = session_client.run(look)
    fit_daskps(client, net, X, y, n_workers=4)
    wait_until(lambda: not any(users for *_, users in session_client.run(look).values()))
    assert session_client.run(look) == before


def seed_all():
    import numpy
    import torch

    numpy.random.seed(5)
    torch.manual_seed(5)


def look():
    import numpy
    import torch

    from daskps import _environment

    states = torch.get_rng_state().sum().item(), int(numpy.random.get_state()[1].sum())
    return *states, torch.get_num_threads(), _environment._users


def test_a_rank_stops_at_the_next_step(client, session_client, tmp_path):
    """One rank raises in local steps, where nobody waits for it: the other one stops nevertheless."""
    X, y = xy(120, 3)
    X[2, 0, 0, 0] = 99  # of rank 0, in its first step
    log, gate = str(tmp_path / "log"), tmp_path / "gate"
    net = make_net(
        GatedBoom, module__n=3, module__path=log, module__gate=str(gate), batch_size=4, train_split=None
    )
    with pytest.raises(ValueError, match="boom"):
        fit_daskps(client, net, X, y, n_workers=2, sync_every="epoch")
    assert any(kind == "held" for _, kind, _ in leftovers(session_client))
    gate.touch()
    wait_until(lambda: not leftovers(session_client))
    assert len(read(log)) == 1


def test_processes_that_were_forked_after_the_import_are_not_the_same(mortals):
    """As the workers of a fork server that has loaded daskps."""
    ids = set(mortals.run(process_id).values())
    assert len(ids) == 3
    assert len({name.split("-")[0] for name in ids}) == 1
