"""One generation of an open run: what it was asked for, who takes part, and the rounds that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distributed.scheduler import heartbeat_interval

from daskps._leases import Request
from daskps._rounds import RoundServer
from daskps._server import ParameterServer
from daskps._spec import GenerationKey, Rules
from daskps.exceptions import DaskpsError


@dataclass(frozen=True)
class Terms:
    """What a run asked for."""

    client: str
    request: Request
    workers: list[str] | None
    """The only ones that may be used, as `Client.submit` takes them."""
    resources: dict[str, float]
    rules: Rules

    def silence(self, n_workers: int) -> float:
        """For how many seconds one of so many workers may be silent: some heartbeats in any case."""
        return max(self.rules.silence, 4 * heartbeat_interval(n_workers))


@dataclass(frozen=True)
class Loss:
    """A worker that left, the rank that it held, and when that was."""

    worker: str
    rank: int
    round: int
    reason: str


class Generation:
    """One generation of an open run: its parameter server and the thread that serves its rounds."""

    def __init__(self, run_id: str, terms: Terms, addresses: list[str], generation: int = 0) -> None:
        self.server = ParameterServer(run_id, len(addresses))
        self.server.generation = generation
        self.run_id = run_id
        self.terms = terms
        self.addresses = addresses
        self.generation = generation
        self.key = GenerationKey(run_id, generation)
        self.lost: list[Loss] = []
        self.cut = ""
        self.fenced = False
        self.over = asyncio.Event()
        self.rounds: RoundServer | None = None

    def serve(self, on_cut: Callable[[], None]) -> None:
        """Start the thread that serves the rounds; ``on_cut`` is called when it has ended."""
        if len(self.addresses) > 1:
            loop = asyncio.get_running_loop()
            self.rounds = RoundServer(
                self.server,
                self.terms.rules.round,
                lambda: _call_soon(loop, self._ended, on_cut),
                self.terms.rules.wire_dtype,
            )

    def members(self) -> dict[str, Any]:
        """What the client has to know of the workers."""
        return {
            "addresses": self.addresses,
            "generation": self.generation,
            "lost": [],
        }

    def lost_workers(self) -> list[str]:
        """Addresses."""
        return [loss.worker for loss in self.lost]

    def close(self, reason: DaskpsError) -> None:
        """End the rounds, and let no rank join any more."""
        self.fenced = True
        self.server.fail(reason)
        if self.rounds is not None:
            self.rounds.close(reason)
        self.over.set()

    def _ended(self, on_cut: Callable[[], None]) -> None:
        self.over.set()
        on_cut()


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable, *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
