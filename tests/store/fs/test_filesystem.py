"""The real file system behind its interface."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hastore.errors import StoreInUseError
from hastore.fs.filesystem import GROUP_READABLE, REAL, File, RealFileSystem
from hastore.fs.private_files import UMASK_MODE, append_private, open_fresh
from tests.store.faulty import FullDisk

LOCKER = """
import fcntl, sys, os
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
if sys.argv[2] == "flock":
    fcntl.flock(fd, fcntl.LOCK_EX)
else:
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)  # what Java's FileLock takes
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_is_written_zeroed_mapped_and_cut(tmp_path: Path) -> None:
    file = REAL.open(f"{tmp_path}/f", create=True)
    file.allocate(100_000)
    file.pwrite(b"x" * 50_000, 10_000)
    view = file.map()
    assert view[9_999:10_001] == b"\0x"
    file.zero(20_000, 80_000)
    assert bytes(view[19_999:20_002]) == b"x\0\0"
    assert file.pread(70_000, 30_000) == bytes(70_000)
    assert file.pread(10, 99_995) == bytes(5)
    file.truncate(10)
    assert file.size == os.path.getsize(file.path) == 10
    file.close()
    file.close()


def test_zeroing_leaves_holes_alone(tmp_path: Path) -> None:
    file = REAL.open(f"{tmp_path}/f", create=True)
    file.truncate(64 << 20)
    file.pwrite(b"data", 32 << 20)
    file.zero(0, 64 << 20)
    assert os.stat(file.path).st_blocks * 512 < 1 << 20
    assert not any(file.map()[:])
    file.close()


def test_whether_a_range_is_zero(tmp_path: Path) -> None:
    with contextlib.closing(REAL.open(str(tmp_path / "file"), create=True)) as file:
        file.truncate(64 << 20)
        assert file.is_zero(0, 64 << 20)
        file.pwrite(b"x", 20_000)
        file.pwrite(b"x", 40 << 20)
        assert not file.is_zero(0, 64 << 20)
        assert not file.is_zero(20_000, 1)
        assert file.is_zero(20_001, 1 << 20)
        assert not file.is_zero(20_001, 64 << 20)
        file.pwrite(bytes(1 << 20), 50 << 20)
        assert not file.is_zero(50 << 20, 1 << 20)  # so much is not read


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no /dev/shm, a tmpfs, here")
def test_zeroing_where_the_file_system_cannot() -> None:
    path = f"/dev/shm/hastore-test-{os.getpid()}"
    file = REAL.open(path, create=True)
    try:
        file.allocate(1 << 20)
        file.pwrite(b"y" * 5000, 3000)
        file.zero(4000, 1 << 20)
        assert file.pread(5, 3998) == b"yy\0\0\0"
        assert not any(file.pread(1 << 20, 4000))
    finally:
        os.unlink(path)
        file.close()


def test_errors_name_the_file(tmp_path: Path) -> None:
    file = REAL.open(f"{tmp_path}/f", create=True)
    file.close()
    read_only = REAL.open(f"{tmp_path}/f", writable=False)
    with pytest.raises(OSError, match=f"{tmp_path}/f") as failure:
        read_only.pwrite(b"x", 0)
    assert failure.value.errno == errno.EBADF
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/f"):
        REAL.make_dirs(f"{tmp_path}/f/below")
    with pytest.raises(FileNotFoundError):
        REAL.open(f"{tmp_path}/none")
    assert REAL.list_dir(f"{tmp_path}/none") == []


def test_replace_and_copy(tmp_path: Path) -> None:
    path = f"{tmp_path}/f"
    REAL.replace_bytes(path, b"one, long")
    REAL.replace_bytes(path, b"two")
    assert REAL.read_bytes(path) == b"two"
    assert REAL.list_dir(str(tmp_path)) == ["f"]
    REAL.copy(path, f"{tmp_path}/g")
    assert REAL.read_bytes(f"{tmp_path}/g", 2) == b"tw"
    REAL.make_dirs(f"{tmp_path}/a/b/c")
    assert REAL.is_dir(f"{tmp_path}/a/b/c")
    REAL.remove_tree(f"{tmp_path}/a")
    assert not REAL.exists(f"{tmp_path}/a")
    assert REAL.free_bytes(str(tmp_path)) > 0


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_planted_link_is_never_written_through(tmp_path: Path, link: Callable[..., None]) -> None:
    """Another user has guessed the temporary name, and hopes that root writes through it."""
    path, victim = f"{tmp_path}/once.json", tmp_path / "victim"
    victim.write_text("precious")
    link(victim, f"{path}.tmp")
    REAL.replace_bytes(path, b"new")
    assert victim.read_text() == "precious"
    assert REAL.read_bytes(path) == b"new" and not os.path.islink(path)
    assert REAL.list_dir(str(tmp_path)) == ["once.json", "victim"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EINVAL])
def test_root_that_may_give_no_file_away_writes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Root of a container without capabilities, or whose folder belongs to a user of the host."""

    def fchown(_descriptor: int, _user: int, _group: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "fchown", fchown)
    REAL.replace_bytes(f"{tmp_path}/abort", b"1")
    assert REAL.read_bytes(f"{tmp_path}/abort") == b"1"


def test_what_commands_write_does_not_follow_a_planted_link(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "figure.png.tmp"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic"):
        append_private(link)
    with open_fresh(link, UMASK_MODE) as file:
        file.write(b"new")
    assert victim.read_text() == "precious" and link.read_text() == "new"
    append_private(tmp_path / "node1.log").close()
    assert stat.S_IMODE((tmp_path / "node1.log").stat().st_mode) == 0o600


def test_a_new_file_is_not_made_through_a_link(tmp_path: Path) -> None:
    os.symlink(tmp_path / "victim", tmp_path / "f")
    for make in (lambda path: REAL.open(path, create=True), REAL.create_new, REAL.lock):
        with pytest.raises(OSError, match=f"{tmp_path}/f"):
            make(f"{tmp_path}/f")
    assert not (tmp_path / "victim").exists()


def test_what_could_not_be_written_leaves_no_temporary_file(tmp_path: Path) -> None:
    class Full(RealFileSystem):
        def rename(self, source: str, target: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", target)

    with pytest.raises(OSError, match="No space"):
        Full().replace_bytes(f"{tmp_path}/f", b"x")
    assert REAL.list_dir(str(tmp_path)) == []


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_files_are_private_from_birth(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        REAL.make_dirs(f"{tmp_path}/a/b")
        REAL.open(f"{tmp_path}/a/b/file", create=True).close()
        REAL.create_new(f"{tmp_path}/a/b/new").close()
        REAL.lock(f"{tmp_path}/a/b/lock").close()
        REAL.replace_bytes(f"{tmp_path}/a/b/state", b"x")
        REAL.copy(f"{tmp_path}/a/b/state", f"{tmp_path}/a/b/copy")
    finally:
        os.umask(before)
    folder = tmp_path / "a"
    for place in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(place.stat().st_mode)
        assert mode == (0o700 if place.is_dir() else 0o600), f"{place} has mode {mode:o}"


def test_the_group_may_read_if_that_is_asked_for(tmp_path: Path) -> None:
    before = os.umask(0o027)  # as a node with store.group_read sets it
    try:
        GROUP_READABLE.make_dirs(f"{tmp_path}/a")
        GROUP_READABLE.replace_bytes(f"{tmp_path}/a/state", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "a" / "state").stat().st_mode) == 0o640
    for fs, mode in ((GROUP_READABLE, 0o750), (REAL, 0o700)):
        (tmp_path / "a").chmod(0o777)
        assert fs.restrict(f"{tmp_path}/a") == 0o777
        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == mode
        assert fs.restrict(f"{tmp_path}/a") is None
    os.symlink(tmp_path / "open", tmp_path / "link")
    (tmp_path / "open").mkdir(mode=0o700)
    assert REAL.restrict(f"{tmp_path}/link") is None
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(OSError, match="not followed: use chmod"):  # who planted it chose what
        REAL.restrict(f"{tmp_path}/link")
    assert (tmp_path / "open").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("name", ["hastore/node.json", "abort", "dledger-n1/currterm"])
def test_a_full_disk_has_a_reserve_for_small_files(tmp_path: Path, name: str) -> None:
    fs, path = FullDisk(), f"{tmp_path}/{name}"
    fs.make_dirs(os.path.dirname(path))
    fs.replace_bytes(path, b"old")
    fs.keep_reserve(f"{tmp_path}/hastore", [5000, 4096, 100])
    reserve = [f"{size:012d}.{number}" for size, number in ((4096, 0), (4096, 1), (8192, 0))]
    assert fs.list_dir(f"{tmp_path}/hastore/reserve") == sorted(reserve)
    fs.full = True
    for number, data in enumerate([b"new" * 1000, b"x" * 8000, b"newer"]):
        fs.replace_bytes(path, data)
        assert fs.read_bytes(path) == data, number
    assert fs.list_dir(f"{tmp_path}/hastore/reserve") == []
    with pytest.raises(OSError, match="No space left"):
        fs.replace_bytes(path, b"no room")
    assert fs.read_bytes(path) == b"newer" and not fs.exists(f"{path}.tmp")
    fs.full = False
    fs.keep_reserve(f"{tmp_path}/hastore", [5000])
    assert fs.list_dir(f"{tmp_path}/hastore/reserve") == [f"{8192:012d}.0"]


def test_the_reserve_is_made_anew_at_once_and_follows_the_sizes(tmp_path: Path) -> None:
    place = tmp_path / "reserve"
    REAL.keep_reserve(str(tmp_path), [4096, 4096, 10_000])
    (place / f"{4096:012d}.0").write_bytes(b"")  # a power loss has taken its room
    (place / "something").write_bytes(b"")
    REAL.keep_reserve(str(tmp_path), [4096, 100_000])
    assert [one.stat().st_size for one in sorted(place.iterdir())] == [4096, 131_072]

    class OnceFull(RealFileSystem):
        refused = 0

        def create_new(self, path: str) -> File:
            self.refused += 1
            if self.refused == 1:
                raise OSError(errno.ENOSPC, "No space left on device", path)
            return super().create_new(path)

    OnceFull().replace_bytes(f"{tmp_path}/f", b"x" * 5000)
    assert os.stat(tmp_path / "f").st_size == 5000
    assert [one.stat().st_blocks * 512 for one in sorted(place.iterdir())] == [4096, 131_072]


def test_a_reserve_on_another_disk_and_one_without_its_room_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash leaves a file without room; and `dledger-n1` may be a link to another disk."""
    fs, path = FullDisk(), f"{tmp_path}/dledger-n1/currterm"
    fs.make_dirs(os.path.dirname(path))
    fs.keep_reserve(f"{tmp_path}/hastore", [1, 1])
    (tmp_path / "hastore" / "reserve" / f"{4096:012d}.0").write_bytes(b"")
    fs.full = True
    fs.replace_bytes(path, b"7")
    assert fs.read_bytes(path) == b"7"
    assert fs.list_dir(f"{tmp_path}/hastore/reserve") == [f"{4096:012d}.0"]
    fs.full = False
    fs.keep_reserve(f"{tmp_path}/hastore", [1])
    fs.full = True

    def rename(_fs: object, source: str, target: str) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), source, None, target)

    monkeypatch.setattr(RealFileSystem, "rename", rename)
    with pytest.raises(OSError, match="No space left"):  # a disk that fails closes the store
        fs.replace_bytes(path, b"8")
    with pytest.raises(OSError, match="No space left"):
        fs.renew_names(f"{tmp_path}/dledger-n1")
    assert len(fs.list_dir(f"{tmp_path}/hastore/reserve")) == 1


def test_two_threads_that_make_a_reserve_anew_leave_it_whole(tmp_path: Path) -> None:
    place = f"{tmp_path}/reserve"

    class Late(RealFileSystem):
        """Another thread takes, or puts back, a file between two calls of this one."""

        def list_dir(self, path: str) -> list[str]:
            found = super().list_dir(path)
            for name in found:
                os.rename(f"{path}/{name}", f"{tmp_path}/taken")
            return found

        def create_new(self, path: str) -> File:
            os.rename(f"{tmp_path}/taken", path)
            return super().create_new(path)

    REAL.keep_reserve(str(tmp_path), [4096])
    Late().keep_reserve(str(tmp_path), [4096])
    assert [os.stat(f"{place}/{name}").st_size for name in os.listdir(place)] == [4096]


def test_names_are_renewed_on_a_full_disk(tmp_path: Path) -> None:
    fs, log = FullDisk(), f"{tmp_path}/commitlog"
    fs.make_dirs(log)
    fs.keep_reserve(f"{tmp_path}/hastore", [1])
    fs.full = True
    fs.renew_names(log)
    (tmp_path / "commitlog" / ".renewed").touch()
    fs.renew_names(log)
    assert fs.list_dir(log) == [] and len(fs.list_dir(f"{tmp_path}/hastore/reserve")) == 1


@pytest.mark.parametrize("kind", ["flock", "lockf"])
def test_a_lock_held_by_another_process_is_refused(tmp_path: Path, kind: str) -> None:
    path = f"{tmp_path}/lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCKER, path, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreInUseError, match="another process"):
            REAL.lock(path)
    finally:
        holder.communicate()
    REAL.lock(path).close()


def test_a_second_lock_of_this_process_is_refused_and_the_first_stays(tmp_path: Path) -> None:
    path = f"{tmp_path}/lock"
    held = REAL.lock(path)
    with pytest.raises(StoreInUseError):
        REAL.lock(path)
    probe = (
        "import fcntl, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)\n"
    )
    refused = subprocess.run([sys.executable, "-c", probe, path], capture_output=True, check=False)
    assert refused.returncode != 0  # the record lock survived the refused attempt
    held.close()
    REAL.lock(path).close()


def test_a_lock_that_is_closed_twice_leaves_the_next_one_alone(tmp_path):
    """The garbage collector closes each file again, perhaps when the next lock is held."""
    path = f"{tmp_path}/lock"
    first = REAL.lock(path)
    first.close()
    second = REAL.lock(path)
    first.close()
    del first
    with pytest.raises(StoreInUseError, match="this process has the store open already"):
        REAL.lock(path)
    second.close()
    REAL.lock(path).close()


def test_a_lock_may_be_given_back_while_the_locks_are_looked_through(tmp_path, monkeypatch):
    """The garbage collector closes a lock at any moment, in the thread that looks."""
    locks, stat = [], os.stat
    for name in ("one", "two", "three"):
        REAL.make_dirs(f"{tmp_path}/{name}")
        locks.append(REAL.lock(f"{tmp_path}/{name}/lock"))

    def collects(*given, **named):
        if str(given[0]).endswith("/lock") and len(locks) == 3:
            locks.pop().close()
        return stat(*given, **named)

    monkeypatch.setattr(os, "stat", collects)
    REAL.make_dirs(f"{tmp_path}/one/index")
    assert len(locks) == 2
    for lock in locks:
        lock.close()


def test_a_locked_directory_that_was_moved_is_not_made_again(tmp_path):
    root, aside = tmp_path / "store", tmp_path / "aside"
    REAL.make_dirs(str(root))
    lock = REAL.lock(f"{root}/lock")
    REAL.make_dirs(f"{root}/consumequeue/t")
    root.rename(aside)
    for path in (root, root / "index", root / "consumequeue" / "t" / "0"):
        with pytest.raises(FileNotFoundError, match="moved, replaced or removed while in use"):
            REAL.make_dirs(str(path))
    assert not root.exists()
    root.mkdir()
    (root / "lock").touch()  # another directory stands in its place
    for path in (root / "index", root / "consumequeue" / "t" / "0"):
        with pytest.raises(FileNotFoundError, match="moved, replaced or removed while in use"):
            REAL.make_dirs(str(path))
    assert [one.name for one in root.iterdir()] == ["lock"]
    REAL.make_dirs(f"{root}s/index")  # its name only begins like that
    lock.close()
    REAL.make_dirs(f"{root}/index")
    assert (root / "index").is_dir()


def test_the_mount_of_a_path_that_is_not_there_is_that_of_its_folder(tmp_path: Path) -> None:
    assert REAL.mount_id(f"{tmp_path}/not/there") == REAL.mount_id(str(tmp_path))
    assert REAL.mount_id("/proc") == ""  # no disk, no page that a disk should have


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_file_system_that_is_mounted_anew_has_another_mount_id(tmp_path: Path) -> None:
    image, folder, other = (f"{tmp_path}/{name}" for name in ("image", "folder", "other"))
    os.mkdir(folder)
    os.mkdir(other)
    with open(image, "wb") as file:
        file.truncate(16 << 20)
    seen = []
    for _ in range(2):
        made = subprocess.run(
            f"test -s {image}.made || mkfs.ext4 -q {image} && echo > {image}.made && "
            f"mount -o loop {image} {folder}",
            shell=True, check=False, capture_output=True, text=True,
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"no ext4 can be mounted here: {made.stderr}")
        try:
            seen.append(REAL.mount_id(folder))
            assert REAL.mount_id(f"{folder}/lost+found") == seen[-1]
            subprocess.check_call(["mount", "--bind", folder, other])  # as a container has it
            try:
                assert REAL.mount_id(other) == seen[-1]
            finally:
                subprocess.check_call(["umount", other])
        finally:
            subprocess.check_call(["umount", folder])
    assert all(seen) and seen[0] != seen[1]
