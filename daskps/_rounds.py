"""The thread that serves the rounds of one run: receive, add up, answer.

It has sockets of its own and shares nothing with the scheduler's event loop but the interpreter.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from time import monotonic

import numpy as np

from daskps._aggregators import combine
from daskps._interpreter import switch_as_before, switch_eagerly
from daskps._links import SocketLink, by_rank
from daskps._narrow import round_in_place
from daskps._server import ParameterServer
from daskps._sharedmemory import Segment, reserve
from daskps._spec import Contribution
from daskps._wire import Answer
from daskps.exceptions import DaskpsError, InvalidMessageError, RoundTimeoutError

logger = logging.getLogger("daskps")

# The peer has closed, also with values of its before that. Where this is not known, only both
# directions being closed is seen.
_END = getattr(select, "POLLRDHUP", 0)


class RoundServer:
    """Serves the rounds of one run in a thread of its own.

    Parameters
    ----------
    server : ParameterServer
        Decides what makes up a round.
    timeout : float
        Seconds from the first rank that joins until all have, and from the first contribution to a
        round until the last.
    on_end : callable
        Called in the thread when it ends.
    wire_dtype : {None, 'bfloat16', 'float16'}
        To what values are rounded that travel through a connection.
    """

    def __init__(
        self,
        server: ParameterServer,
        timeout: float,
        on_end: Callable[[], None],
        wire_dtype: str | None = None,
    ) -> None:
        self.server = server
        self.wire_dtype = wire_dtype
        self._timeout = timeout
        self._on_end = on_end
        self._lock = threading.Lock()
        self._links: dict[int, SocketLink] = {}
        self._over = False
        self._results: Segment | None = None
        self._private = np.empty(0, "float64")
        self._ranks: dict[int, int] = {}  # by file descriptor
        # A byte in it wakes the thread: somebody joined, or the run failed.
        self._waker, self._wake = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._waker, select.POLLIN)
        switch_eagerly()
        self._thread = threading.Thread(target=self._serve, name="daskps-rounds", daemon=True)
        self._thread.start()

    # From the event loop

    def agree(self, capacity: int) -> None:
        """Agree with a rank on how many bytes a contribution may have.

        Raises
        ------
        InvalidMessageError
            If another rank has said otherwise.
        """
        with self._lock:
            if self.server.capacity not in (0, capacity):
                raise InvalidMessageError(
                    f"a rank has contributions of {capacity} bytes, others have {self.server.capacity}"
                )
            self.server.capacity = capacity

    def results(self) -> Segment:
        """The shared memory into which results are written.

        A rank has read a result before it contributes to the next round at this place, so that there
        is nothing to write before.

        Raises
        ------
        OSError
            If there is not so much memory, or the rounds are over: nobody would give it back.
        """
        with self._lock:
            if self._over:
                raise OSError("the rounds are over")
            if self._results is None:
                self._results = Segment(reserve(self.server.capacity))
            return self._results

    def attach(self, rank: int, link: SocketLink) -> None:
        """A rank has joined. One that has done so before, or that is none, is closed."""
        with self._lock:
            known = 0 <= rank < self.server.world_size
            if self._over or not known or rank in self._links:
                link.close()
                return
            self._links[rank] = link
        self._nudge()

    def expects(self, rank: int) -> bool:
        """Whether this is a rank, and has not joined yet."""
        with self._lock:
            return 0 <= rank < self.server.world_size and rank not in self._links

    def fail(self, error: DaskpsError) -> None:
        """Answer all that wait, and all that will ask, with this error."""
        self.server.fail(error)
        self._nudge()

    def close(self, reason: DaskpsError) -> None:
        """End the rounds now, also in the middle of one."""
        self.fail(reason)
        with self._lock:
            for link in self._links.values():
                link.hang_up()

    def kinds(self) -> list[str]:
        """How each rank is connected, in rank order."""
        return [link.kind for _, link in by_rank(self._links)]

    def _nudge(self) -> None:
        with self._lock:
            if not self._over:
                os.write(self._wake, b"w")

    # In the thread

    def _serve(self) -> None:
        try:
            self._gather()
            while True:
                self._round()
        except DaskpsError as error:
            self._refuse(error)
        except TimeoutError:
            self._refuse(self._late("a rank that stopped in the middle of a message"))
        except (EOFError, OSError) as error:
            # Why it is gone is known elsewhere: the others learn only that the run is over.
            logger.debug("a rank of run %s is gone: %r", self.server.run_id, error)
            if self.server.error is not None:
                self._refuse(self.server.error)
        except Exception as error:
            logger.exception("the rounds of run %s ended", self.server.run_id)
            self._refuse(DaskpsError(f"combining a round failed: {error!r}"))
        finally:
            self._end()

    def _gather(self) -> None:
        """Wait until all ranks have joined."""
        deadline = None
        while len(self._links) < self.server.world_size:
            if self._links and deadline is None:
                deadline = monotonic() + self._timeout
            self._wait(deadline, lambda: sorted(set(range(self.server.world_size)) - self._links.keys()))
        for _, link in by_rank(self._links):
            link.sock.settimeout(self._timeout)
        self._ranks = {link.sock.fileno(): rank for rank, link in self._links.items()}
        self._listen()

    def _listen(self) -> None:
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)

    def _round(self) -> None:
        arrived: dict[int, float] = {}
        complete: list[Contribution] | None = None
        deadline = None  # as long as nobody waits
        while complete is None:
            for fd in self._wait(deadline, self.server.missing):
                rank = self._ranks[fd]
                if rank in arrived:
                    raise EOFError("a rank left in the middle of a round")
                contribution = self._links[rank].receive()
                arrived[rank] = monotonic()
                if contribution.rank != rank:
                    raise InvalidMessageError(f"rank {rank} speaks for rank {contribution.rank}")
                complete = self.server.push(contribution)
                # Its values may be waiting in the socket: from now on only its end is news.
                self._poll.modify(fd, _END)
                deadline = deadline or arrived[rank] + self._timeout
        self._answer(complete, arrived)

    def _wait(self, deadline: float | None, missing: Callable[[], list[int]]) -> list[int]:
        """Sockets that have something to read; or the error that the run failed with."""
        ready = self._poll.poll(None if deadline is None else max(0.0, deadline - monotonic()) * 1000)
        if self.server.error is not None:
            raise self.server.error
        if not ready:
            raise self._late(f"ranks {missing()}")
        fds = [fd for fd, _ in ready]
        if self._waker in fds:
            os.read(self._waker, 4096)
        return [fd for fd in fds if fd != self._waker]

    def _late(self, whom: str) -> RoundTimeoutError:
        return RoundTimeoutError(
            f"Round {self.server.round} waited {self._timeout:g} s for {whom}. If their steps take that"
            " long, raise daskps.timeouts.round."
        )

    def _answer(self, contributions: list[Contribution], arrived: dict[int, float]) -> None:
        complete = max(arrived.values())
        counted = [c for c in contributions if c.weight > 0]
        result, finite = self._combined(counted)
        dtype = counted[0].dtype if counted else "float64"
        self._listen()  # before the answers: whatever comes after them takes a core from a rank
        # Who came last first: this thread runs on a core that a rank left which came early, and the
        # kernel would put it aside there for that rank before the others have their answers.
        for rank in reversed(arrived):
            link = self._links[rank]
            narrow = counted[0].narrow if counted and link.wire_dtype is not None else 0
            waited = complete - arrived[rank]
            link.answer(Answer(len(result), dtype, complete, waited, narrow, finite), result)

    def _combined(self, counted: list[Contribution]) -> tuple[np.ndarray, bool]:
        """The result, and whether all of it is finite."""
        if not counted:
            return np.empty(0), True
        first = counted[0]
        out = self._room(first)
        readers = [self._links[c.rank].reader(c) for c in counted]
        finite = combine(readers, sum(c.weight for c in counted) if first.reduction == "mean" else 1.0, out)
        return out, self._round_as_sent(out[: first.narrow]) and finite

    def _round_as_sent(self, values: np.ndarray) -> bool:
        """All ranks get the same, also those to whom nothing is sent; returns whether it is finite."""
        sent = any(link.wire_dtype is not None for link in self._links.values())
        if not len(values) or not sent or self.wire_dtype is None:
            return True
        round_in_place(values, self.wire_dtype)
        return bool(np.isfinite(values).all())

    def _room(self, c: Contribution) -> np.ndarray:
        """Where the result goes."""
        if self._results is not None:
            return self._results.values(c.dtype, c.size, c.offset)
        if self._private.nbytes < self.server.capacity:
            self._private = np.empty(-(-self.server.capacity // 8), "float64")
        return self._private.view(c.dtype)[: c.size]

    def _refuse(self, error: BaseException) -> None:
        self.server.fail(error)
        first = self.server.error or error
        for _, link in by_rank(self._links):
            link.refuse(first)

    def _end(self) -> None:
        with self._lock:
            self._over = True
            links, self._links = self._links, {}
            os.close(self._wake)
            os.close(self._waker)
        for link in links.values():
            link.hang_up()
            link.close()
        if self._results is not None:
            self._results.close_fd()
        self._results = None
        self._private = np.empty(0)
        switch_as_before()
        self._on_end()
