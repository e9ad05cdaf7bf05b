"""The roads that values take on a real cluster, whose scheduler lives in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from pathlib import Path

import dask
import numpy as np
import pytest
import torch
from conftest import local_cluster
from distributed import Client, Security
from distributed.comm import get_address_host_port
from nets import CNN3, Boom, Stalled
from probes import wait_until
from ranks import fds, new_fds, round_threads
from reference import (
    ADAM,
    MOMENTUM,
    digits,
    distance,
    fit_daskps,
    fit_plain,
    identical,
    make_net,
    separable,
)

import daskps
from daskps import DistributedCNNClassifier, _joining, _sharedmemory, cli
from daskps._cluster import client_for
from daskps.exceptions import RoundTimeoutError

MODES = ["batch", "epoch", 2]
NOISY = {"module__dropout": 0.5, "iterator_train__shuffle": True, "max_epochs": 2}
MESSAGES = "comm (messages)"


def cannot_be_taken(comm):
    return False


@pytest.fixture
def messages(monkeypatch):
    """Dask goes on reading and writing the ranks' connections."""
    monkeypatch.setattr(_joining, "can_be_taken", cannot_be_taken)


@pytest.fixture(params=["auto", "comm", MESSAGES])
def transport(request):
    """One road after the other."""
    if request.param == MESSAGES:
        request.getfixturevalue("messages")
    with dask.config.set({"daskps.transport": request.param.split()[0]}):
        yield request.param


def fit(client, net, X, y, transport=None, **options):
    chosen = {} if transport is None else {"daskps.transport": transport}
    options = {"random_state": 7, "n_workers": 3, **options}
    with dask.config.set(chosen):
        return DistributedCNNClassifier(net, client=client, **options).fit(X, y)


def roads(fitted):
    """The road of every rank, which is the same in every epoch."""
    taken = {}
    for entry in fitted.report_.ranks:
        assert taken.setdefault(entry.rank, entry.transport) == entry.transport
    return [taken[rank] for rank in sorted(taken)]


# The same bits, whichever road


@pytest.mark.parametrize("sync_every", MODES)
def test_all_roads_give_the_same_bits(client, sync_every, monkeypatch):
    X, y = digits(403, np.float32)
    net = make_net(CNN3, **NOISY, **ADAM)
    shared = fit(client, net, X, y, "auto", sync_every=sync_every)
    comm = fit(client, net, X, y, "comm", sync_every=sync_every)
    monkeypatch.setattr(_joining, "can_be_taken", cannot_be_taken)
    messages = fit(client, net, X, y, "comm", sync_every=sync_every)
    assert roads(shared) == ["shared-memory"] * 3
    assert roads(comm) == ["comm"] * 3
    assert roads(messages) == [MESSAGES] * 3
    for other in (comm, messages):
        assert identical(shared, other)
        assert shared.history_[:, "train_loss"] == other.history_[:, "train_loss"]
        assert shared.history_[:, "valid_loss"] == other.history_[:, "valid_loss"]
        for ours, theirs in zip(shared.report_.ranks, other.report_.ranks, strict=True):
            assert (ours.rounds, ours.bytes) == (theirs.rounds, theirs.bytes)
    another = fit(client, net, X, y, "comm", sync_every=sync_every, random_state=8)
    assert distance(shared, another) > 1e-3


def test_ranks_of_one_run_may_take_different_roads(client, monkeypatch):
    """One rank gets memory, one a socket, and one neither."""
    X, y = digits(203, np.float32)
    net = make_net(CNN3, **NOISY)
    expected = fit(client, net, X, y)
    one_by_one, original = asyncio.Lock(), _joining.join

    async def join(comm, rounds, rank, shared_memory, timeout):
        async with one_by_one:
            with monkeypatch.context() as patch:
                if rank == 2:
                    patch.setattr(_joining, "can_be_taken", cannot_be_taken)
                return await original(comm, rounds, rank, shared_memory and rank == 0, timeout)

    monkeypatch.setattr(_joining, "join", join)
    mixed = fit(client, net, X, y)
    assert roads(mixed) == ["shared-memory", "comm", MESSAGES]
    assert identical(mixed, expected)


def test_without_memory_to_share_ranks_take_the_other_road(client, monkeypatch):
    def reserve(n_bytes):
        raise OSError("there is no memory")

    X, y = digits(203, np.float32)
    net = make_net(CNN3, **NOISY)
    expected = fit(client, net, X, y, "auto")
    monkeypatch.setattr(_sharedmemory, "reserve", reserve)
    other = fit(client, net, X, y, "auto")
    assert roads(expected) == ["shared-memory"] * 3
    assert roads(other) == ["comm"] * 3
    assert identical(other, expected)


def test_setting_is_that_of_the_client_and_must_exist(client):
    X, y = separable(60, 3)
    with pytest.raises(ValueError, match=r"daskps\.transport must be one of .*, got 'tcp' instead"):
        fit(client, make_net(CNN3, module__n=3), X, y, "tcp")
    assert roads(fit(client, make_net(CNN3, module__n=3), X, y, "shared-memory")) == ["shared-memory"] * 3


def test_one_rank_exchanges_nothing(client):
    X, y = separable(60, 3)
    alone = fit(client, make_net(CNN3, module__n=3), X, y, n_workers=1)
    assert roads(alone) == ["none"]
    assert {(entry.rounds, entry.bytes) for entry in alone.report_.ranks} == {(0, 0)}


# Other clusters


@pytest.fixture(scope="module")
def tls_client():
    pytest.importorskip("cryptography")
    security = Security.temporary()
    with (
        local_cluster(n_workers=2, processes=True, security=security) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        yield client


def test_on_tls_all_roads_give_the_bits_of_a_cluster_without(client, tls_client, monkeypatch):
    X, y = digits(203, np.float32)
    net = make_net(CNN3, **NOISY)
    expected = fit(client, net, X, y, n_workers=2)
    shared = fit(tls_client, net, X, y, "auto", n_workers=2)
    comm = fit(tls_client, net, X, y, "comm", n_workers=2)
    monkeypatch.setattr(_joining, "can_be_taken", cannot_be_taken)
    messages = fit(tls_client, net, X, y, "comm", n_workers=2)
    found = [roads(fitted) for fitted in (shared, comm, messages)]
    assert found == [["shared-memory"] * 2, ["comm"] * 2, [MESSAGES] * 2]
    assert all(identical(fitted, expected) for fitted in (shared, comm, messages))


def heard_by_a_stranger(address, context=None):
    """What the scheduler says first to somebody who connects and says something."""
    host, port = get_address_host_port(address)
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_connection((host, port), timeout=20))
        if context is not None:
            sock = stack.enter_context(context.wrap_socket(sock))
        sock.sendall(b"0" * 100)
        return sock.recv(1000)


def context_without_checks(security=None, folder=None):
    """Of a stranger who does not care whom it talks to, with certificates of its own or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if security is not None:
        (folder / "cert").write_text(security.tls_client_cert)
        (folder / "key").write_text(security.tls_client_key)
        context.load_cert_chain(folder / "cert", folder / "key")
    return context


def test_on_tls_a_stranger_gets_nothing(client, tls_client, tmp_path):
    """Without a certificate of this cluster's; who has one hears Dask's greeting, as all do without TLS."""
    address = tls_client.scheduler.address
    own = context_without_checks(tls_client.security, tmp_path)
    assert heard_by_a_stranger(client.scheduler.address) != b""
    assert heard_by_a_stranger(address, own) != b""
    strangers = [context_without_checks(), context_without_checks(Security.temporary(), tmp_path)]
    for context in strangers:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            heard_by_a_stranger(address, context)
    with contextlib.suppress(ConnectionError):
        plain = heard_by_a_stranger(address)
        assert plain == b"" or (plain.startswith(b"\x15\x03") and len(plain) == 7)  # an alert of TLS


def by_what(report):
    return {finding.what: finding.found for finding in report.findings}


def test_on_tls_a_check_says_so(tls_client):
    report = daskps.check(tls_client)
    found = by_what(report)
    assert {finding.what for finding in report.findings if finding.bad} <= {"threads"}, report
    assert found["encryption"].startswith("TLS")
    assert found["transport"].startswith("tls://")
    assert "shared-memory" in found["transport"]


def test_on_tls_the_command_that_checks_has_its_certificates_from_dask(tls_client, capsys):
    security, tls = tls_client.security, "distributed.comm.tls"
    address = tls_client.scheduler.address
    named = {
        f"{tls}.ca-file": security.tls_ca_file,
        f"{tls}.client.cert": security.tls_client_cert,
        f"{tls}.client.key": security.tls_client_key,
    }
    with dask.config.set(named):
        cli.main(["check", address])
    assert "TLS: only who has the certificates" in capsys.readouterr().out
    assert cli.main(["check", address]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"daskps: {address} wants certificates")


def reached_from_a_task(address):
    with client_for(address) as used:
        return used.submit(str, 5, pure=False).result(timeout=30)


def test_on_tls_a_task_uses_the_certificates_of_its_worker(tls_client):
    """An estimator whose client was one is pickled with its address, as in a search."""
    address = tls_client.scheduler.address
    assert tls_client.submit(reached_from_a_task, address).result(timeout=60) == "5"


@pytest.mark.parametrize("setting", ["auto", "comm"])
def test_on_a_cluster_within_this_process(client, setting):
    X, y = digits(203, np.float32)
    net = make_net(CNN3, **NOISY)
    with (
        local_cluster(n_workers=2, processes=False) as inside,
        Client(inside, set_as_default=False) as own,
    ):
        fitted = fit(own, net, X, y, setting, n_workers=None)
    assert roads(fitted) == ["none"]
    assert identical(fitted, fit(client, net, X, y, n_workers=1))


# What is left


def own_unix_sockets():
    """Our abstract sockets that this process holds; others may train on this machine too."""
    own = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_there(fd)}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [line for line in lines if line[-1].startswith("@daskps-") and f"socket:[{line[6]}]" in own]


def fd_is_there(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def quiet(before, interval):
    """Neither a thread, nor a descriptor, nor a setting of the interpreter is left of a run."""
    wait_until(lambda: round_threads() == [], what=lambda: f"left: {round_threads()}")
    wait_until(lambda: sys.getswitchinterval() == interval)
    assert [name for _, name in new_fds(before) if "memfd" in name] == []
    assert own_unix_sockets() == []
    wait_until(lambda: len(fds()) <= len(before), what=lambda: f"left: {new_fds(before)}")


def test_nothing_is_left_of_fits(client, transport):
    X, y = separable(60, 3)
    net = make_net(CNN3, module__n=3, max_epochs=2, train_split=None)
    interval = sys.getswitchinterval()
    fit(client, net, X, y, n_workers=4)  # Dask keeps the connections that it has opened, to every worker
    before = fds()
    for sync_every in MODES:
        assert set(roads(fit(client, net, X, y, sync_every=sync_every))) == {ROADS[transport]}
    quiet(before, interval)


ROADS = {"auto": "shared-memory", "comm": "comm", MESSAGES: MESSAGES}


@pytest.mark.parametrize("sync_every", ["batch", "epoch"])
def test_nothing_is_left_of_a_fit_that_failed(client, transport, sync_every):
    X, y = separable(60, 3)
    X[40] = 99
    net = make_net(Boom, module__n=3, max_epochs=2, train_split=None)
    interval = sys.getswitchinterval()
    fit(client, make_net(CNN3, module__n=3), X[:40], y[:40], n_workers=4)  # connects to every worker
    for attempt in range(3):
        with pytest.raises(ValueError, match="boom") as caught:
            fit(client, net, X, y, sync_every=sync_every)
        assert any("Raised on rank" in note for note in caught.value.__notes__)
        del caught
        if attempt == 0:
            wait_until(lambda: round_threads() == [])
            before = fds()
    quiet(before, interval)
    assert roads(fit(client, net, X[:40], y[:40], n_workers=2)) == [ROADS[transport]] * 2


def test_round_that_takes_too_long_names_the_rank_and_the_setting(client, transport, tmp_path):
    """On every road the server's sentence arrives, and not only that the connection is closed."""
    X, y = separable(60, 3)
    X[:, 0, 0, 0] = np.arange(60)
    X[7, 0, 0, 0] = 99  # in the first batch, which the ranks share
    net = make_net(Stalled, module__n=3, module__path=str(tmp_path), train_split=None, batch_size=60)
    interval = sys.getswitchinterval()
    sentence = r"ranks \[[\d, ]+\]\. .*daskps\.timeouts\.round"
    with dask.config.set({"daskps.timeouts.round": "2s"}), pytest.raises(RoundTimeoutError, match=sentence):
        fit(client, net, X, y)
    (tmp_path / "go").touch()
    wait_until(lambda: round_threads() == [] and sys.getswitchinterval() == interval)
    fit(client, make_net(CNN3, module__n=3, train_split=None), X, y)


class TestBuckets:
    """Gradients that leave while backward computes others change nothing, on whatever road."""

    @pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
    def test_end_where_plain_skorch_ends(self, client, transport, optimizer):
        X, y = digits(203, np.float64)
        net = make_net(CNN3, **optimizer, module__dtype=torch.float64, batch_size=32, max_epochs=3)
        plain = fit_plain(net, X, y)
        with dask.config.set({"daskps.bucket-size": 1}):
            ours = fit_daskps(client, net, X, y, n_workers=3)
        assert distance(ours.net_, plain) <= 1e-10
        n_parameters = len(list(plain.module_.parameters()))
        steps, rounds = ours.report_.ranks[0].steps, ours.report_.ranks[0].rounds
        assert rounds >= steps * n_parameters > steps

    def test_have_the_bits_of_one_exchange(self, client, transport):
        X, y = digits(203, np.float32)
        net = make_net(CNN3, **NOISY, **ADAM)
        with dask.config.set({"daskps.bucket-size": 1}):
            in_buckets = fit(client, net, X, y)
        with dask.config.set({"daskps.bucket-size": 0}):
            assert identical(in_buckets, fit(client, net, X, y))


class TestNarrowValues:
    @pytest.mark.parametrize("sync_every", MODES)
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_train_almost_the_same_net(self, client, dtype, sync_every, transport):
        X, y = digits(203, np.float32)
        net = make_net(CNN3, **ADAM, max_epochs=2)
        exact = fit(client, net, X, y, sync_every=sync_every)
        with dask.config.set({"daskps.wire-dtype": dtype}):
            ours = fit(client, net, X, y, sync_every=sync_every)
        difference = distance(ours, exact)
        if transport == "auto":  # nothing travels
            assert difference == 0
        else:
            assert 0 < difference <= 0.02
            # In local modes the optimizer's state goes with all its digits.
            share = ours.report_.ranks[0].bytes / exact.report_.ranks[0].bytes
            assert share < (0.6 if sync_every == "batch" else 0.9)
        losses = [fitted.history_[:, "train_loss"] for fitted in (ours, exact)]
        np.testing.assert_allclose(*losses, rtol=0.01)
