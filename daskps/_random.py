"""Random states: torch's, numpy's and Python's generators are one per process."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# Threads that seed, initialise and restore side by side get each other's numbers.
LOCK = threading.RLock()


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed all generators for the length of the block and put them back; None leaves them alone."""
    with LOCK, RankStream.interrupted():
        states = _states()
        if seed is not None:
            _seed(seed)
        try:
            yield
        finally:
            if seed is not None:
                _restore(states)


class Stream:
    """Random numbers of its own, taken from all generators, beside those that the process draws."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._states = _states()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this stream, where it was left, for the length of the block."""
        outside = _states()
        _restore(self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(outside)


class RankStream(Stream):
    """A stream for work that goes on in pieces, beside other threads.

    The generators are lent to it for the length of a piece, and stay with it until somebody else who
    keeps to the lock wants them: he finds what was there before.
    """

    _holder: RankStream | None = None
    _before: tuple

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Draw from this stream for the length of the block."""
        with LOCK:
            self._take()
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let others have the generators for the length of the block, inside of one of `lent`."""
        LOCK.release()
        try:
            yield
        finally:
            LOCK.acquire()
            self._take()

    def close(self) -> None:
        """Put back what was there before."""
        with LOCK:
            if RankStream._holder is self:
                RankStream._take_back()

    @staticmethod
    @contextmanager
    def interrupted() -> Iterator[None]:
        """Give the generators to nobody for the length of the block. Call it with the lock."""
        holder = RankStream._holder
        RankStream._take_back()
        try:
            yield
        finally:
            if holder is not None:
                holder._take()

    def _take(self) -> None:
        if RankStream._holder is not self:
            RankStream._take_back()
            RankStream._before, RankStream._holder = _states(), self
            _restore(self._states)

    @staticmethod
    def _take_back() -> None:
        if RankStream._holder is not None:
            RankStream._holder._states = _states()
            RankStream._holder = None
            _restore(RankStream._before)


def stream(*key: int) -> int:
    """A seed of 32 bits for what is named by ``key``, for example (seed, epoch, rank)."""
    return int(np.random.SeedSequence(key).generate_state(1)[0])


def _states() -> tuple:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _restore(states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
