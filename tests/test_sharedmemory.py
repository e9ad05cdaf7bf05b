"""Memory between two processes, on the two ends of one."""

import asyncio
import fcntl
import os
import re
import socket
import subprocess
import sys

import numpy as np
import pytest
from ranks import fds, hub, no_new_fds

from daskps import _joining, _sharedmemory
from daskps._sharedmemory import Segment

pytestmark = [
    pytest.mark.skipif(not _sharedmemory.is_available(), reason="needs memfd_create"),
    # What nobody closed says so when it is collected.
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),
]

ANOTHER_USER = 65534


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = fds()
    yield
    no_new_fds(before)


@pytest.fixture
def fd():
    fd = _sharedmemory.reserve(4096)
    yield fd
    os.close(fd)


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        theirs.settimeout(60)
        yield ours, theirs


@pytest.fixture
def listening():
    listener, name = _sharedmemory.listen()
    with listener:
        listener.settimeout(60)
        yield listener, name


class TestReserve:
    @pytest.mark.parametrize("size", [1, 4096, 1_000_000])
    def test_gives_memory_of_exactly_this_size(self, size):
        fd = _sharedmemory.reserve(size)
        assert os.fstat(fd).st_size == size
        os.close(fd)

    def test_memory_is_zero_and_has_no_name_in_the_file_system(self, fd):
        assert Segment(fd).values("float64", 512).tolist() == [0.0] * 512
        assert os.fstat(fd).st_nlink == 0
        assert not os.path.exists(os.readlink(f"/proc/self/fd/{fd}"))

    def test_pages_are_there_before_they_are_used(self, fd):
        assert os.fstat(fd).st_blocks * 512 >= 4096

    def test_is_not_inherited_by_children(self, fd):
        assert not os.get_inheritable(fd)

    @pytest.mark.parametrize("size", [0, 100, 4095, 4097, 1 << 20])
    def test_nobody_can_change_the_size(self, fd, size):
        """A peer that shrinks the file would make the next access of the other a SIGBUS."""
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
        assert os.fstat(fd).st_size == 4096

    def test_nobody_can_change_the_seals(self, fd):
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, _sharedmemory._F_ADD_SEALS, 0x8)
        Segment(fd).values("float64", 1)[:] = 1.0  # not sealed against writing

    @pytest.mark.parametrize("size", [1 << 50, (1 << 63) - 1])
    def test_of_more_than_there_is_is_an_os_error(self, size):
        with pytest.raises(OSError, match="memory"):
            _sharedmemory.reserve(size)

    @pytest.mark.parametrize("size", [0, -1])
    def test_of_nothing_is_an_os_error(self, size):
        with pytest.raises(OSError):
            _sharedmemory.reserve(size)

    def test_of_more_than_a_limit_allows_is_an_os_error(self):
        """In a process of its own, which a signal would end."""
        code = """if True:
            import os, resource
            from daskps import _sharedmemory
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            os.close(_sharedmemory.reserve(1 << 20))
            n_fds = len(os.listdir("/proc/self/fd"))
            try:
                _sharedmemory.reserve(2 << 20)
            except OSError as error:
                print("OSError", error.errno, len(os.listdir("/proc/self/fd")) - n_fds)
        """
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        assert (result.returncode, result.stderr) == (0, "")
        assert re.fullmatch(r"OSError \d+ 0\n", result.stdout)


class TestSegment:
    def test_two_of_one_memory_see_each_others_values(self, fd):
        one, other = Segment(os.dup(fd)), Segment(os.dup(fd))
        one.values("float32", 10)[:] = np.arange(10)
        assert other.values("float32", 10).tolist() == list(range(10))
        other.values("float64", 1, offset=80)[:] = 5.0
        assert one.values("float64", 11)[10] == 5.0
        one.close_fd()
        other.close_fd()

    def test_values_are_views_that_outlive_the_descriptor(self, fd):
        segment = Segment(os.dup(fd))
        first, second = segment.values("float64", 4), segment.values("float64", 2, offset=16)
        segment.close_fd()
        segment.close_fd()  # again is nothing
        del segment
        first[:] = [1.0, 2.0, 3.0, 4.0]
        assert second.tolist() == [3.0, 4.0]

    def test_none_at_all_is_a_view_too(self, fd):
        segment = Segment(os.dup(fd))
        assert segment.values("float32", 0).tolist() == []
        assert segment.values("float32", 0, offset=4096).tolist() == []
        segment.close_fd()

    @pytest.mark.parametrize(("size", "offset"), [(513, 0), (1, 4096), (1, 4092), (2**61, 0)])
    def test_beyond_the_end_is_an_error(self, fd, size, offset):
        segment = Segment(os.dup(fd))
        with pytest.raises(ValueError):
            segment.values("float64", size, offset)
        segment.close_fd()


class TestPassing:
    def test_gives_the_peer_the_same_memory(self, pair):
        ours = [Segment(_sharedmemory.reserve(size)) for size in (4096, 8192)]
        _sharedmemory.send(pair[0], ours)
        theirs = _sharedmemory.receive(pair[1], 2)
        for size, one, other in zip((4096, 8192), ours, theirs, strict=True):
            one.values("float64", size // 8)[:] = size
            assert set(other.values("float64", size // 8).tolist()) == {float(size)}
            one.close_fd()
            assert other.fd == -1  # the mapping alone holds it

    def test_arrives_after_the_sender_has_let_go(self, pair):
        segment = Segment(_sharedmemory.reserve(4096))
        segment.values("float64", 1)[:] = 7.0
        _sharedmemory.send(pair[0], [segment])
        segment.close_fd()
        del segment
        pair[0].close()
        (received,) = _sharedmemory.receive(pair[1], 1)
        assert received.values("float64", 1).tolist() == [7.0]

    @pytest.mark.parametrize("n_sent", [0, 1])
    def test_of_another_number_is_an_error_and_leaves_no_descriptor(self, pair, fd, n_sent):
        socket.send_fds(pair[0], [b"m"], [fd] * n_sent)
        with pytest.raises(OSError, match="expected 2 pieces of shared memory"):
            _sharedmemory.receive(pair[1], 2)

    def test_of_another_message_is_an_error_and_leaves_no_descriptor(self, pair, fd):
        socket.send_fds(pair[0], [b"x"], [fd] * 2)
        with pytest.raises(OSError, match="expected 2"):
            _sharedmemory.receive(pair[1], 2)

    def test_of_what_cannot_be_mapped_is_an_error_and_leaves_no_descriptor(self, pair, fd):
        empty = os.memfd_create("empty")
        socket.send_fds(pair[0], [b"m"], [fd, empty])
        os.close(empty)
        with pytest.raises(ValueError, match="empty"):
            _sharedmemory.receive(pair[1], 2)

    def test_from_nobody_is_an_error(self, pair):
        pair[0].close()
        with pytest.raises(OSError, match="expected 1"):
            _sharedmemory.receive(pair[1], 1)

    def test_survives_the_death_of_the_process_that_gave_it(self, pair):
        """And nothing is left of it: no file, and no descriptor but ours."""
        code = """if True:
            import os, signal, socket, sys
            from daskps import _sharedmemory
            segment = _sharedmemory.Segment(_sharedmemory.reserve(4096))
            segment.values("float64", 1)[:] = 7.0
            _sharedmemory.send(socket.socket(fileno=int(sys.argv[1])), [segment])
            os.kill(os.getpid(), signal.SIGKILL)
        """
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(pair[0].fileno())], pass_fds=[pair[0].fileno()]
        )
        (segment,) = _sharedmemory.receive(pair[1], 1)
        assert process.wait(60) < 0
        values = segment.values("float64", 512)
        assert values[0] == 7.0
        values[:] = 8.0


class TestListen:
    def test_names_are_random(self):
        opened = [_sharedmemory.listen() for _ in range(20)]
        names = {name for _, name in opened}
        assert len(names) == 20
        assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)
        for listener, _ in opened:
            listener.close()

    def test_leaves_nothing_in_the_file_system(self, listening):
        address = listening[0].getsockname()
        assert address == f"\0daskps-{listening[1]}".encode()

    def test_connects_the_two(self, listening):
        listener, name = listening
        ours = _sharedmemory.connect(name, 60)
        theirs, _ = listener.accept()
        with ours, theirs:
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"

    @pytest.mark.parametrize("name", ["0" * 32, "", "no such name"])
    def test_connecting_to_a_name_that_nobody_has_is_an_os_error(self, name):
        with pytest.raises(OSError):
            _sharedmemory.connect(name, 60)

    def test_name_is_free_again_when_the_listener_is_closed(self):
        listener, name = _sharedmemory.listen()
        listener.close()
        with pytest.raises(ConnectionRefusedError):
            _sharedmemory.connect(name, 60)


class AnotherUser:
    """The process under another user for the length of the block."""

    def __enter__(self):
        os.seteuid(ANOTHER_USER)

    def __exit__(self, *error):
        os.seteuid(0)


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")


class TestSameUser:
    def test_is_our_own(self, pair, listening):
        assert _sharedmemory.is_same_user(pair[0])
        with _sharedmemory.connect(listening[1], 60), listening[0].accept()[0] as sock:
            assert _sharedmemory.is_same_user(sock)

    @as_root
    def test_is_nobody_else(self, listening):
        with AnotherUser():
            stranger = _sharedmemory.connect(listening[1], 60)
        with stranger, listening[0].accept()[0] as sock:
            assert not _sharedmemory.is_same_user(sock)

    def test_is_decided_by_the_kernel_and_not_by_what_the_peer_says(self, monkeypatch, pair):
        monkeypatch.setattr(os, "getuid", lambda: ANOTHER_USER)
        assert not _sharedmemory.is_same_user(pair[0])


TOKEN = b"t" * _joining.TOKEN_BYTES


def passed_after(strangers):
    """What the rank gets of the scheduler after strangers have had their turn."""

    async def scenario(opened):
        listener, name = _sharedmemory.listen()
        passing = asyncio.create_task(_joining._pass_memory(listener, TOKEN, opened.rounds))
        try:
            for stranger in strangers:
                await asyncio.to_thread(stranger, name)
            link, segments = await asyncio.gather(passing, asyncio.to_thread(rank, name))
            link.close()
            return [segment.values("uint8", 0).size for segment in segments]
        finally:
            passing.cancel()
            listener.close()

    with hub(2, n_bytes=64) as opened:
        return asyncio.run(scenario(opened))


def rank(name):
    with _sharedmemory.connect(name, 60) as sock:
        sock.sendall(TOKEN)
        return _sharedmemory.receive(sock, 2)


def stranger(says):
    """Gets an end, and no memory."""

    def asks(name):
        with _sharedmemory.connect(name, 60) as sock:
            sock.sendall(says)
            if len(says) < len(TOKEN):
                sock.shutdown(socket.SHUT_WR)
            refused(sock)

    return asks


def refused(sock):
    try:
        data, fds, _, _ = socket.recv_fds(sock, 16, 4)
    except ConnectionResetError:  # what it said was not even read
        return
    assert (data, fds) == (b"", [])


def another_user(name):
    """Knows the token, and says nothing at all first."""
    with AnotherUser():
        sock = _sharedmemory.connect(name, 60)
    with sock:
        refused(sock)


class TestStranger:
    @pytest.mark.parametrize("says", [b"x" * 32, TOKEN[:-1] + b"x", b"", b"t", TOKEN[:-1]])
    def test_with_another_token_gets_nothing_and_the_rank_its_memory(self, says):
        assert passed_after([stranger(says)]) == [0, 0]
        assert passed_after([stranger(says)] * 3) == [0, 0]

    @as_root
    def test_of_another_user_gets_nothing_and_the_rank_its_memory(self):
        assert passed_after([another_user]) == [0, 0]

    def test_that_leaves_at_once_does_not_matter(self):
        assert passed_after([lambda name: _sharedmemory.connect(name, 60).close()]) == [0, 0]

    def test_without_memory_even_the_rank_gets_nothing(self, monkeypatch):
        """It finds the connection closed, and no descriptor is left."""
        calls = []

        def reserve(n_bytes):
            calls.append(n_bytes)
            if len(calls) == failing:
                raise OSError("no memory")
            return original(n_bytes)

        original = _sharedmemory.reserve
        monkeypatch.setattr(_sharedmemory, "reserve", reserve)
        monkeypatch.setattr("daskps._rounds.reserve", reserve)
        for failing in (1, 2):
            calls.clear()
            assert passed_after([stranger(TOKEN)]) == [0, 0]
            assert calls[:failing] == [64, 64][:failing]


class TestControlGroups:
    """What memory is left where a container, or a batch system, limits it."""

    def group(self, folder, limit, usage, version=2, inactive_file=0):
        folder.mkdir(parents=True, exist_ok=True)
        names = {2: ("memory.max", "memory.current"), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes")}
        for name, value in zip(names[version], (limit, usage), strict=True):
            (folder / name).write_text(f"{value}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")
        return folder

    @pytest.mark.parametrize("version", [1, 2])
    def test_room_is_what_is_not_used(self, tmp_path, version):
        group = self.group(tmp_path, 1000, 300, version)
        assert _sharedmemory._room_in(group) == 700

    def test_files_that_nobody_uses_count_as_room(self, tmp_path):
        assert _sharedmemory._room_in(self.group(tmp_path, 1000, 900, inactive_file=500)) == 600

    def test_no_limit_is_no_limit(self, tmp_path):
        assert _sharedmemory._room_in(self.group(tmp_path, "max", 300)) == float("inf")
        assert _sharedmemory._room_in(tmp_path / "absent") == float("inf")

    @pytest.mark.parametrize(("line", "base"), [
        ("0::/a/b", ""), ("7:memory:/a/b", "memory"), ("3:cpu,memory:/a/b", "memory"),
    ])  # fmt: skip
    def test_those_around_the_own_are_asked_too(self, tmp_path, monkeypatch, line, base):
        text = f"2:cpu:/c\n{line}\n"
        monkeypatch.setattr(_sharedmemory.Path, "read_text", lambda path, **_: text)
        root = tmp_path / base
        groups = list(_sharedmemory._memory_groups(tmp_path))
        assert groups == [root / "a" / "b", root / "a", root]

    def test_reserving_more_than_the_group_has_is_refused(self, monkeypatch, tmp_path):
        group = self.group(tmp_path, 1000, 300)
        monkeypatch.setattr(_sharedmemory, "_memory_groups", lambda: [group])
        with pytest.raises(OSError, match="no memory for 701 bytes"):
            _sharedmemory.reserve(701)
