"""Which workers have fallen silent. A slow one has not: its event loop sends heartbeats all the time."""

from __future__ import annotations


class Silence:
    """How long workers have been silent, by a listener that may have been asleep itself.

    A scheduler whose event loop was blocked, or whose machine slept, has heard nobody, and has to give
    everybody time before it draws conclusions.

    Parameters
    ----------
    now : float
        A time in seconds, as that of the heartbeats.
    """

    INTERVAL = 0.5
    """Seconds between two looks."""

    def __init__(self, now: float) -> None:
        self._awake_since = self._now = now

    def looked(self, now: float) -> None:
        """The listener is awake. If it comes late, it was not all the time."""
        if not 0 <= now - self._now <= 4 * self.INTERVAL:
            self._awake_since = now
        self._now = now

    def of(self, last_seen: float) -> float:
        """For how many seconds the listener has heard nothing since this heartbeat."""
        return self._now - max(last_seen, self._awake_since)
