"""Memory that a rank shares with the scheduler's process, and how both come by it.

A ``memfd`` has no name and no file, is not bound by the size of /dev/shm, and is gone when nobody
holds it. Its pages are reserved before use and its size is sealed, so that no access can fail later,
whatever a limit or a peer does.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # of further seals, shrinking and growing
_SO_PEERCRED = 17

_NAME_BYTES = 16


def is_available() -> bool:
    """Whether this system has what it takes."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(socket, "send_fds")


def reserve(n_bytes: int) -> int:
    """A file descriptor of new memory of exactly this size.

    Raises
    ------
    OSError
        If there is not so much memory.
    """
    if n_bytes > available():  # the kernel would look for it at the cost of other processes
        raise OSError(errno.ENOMEM, f"there is no memory for {n_bytes} bytes")
    fd = os.memfd_create("daskps", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, n_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def available() -> float:
    """How many bytes the system, and every control group around us, could give us."""
    room = math.inf
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            room = 1024 * int(line.split()[1])
    return min([room, *(_room_in(group) for group in _memory_groups())])


def _memory_groups(root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """The control groups that limit this process's memory, of either version, from the inmost out."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = root / "memory" if "memory" in controllers.split(",") else root
            if base != root or not controllers:
                group = base / path.lstrip("/")
                yield from (
                    folder for folder in (group, *group.parents) if base in (folder, *folder.parents)
                )


def _room_in(group: Path) -> float:
    """How many bytes a control group has left; what it holds of files, the kernel can give up."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # not of this version, or "max"
            held = int((group / usage).read_text())
            counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            return int((group / limit).read_text()) - held + int(counts.get("inactive_file", 0))
    return math.inf


class Segment:
    """Mapped shared memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, os.fstat(fd).st_size)
        self._known: tuple[tuple[str, int, int], np.ndarray] | None = None

    def values(self, dtype: str, size: int, offset: int = 0) -> np.ndarray:
        """A view of the memory, from an offset in bytes on."""
        place = dtype, size, offset
        if self._known is None or self._known[0] != place:  # it is the same in every step
            self._known = place, np.frombuffer(self._map, dtype, size, offset)
        return self._known[1]

    def close_fd(self) -> None:
        """Close the descriptor; the mapping goes with the last view of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def listen() -> tuple[socket.socket, str]:
    """An abstract Unix socket under a random name, which dies with the process."""
    name = secrets.token_hex(_NAME_BYTES)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(_address(name))
    listener.listen(1)
    listener.setblocking(False)
    return listener, name


def connect(name: str, timeout: float) -> socket.socket:
    """Connect to a listener of this host and network namespace.

    Raises
    ------
    OSError
        If there is none of this name.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(_address(name))
    except BaseException:
        sock.close()
        raise
    return sock


def is_same_user(sock: socket.socket) -> bool:
    """Whether the peer of a Unix socket runs under our user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.getuid())


def send(sock: socket.socket, segments: list[Segment]) -> None:
    """Pass the memory to the peer."""
    socket.send_fds(sock, [b"m"], [segment.fd for segment in segments])


def receive(sock: socket.socket, count: int) -> list[Segment]:
    """Take memory from the peer.

    Raises
    ------
    OSError
        If it sent something else.
    """
    message, fds, _, _ = socket.recv_fds(sock, 1, count)
    try:
        if message != b"m" or len(fds) != count:
            raise OSError(f"expected {count} pieces of shared memory, got {len(fds)}")
        segments = [Segment(fd) for fd in fds]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    for segment in segments:
        segment.close_fd()
    return segments


def _address(name: str) -> str:
    return f"\0daskps-{name}"
