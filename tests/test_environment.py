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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from conftest import needs_usual_policy
from distributed import Client, LocalCluster
from torch import nn

from daskps import _environment
from daskps._environment import restore_malloc, torch_threads, tune_malloc, without_preempting

MMAP_MAX, TOP_PAD, TRIM = -4, -2, -1
TUNED = [(MMAP_MAX, 0), (TOP_PAD, 64 * 2**20), (TRIM, 256 * 2**20)]
RESTORED = [(MMAP_MAX, 65536), (TOP_PAD, 128 * 2**10), (TRIM, 65536), "malloc_trim(0)"]


@contextmanager
def tuned_malloc():
    tune_malloc()
    try:
        yield
    finally:
        restore_malloc()


class FakeLibc:
    """Records what glibc would have been asked for."""

    def __init__(self):
        self.calls = []

    def mallopt(self, parameter, value):
        self.calls.append((parameter, value))
        return 1

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
    for name in ("MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_all_options_are_set_and_put_back(libc):
    with tuned_malloc():
        assert libc.calls == TUNED
    assert libc.calls == TUNED + RESTORED


def test_they_are_put_back_after_an_exception(libc):
    with pytest.raises(ZeroDivisionError), tuned_malloc():
        1 / 0  # noqa: B018
    assert libc.calls == TUNED + RESTORED


@pytest.mark.parametrize(("mmap_max", "expected"), [("777", 777), ("much", 65536)])
def test_the_environments_own_values_come_back(libc, monkeypatch, mmap_max, expected):
    monkeypatch.setenv("MALLOC_MMAP_MAX_", mmap_max)
    monkeypatch.setenv("MALLOC_TOP_PAD_", "5000")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4096")
    with tuned_malloc():
        libc.calls.clear()
    assert libc.calls == [(MMAP_MAX, expected), (TOP_PAD, 5000), (TRIM, 4096), "malloc_trim(0)"]


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


def test_the_next_run_raises_them_again(libc):
    for _ in range(2):
        with tuned_malloc():
            pass
    assert libc.calls == 2 * (TUNED + RESTORED)


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
    _environment.tune_malloc()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "7\n"


def page_faults(what, times=30):
    """What it costs, typically, to do something again and again."""
    import resource

    counts = []
    for _ in range(times):
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        what()
    settled = counts[times // 2 :]  # memory comes to lie where it fits
    return statistics.median(after - before for before, after in itertools.pairwise(settled))


def tuned_page_faults(what, times=30):
    with tuned_malloc():
        return page_faults(what, times)


def small_tensor():
    torch.zeros(2**18)


def tensors_beyond_any_threshold():
    return [torch.zeros(12 * 2**20) for _ in range(3)]


def step_beyond_one_heap():
    """Together its tensors are larger than the 64 MiB that a heap of a thread has."""
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*convolutions, nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 10))
    net(torch.zeros(128, 1, 28, 28)).sum().backward()


@pytest.fixture(scope="module")
def nannied():
    """A client of a worker under a nanny, which trains in a thread that is not the main one."""
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    no_port = {"scheduler_kwargs": {"dashboard_address": ":0"}}
    with LocalCluster(**options, **no_port) as cluster, Client(cluster) as client:
        yield client


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="for glibc only")
@pytest.mark.parametrize("what", [small_tensor, step_beyond_one_heap, tensors_beyond_any_threshold])
def test_a_worker_under_a_nanny_keeps_its_memory(nannied, what):
    untuned = nannied.submit(page_faults, what, 10, pure=False).result()
    tuned = nannied.submit(tuned_page_faults, what, pure=False).result()
    assert untuned > 200  # a mebibyte has 256 pages of 4 KiB
    assert tuned < 20


def resident(_=None):
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def test_what_was_kept_goes_back_to_the_kernel(nannied):
    before = nannied.submit(resident, pure=False).result()
    nannied.submit(tuned_page_faults, step_beyond_one_heap, 10, pure=False).result()
    after = nannied.submit(resident, pure=False).result()
    assert after - before < 64 * 2**20


def test_torch_gets_its_threads_in_this_block():
    before = torch.get_num_threads()
    with torch_threads(before + 2):
        assert torch.get_num_threads() == before + 2
    assert torch.get_num_threads() == before


def test_torch_threads_are_put_back_after_an_exception():
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), torch_threads(before + 1):
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


def policy_of_thread():
    return os.sched_getscheduler(0)


@needs_usual_policy
class TestWithoutPreempting:
    def test_the_policy_holds_for_the_block(self):
        with without_preempting():
            assert policy_of_thread() == os.SCHED_BATCH
        assert policy_of_thread() == os.SCHED_OTHER

    def test_it_is_put_back_after_an_exception(self):
        with pytest.raises(ZeroDivisionError), without_preempting():
            1 / 0  # noqa: B018
        assert policy_of_thread() == os.SCHED_OTHER

    def test_other_threads_stay(self):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(policy_of_thread).result()  # a new thread would have that of its creator
            with without_preempting():
                assert pool.submit(policy_of_thread).result() == os.SCHED_OTHER

    @pytest.mark.parametrize("policy", ["SCHED_IDLE", "SCHED_BATCH"])
    def test_what_somebody_has_chosen_stays(self, policy):
        def chosen():
            os.sched_setscheduler(0, getattr(os, policy), os.sched_param(0))
            with without_preempting():
                inside = policy_of_thread()
            return inside, policy_of_thread()

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(chosen).result() == (getattr(os, policy),) * 2

    @pytest.mark.parametrize("function", ["sched_getscheduler", "sched_setscheduler"])
    def test_where_it_is_forbidden_all_goes_on(self, monkeypatch, function):
        def forbid(*args):
            raise PermissionError("seccomp")

        with monkeypatch.context() as patch:
            patch.setattr(os, function, forbid)
            with without_preempting():
                patch.undo()
                assert policy_of_thread() == os.SCHED_OTHER

    @pytest.mark.parametrize("name", ["SCHED_BATCH", "sched_getscheduler"])
    def test_where_there_is_none_all_goes_on(self, monkeypatch, name):
        with monkeypatch.context() as patch:
            patch.delattr(os, name)
            with without_preempting():
                patch.undo()
                assert policy_of_thread() == os.SCHED_OTHER


def test_importing_it_does_not_import_torch():
    script = "import sys, daskps._environment; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
