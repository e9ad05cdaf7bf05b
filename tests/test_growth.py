"""After many fits all processes hold as much as after a few."""

from __future__ import annotations

import pytest
from growth import BYTES_TOLERATED, grown, held, settled, short_fits
from probes import wait_until


def test_growth_is_found():
    before = {("client", "files"): 3, ("client", "bytes"): 0}
    after = {("client", "files"): 4, ("client", "bytes"): BYTES_TOLERATED, ("scheduler", "tasks"): 1}
    assert grown(before, after) == {("client", "files"): (3, 4), ("scheduler", "tasks"): (0, 1)}
    assert grown(before, {("client", "bytes"): BYTES_TOLERATED + 1})
    assert not grown(after, before)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_nothing_grows_with_the_number_of_fits(client):
    short_fits(client, 10)
    before = settled(client, {}, wait_until, seconds=1)
    short_fits(client, 40)
    after = settled(client, before, wait_until)
    assert grown(before, after) == {}
    kinds = {kind for _, kind in held(client)}
    assert {"files", "threads", "bytes", "handlers", "subscribers", "seats", "futures"} <= kinds
