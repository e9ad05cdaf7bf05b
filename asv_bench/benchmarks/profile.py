"""How much is measured: fast or regular, as the variable DASKPS_BENCH_PROFILE says."""

import os
from typing import NamedTuple


class Profile(NamedTuple):
    sizes: tuple  # values in a contribution
    world_sizes: tuple
    turns: int
    epochs: int
    peer_rows: int


_PROFILES = {
    "fast": Profile((10_000, 421_642), (2, 4), turns=1, epochs=2, peer_rows=1600),
    "regular": Profile((1, 10_000, 421_642, 4_000_000), (2, 4, 8), turns=3, epochs=10, peer_rows=6400),
}

_NAME = os.environ.get("DASKPS_BENCH_PROFILE", "fast")
if _NAME not in _PROFILES:
    raise ValueError(f"DASKPS_BENCH_PROFILE must be one of {sorted(_PROFILES)}, got {_NAME!r}.")

PROFILE = _PROFILES[_NAME]
