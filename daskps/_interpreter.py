"""How soon threads of the scheduler's process hand over the interpreter.

A thread that returns from a system call waits up to the switch interval for the interpreter if the
event loop is busy: 5 ms by default, several times a round.
"""

from __future__ import annotations

import sys
import threading

EAGER_SECONDS = 0.0002

_lock = threading.Lock()
_users = 0
_usual = 0.0


def switch_eagerly() -> None:
    """Let threads take turns quickly; every call needs its `switch_as_before`."""
    global _users, _usual
    with _lock:
        _users += 1
        if _users == 1:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(min(EAGER_SECONDS, _usual))


def switch_as_before() -> None:
    """Give up one `switch_eagerly`; the last one puts the old interval back."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            sys.setswitchinterval(_usual)
