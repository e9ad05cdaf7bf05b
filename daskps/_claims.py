"""Files that callbacks write: two fits of a process never have the same ones at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager

from daskps.exceptions import DaskpsError

logger = logging.getLogger("daskps")

_released = threading.Condition()
_owners: dict[str, threading.Thread] = {}


@contextmanager
def claimed(paths: Set[str], seconds: float) -> Iterator[None]:
    """Hold all of these paths for the length of the block; wait while another thread holds one.

    A fit inside a fit has the paths of the outer one.

    Raises
    ------
    DaskpsError
        If another thread holds one for so many seconds.
    """
    me = threading.current_thread()
    with _released:
        if _held_by_others(paths, me):
            logger.info("waiting for another fit that writes to %s", ", ".join(sorted(paths)))
        if not _released.wait_for(lambda: not _held_by_others(paths, me), timeout=seconds):
            raise DaskpsError(_refusal(_held_by_others(paths, me), seconds))
        new = paths - _owners.keys()
        _owners.update(dict.fromkeys(new, me))
    try:
        yield
    finally:
        with _released:
            for path in new:
                del _owners[path]
            _released.notify_all()


def _held_by_others(paths: Set[str], me: threading.Thread) -> list[str]:
    return sorted(path for path in paths if _owners.get(path, me) is not me)


def _refusal(held: list[str], seconds: float) -> str:
    threads = ", ".join(sorted({_owners[path].name for path in held}))
    return (
        f"Another fit of this process, in the thread {threads}, has been writing to {', '.join(held)} for"
        f" daskps.timeouts.files ({seconds:g} s): give the checkpoints of each fit a folder of their own,"
        " or raise the setting."
    )
