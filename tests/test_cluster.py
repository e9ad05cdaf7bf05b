"""Which client a fit uses. What starts a private cluster runs as a script of its own."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import textwrap

import dask
import pytest
from dask.system import cpu_count
from distributed import Client, LocalCluster, worker_client

from daskps._cluster import client_for
from daskps._process import in_task
from daskps.exceptions import DaskpsError

LAST_HEARTBEAT = re.compile(
    r"^[^\n]* - distributed\.worker - ERROR - Failed to communicate with scheduler during heartbeat\."
    r"\nTraceback .*?^distributed\.comm\.core\.CommClosedError: [^\n]*\n",
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture(scope="module")
def cluster():
    """One worker of one thread, in a process of its own: a task there may leave a default client."""
    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=True,
        dashboard_address=None,
        scheduler_kwargs={"dashboard_address": ":0"},
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster, set_as_default=False) as client:
        yield client


# A worker has four fifths of five seconds to end before Dask complains and kills it; on a busy machine one
# needs longer.
PATIENT_NANNIES = "Nanny.close.__defaults__ = (60, *Nanny.close.__defaults__[1:])"


def run_script(folder, body, *, guard=True, timeout=100):
    """Run `body` as the main function of a script."""
    lines = ["import os", "from distributed import Nanny", "from daskps._cluster import client_for"]
    lines += [PATIENT_NANNIES, "def main():", textwrap.indent(textwrap.dedent(body), "    ")]
    lines += ["if __name__ == '__main__':", "    main()"] if guard else ["main()"]
    script = folder / "script.py"
    script.write_text("\n".join(lines))
    return subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=timeout, check=False
    )


def without_last_heartbeats(stderr):
    """Leave out what Dask says where a worker that is being closed still waits for its heartbeat.

    A worker of Dask closes its connections while one may be in flight, with daskps or without.
    """
    return LAST_HEARTBEAT.sub("", stderr)


def printed(folder, body):
    """Return what the script prints, which must end well and without a word of complaint."""
    done = run_script(folder, body)
    assert without_last_heartbeats(done.stderr) == ""
    assert done.returncode == 0
    return done.stdout.split()


def test_a_given_client_is_used_and_stays_open(client):
    with client_for(client) as used:
        assert used is client
    assert client.status == "running"


def test_a_given_client_goes_before_the_current_one(cluster, client):
    with Client(cluster), client_for(client) as used:
        assert used is client


def test_an_address_is_connected_to_for_the_block(cluster):
    with client_for(cluster.scheduler_address) as used:
        assert used.submit(sum, [1, 2]).result() == 3
        with pytest.raises(ValueError, match="No clients found"):
            Client.current()
    assert used.status == "closed"


TLS = "distributed.comm.tls"


@pytest.mark.parametrize(
    ("address", "settings", "message"),
    [
        ("tls://127.0.0.1:1", {}, r"tls://127\.0\.0\.1:1 wants certificates .*comm\.tls\.ca-file"),
        (
            "tls://127.0.0.1:1",
            {f"{TLS}.ca-file": "/no/such", f"{TLS}.client.cert": "/no/such"},
            r"certificates of distributed\.comm\.tls\.ca-file.* cannot be read: .*No such file",
        ),
        (
            "tcp://127.0.0.1:1",
            {"distributed.comm.require-encryption": True},
            r"tcp://127\.0\.0\.1:1 is not encrypted.*distributed\.comm\.require-encryption",
        ),
    ],
)
def test_what_cannot_be_connected_to_with_the_settings_is_refused_at_once(
    address, settings, message, monkeypatch
):
    """A client that finds out itself leaves a thread behind for which the process waits for ever."""
    monkeypatch.setattr(Client, "__init__", pytest.fail)
    with dask.config.set(settings), pytest.raises(ValueError, match=message), client_for(address):
        pass


@pytest.mark.parametrize("address", ["scheduler", "", "tcp://", "tcp://host:port", "foo://127.0.0.1:1"])
def test_what_is_no_address_is_refused_at_once(address, monkeypatch):
    """Dask's client would keep the process from ending."""
    monkeypatch.setattr("daskps._cluster.Client.__init__", pytest.fail)
    with pytest.raises(ValueError, match=r"'client' .* such as 'tcp://host:8786'"), client_for(address):
        pass


def test_what_is_no_client_is_refused_at_once(cluster):
    with pytest.raises(TypeError, match=r"'client' .* got LocalCluster"), client_for(cluster):
        pass


def test_an_address_is_left_after_an_exception(cluster):
    with pytest.raises(ZeroDivisionError), client_for(cluster.scheduler_address) as used:
        1 / 0  # noqa: B018
    assert used.status == "closed"


def test_the_default_client_is_used(cluster):
    with Client(cluster) as default, client_for(None) as used:
        assert used is default


def test_the_client_of_as_current_goes_before_the_default(cluster, client):
    with Client(cluster), client.as_current(), client_for(None) as used:
        assert used is client


def test_a_closed_client_is_refused_at_once(cluster, monkeypatch):
    with Client(cluster, set_as_default=False) as client:
        pass
    monkeypatch.setattr(client, "sync", pytest.fail)  # its scheduler is not asked
    with pytest.raises(DaskpsError, match="it is 'closed'"), client_for(client):
        pass


@pytest.mark.parametrize("given", [True, False])
def test_an_asynchronous_client_is_refused_in_one_sentence(cluster, given):
    async def fit():
        async with Client(cluster.scheduler_address, asynchronous=True) as client:
            with client_for(client if given else None):
                pass

    with pytest.raises(DaskpsError, match="needs a synchronous client") as caught:
        asyncio.run(fit())
    assert "\n" not in str(caught.value)


def double(x):
    return 2 * x


def fit_in_a_task(client, x):
    with client_for(client) as used:
        return used.submit(double, x, pure=False).result(timeout=30)


def fit_in_a_task_that_has_seceded(x):
    with worker_client() as outer, client_for(None) as used:
        assert used is outer
        return used.submit(double, x, pure=False).result(timeout=30)


async def fit_in_a_coroutine():
    with client_for(None):
        pass


@pytest.mark.parametrize("by_address", [True, False])
def test_six_fits_in_tasks_of_a_worker_of_one_thread_end(cluster, client, by_address):
    given = cluster.scheduler_address if by_address else None
    fits = [client.submit(fit_in_a_task, given, x) for x in range(6)]
    assert client.gather(fits) == [0, 2, 4, 6, 8, 10]
    assert client.submit(double, 21).result(timeout=30) == 42


def test_a_task_that_has_seceded_may_fit(client):
    assert client.submit(fit_in_a_task_that_has_seceded, 4).result(timeout=30) == 8


def test_a_coroutine_on_a_worker_cannot_fit(client):
    with pytest.raises(DaskpsError, match="needs a synchronous client"):
        client.submit(fit_in_a_coroutine).result(timeout=30)


def test_a_task_knows_that_it_is_one(client):
    assert client.submit(in_task).result(timeout=30) is True
    assert in_task() is False


def test_the_private_cluster_has_a_process_per_core_and_ends_by_itself(tmp_path):
    body = """
        with client_for(None) as client:
            threads = list(client.nthreads().values())
            pids = set(client.run(os.getpid).values())
            print(len(threads), set(threads) == {1}, len(pids), os.getpid() in pids)
    """
    cores = str(cpu_count())
    assert printed(tmp_path, body) == [cores, "True", cores, "False"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_the_private_cluster_keeps_to_the_cores_of_this_process(tmp_path):
    body = """
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        with client_for(None) as client:
            print(len(client.nthreads()))
    """
    assert printed(tmp_path, body) == ["1"]


def test_the_private_cluster_is_nobody_elses_default(tmp_path):
    body = """
        import dask
        from distributed import Client
        environment = dict(os.environ)
        with client_for(None):
            print(dask.base.get_scheduler())
            try:
                Client.current()
            except ValueError:
                print("none")
        print(set(os.environ.items()) ^ set(environment.items()) or "same")
    """
    assert printed(tmp_path, body) == ["None", "none", "same"]


def test_there_is_one_private_cluster_in_a_process(tmp_path):
    body = """
        import asyncio, threading
        clients = []
        def fit():
            with client_for(None) as client:
                clients.append(client)
        async def fit_in_a_notebook():
            fit()
        threads = [threading.Thread(target=fit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(fit_in_a_notebook())
        print(len(clients), len(set(clients)), clients[0].status)
    """
    assert printed(tmp_path, body) == ["5", "1", "running"]


def test_a_private_cluster_that_was_closed_is_started_anew(tmp_path):
    body = """
        with client_for(None) as first:
            pass
        first.cluster.close()
        first.close()
        with client_for(None) as second:
            print(second is first, second.submit(sum, [1, 2]).result())
    """
    assert printed(tmp_path, body) == ["False", "3"]


def test_a_script_without_a_guard_gets_one_short_error(tmp_path):
    body = """
        with client_for(None):
            print("it ran")
    """
    done = run_script(tmp_path, body, guard=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("Traceback") == 1
    assert lines[-1].startswith("daskps.exceptions.DaskpsError: Dask could not start")
    assert "`if __name__ == '__main__':`" in lines[-1]
    assert len(lines) < 25


def test_a_script_may_close_things_in_the_wrong_order_or_not_at_all(tmp_path):
    """BR-52: it ends by itself, and nobody complains on the way."""
    body = """
        import numpy as np
        from distributed import Client, LocalCluster
        from daskps import DistributedCNNClassifier
        from daskps.exceptions import DaskpsError
        options = {"threads_per_worker": 1, "dashboard_address": None}
        options["scheduler_kwargs"] = {"dashboard_address": ":0"}
        def fit(client):
            X, y = np.random.rand(80, 8), np.arange(80) % 2
            clf = DistributedCNNClassifier(client=client).fit(X, y)
            print(clf.report_.world_size)
            return clf
        cluster = LocalCluster(n_workers=1, processes=False, **options)
        client = Client(cluster)
        clf = fit(client)
        cluster.close()
        client.close()
        del clf
        try:
            fit(client)
        except DaskpsError as error:
            print("closed" in str(error))
        clf = fit(Client(LocalCluster(n_workers=2, **options)))
    """
    assert printed(tmp_path, body) == ["1", "True", "2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_its_own(tmp_path):
    body = """
        import multiprocessing
        from distributed import Client
        from daskps.exceptions import DaskpsError
        options = {"dashboard_address": None, "scheduler_kwargs": {"dashboard_address": ":0"}}
        default = Client(n_workers=1, threads_per_worker=1, **options)
        with Client.current().as_current(), client_for(None) as parents:
            assert parents is default
            large = bytes(20_000_000)
            assert parents.submit(len, parents.scatter(large)).result() == len(large)
            def child():
                with client_for(None) as own:
                    print(own is parents, own.submit(len, own.scatter(large)).result())
                try:
                    with client_for(parents):
                        pass
                except DaskpsError as error:
                    print("forked" in str(error), flush=True)
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            process.join(60)
            process.kill()
            print(process.exitcode)
        default.close()
    """
    assert printed(tmp_path, body) == ["False", "20000000", "True", "0"]


def test_a_child_of_a_pool_stays_within_its_process(tmp_path):
    body = """
        import multiprocessing
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(__import__("test_cluster").workers_here))
    """
    assert printed(tmp_path, use_this_module(body)) == ["(1,", "True)"]


def test_a_child_of_joblib_stays_within_its_process(tmp_path):
    body = """
        from joblib import Parallel, delayed
        here = __import__("test_cluster").workers_here
        for workers, in_this_process in Parallel(n_jobs=2)(delayed(here)() for _ in range(2)):
            print(workers, in_this_process)
    """
    assert printed(tmp_path, use_this_module(body)) == ["1", "True", "1", "True"]


def use_this_module(body):
    return f"import sys\nsys.path.append({os.path.dirname(__file__)!r})\n" + textwrap.dedent(body)


def workers_here():
    with client_for(None) as client:
        pids = list(client.run(os.getpid).values())
        return len(pids), pids == [os.getpid()]
