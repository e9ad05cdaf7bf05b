from types import SimpleNamespace

import pytest

from daskps._training import _entry


@pytest.mark.parametrize(
    ("setup", "waited", "expected"), [(5.0, 0.25, 0.25), (2.0, 3.5, 0.5), (2.0, 2.75, 0.0)]
)
def test_waiting_for_ranks_that_are_not_set_up_yet_is_no_waiting_of_the_epoch(setup, waited, expected):
    traffic = SimpleNamespace(rounds=4, wait_seconds=waited, sync_seconds=0.125, bytes=8)
    result = SimpleNamespace(
        traffic=traffic,
        setup_seconds=setup,
        rows=32,
        losses=[1.0] * 4,
        compute_seconds=1.5,
        transport="comm",
    )
    entry = _entry(0, 1, result, slowest_setup=5.0)
    assert entry.wait_seconds == expected
    assert (entry.rank, entry.steps, entry.compute_seconds, entry.sync_seconds) == (1, 4, 1.5, 0.125)
