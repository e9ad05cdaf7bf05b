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
    if seed is None:
        yield
        return
    states = _states()
    _seed(seed)
    try:
        yield
    finally:
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
