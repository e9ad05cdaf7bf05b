import os

from daskps import _machine


def test_describes_what_matters_for_speed():
    machine = _machine.describe()
    assert set(machine) == {"processor", "cores", "python", "torch", "skorch", "distributed", "numpy"}
    assert int(machine["cores"]) == len(os.sched_getaffinity(0))
    assert machine["processor"]
    assert machine["torch"].startswith("2.")


def test_peak_memory_counts_what_was_given_back():
    before = _machine.peak_memory()
    block = bytearray(before + 50_000_000)
    block[::4096] = b"x" * len(range(0, len(block), 4096))
    del block
    assert _machine.peak_memory() >= before + 50_000_000
