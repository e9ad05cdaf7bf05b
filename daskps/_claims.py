"""Files that callbacks write: two fits of a process never have the same ones at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager

logger = logging.getLogger("daskps")

_released = threading.Condition()
_owners: dict[str, int] = {}


@contextmanager
def claimed(paths: Set[str]) -> Iterator[None]:
    """Hold all of these paths for the length of the block; wait while another thread holds one.

    A fit inside a fit has the paths of the outer one.
    """
    me = threading.get_ident()
    with _released:
        if _held_by_others(paths, me):
            logger.info("waiting for another fit that writes to %s", ", ".join(sorted(paths)))
        _released.wait_for(lambda: not _held_by_others(paths, me))
        new = paths - _owners.keys()
        _owners.update(dict.fromkeys(new, me))
    try:
        yield
    finally:
        with _released:
            for path in new:
                del _owners[path]
            _released.notify_all()


def _held_by_others(paths: Set[str], me: int) -> bool:
    return any(_owners.get(path, me) != me for path in paths)
