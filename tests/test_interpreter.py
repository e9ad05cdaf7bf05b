import sys
import threading

import pytest

from daskps._interpreter import EAGER_SECONDS, switch_as_before, switch_eagerly


@pytest.fixture(autouse=True)
def usual():
    """A known interval, and that of the process put back."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.003)
    yield sys.getswitchinterval()
    sys.setswitchinterval(before)


def test_is_eager_in_between_and_then_as_before(usual):
    switch_eagerly()
    assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS)
    switch_as_before()
    assert sys.getswitchinterval() == usual


def test_only_the_last_user_puts_the_interval_back(usual):
    for _ in range(3):
        switch_eagerly()
    for _ in range(2):
        switch_as_before()
        assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS)
    switch_as_before()
    assert sys.getswitchinterval() == usual


def test_every_time_the_interval_is_the_one_that_was_there():
    for interval in (0.003, 0.02):
        sys.setswitchinterval(interval)
        switch_eagerly()
        switch_as_before()
        assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_shorter_interval_of_the_user_stays():
    sys.setswitchinterval(EAGER_SECONDS / 10)
    switch_eagerly()
    assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS / 10)
    switch_as_before()
    assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS / 10)


def test_many_threads_leave_it_as_it_was(usual):
    def use():
        for _ in range(200):
            switch_eagerly()
            assert sys.getswitchinterval() == pytest.approx(EAGER_SECONDS)
            switch_as_before()

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == usual
