"""The worker's environment for the length of a fit."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import threading

import pytest
import torch
from distributed import Client, LocalCluster

from daskps import _environment
from daskps._environment import restore_malloc, torch_threads, training_environment, tuned_malloc

MMAP, TRIM = -3, -1
TUNED = [(MMAP, 32 * 2**20), (TRIM, 256 * 2**20)]
RESTORED = [(MMAP, 128 * 2**10), (TRIM, 65536), "malloc_trim(0)"]


class FakeLibc:
    """Records what glibc would have been asked for."""

    def __init__(self, accepts=True):
        self.accepts = accepts
        self.calls = []

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))
        return int(self.accepts)

    def malloc_trim(self, pad):
        self.calls.append(f"malloc_trim({pad})")
        return 1


@pytest.fixture
def libc(monkeypatch):
    """A libc in what looks like a worker that a nanny started."""
    fake = FakeLibc()
    monkeypatch.setattr(_environment, "_libc", lambda: fake)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    return fake


def test_both_thresholds_are_raised_and_put_back(libc):
    with tuned_malloc():
        assert libc.calls == TUNED
    assert libc.calls == TUNED + RESTORED


def test_they_are_put_back_after_an_exception(libc):
    with pytest.raises(ZeroDivisionError), tuned_malloc():
        1 / 0  # noqa: B018
    assert libc.calls == TUNED + RESTORED


@pytest.mark.parametrize(("mmap", "expected"), [("77777", 77777), ("much", 128 * 2**10)])
def test_the_environments_own_values_come_back(libc, monkeypatch, mmap, expected):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", mmap)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    with tuned_malloc():
        libc.calls.clear()
    assert libc.calls == [(MMAP, expected), (TRIM, 4096), "malloc_trim(0)"]


def test_only_the_last_user_in_the_process_puts_them_back(libc):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with tuned_malloc():
            inside.set()
            assert leave.wait(30)

    thread = threading.Thread(target=other)
    with tuned_malloc():
        thread.start()
        assert inside.wait(30)
    assert libc.calls == TUNED
    leave.set()
    thread.join(30)
    assert libc.calls == TUNED + RESTORED


def test_a_run_may_hold_them_across_its_epochs(libc):
    _environment.tune_malloc()
    for _ in range(3):
        with training_environment(1):
            assert libc.calls == TUNED
    restore_malloc()
    assert libc.calls == TUNED + RESTORED


def test_the_next_run_raises_them_again(libc):
    for _ in range(2):
        with tuned_malloc():
            pass
    assert libc.calls == 2 * (TUNED + RESTORED)


def test_one_threshold_alone_is_not_raised(libc):
    libc.accepts = False
    with tuned_malloc():
        assert libc.calls == TUNED[:1]


def test_nothing_happens_where_the_thresholds_adapt_by_themselves(libc, monkeypatch):
    monkeypatch.delenv("MALLOC_TRIM_THRESHOLD_")
    with tuned_malloc():
        pass
    assert libc.calls == []


def test_nothing_happens_in_the_nannys_own_process(libc, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    with tuned_malloc():
        pass
    assert libc.calls == []


@pytest.mark.parametrize("other_libc", [None, object()])
def test_nothing_happens_without_glibc(libc, monkeypatch, other_libc):
    monkeypatch.setattr(_environment, "_libc", lambda: other_libc)
    with tuned_malloc():
        pass
    assert libc.calls == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_the_lock_is_held_is_not_stuck():
    script = """
import os, signal
from daskps import _environment
with _environment._lock:
    pid = os.fork()
if pid == 0:
    signal.alarm(20)
    with _environment.tuned_malloc():
        os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "7\n"


def page_faults():
    """Return what one tensor of 1 MiB costs, typically, that is made and freed again."""
    import resource

    counts = []
    for _ in range(41):
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        torch.zeros(2**18)
    return statistics.median(after - before for before, after in itertools.pairwise(counts))


def tuned_page_faults():
    with training_environment(1):
        return page_faults()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="for glibc only")
def test_a_worker_under_a_nanny_keeps_its_memory():
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    no_port = {"scheduler_kwargs": {"dashboard_address": ":0"}}
    with LocalCluster(**options, **no_port) as cluster, Client(cluster) as client:
        untuned = client.submit(page_faults).result()
        tuned = client.submit(tuned_page_faults).result()
    assert untuned > 200  # 256 pages of 4 KiB
    assert tuned < 20


def test_torch_gets_its_threads_in_this_block():
    before = torch.get_num_threads()
    with torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before


def test_torch_threads_are_put_back_after_an_exception():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), training_environment(before + 1):
        1 / 0  # noqa: B018
    assert torch.get_num_threads() == before


def test_torch_threads_of_another_thread_stay():
    seen = []
    before = torch.get_num_threads()
    start, changed = threading.Event(), threading.Event()

    def other():
        seen.append(torch.get_num_threads())
        start.set()
        changed.wait(30)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    start.wait(30)
    with torch_threads(before + 1):
        changed.set()
        thread.join(30)
    assert seen == [before, before]


def test_importing_it_does_not_import_torch():
    script = "import sys, daskps._environment; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
