"""Who may read a file that a command of another user has replaced."""

from __future__ import annotations

import errno
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator

import pytest

from hastore.errors import ConfigError
from hastore.fs.private_files import create_file, replace_file

# Numbers that no machine of these tests has; of nobody's groups only the own one is known.
NODE, ALICE, OPS, OTHERS = 61_001, 61_002, 61_003, 61_004


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder in which the group OPS may write; pytest's own are closed to other users."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be two users")
    with tempfile.TemporaryDirectory() as made:
        os.chown(made, 0, OPS)
        os.chmod(made, 0o770)
        yield pathlib.Path(made)


def replaced_by_alice(path: pathlib.Path, mode: int) -> str:
    """Replace a file as ALICE, who is in OPS; return the error, "" without one."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([OPS])
            os.setgid(ALICE)
            os.setuid(ALICE)
            replace_file(str(path), b"new", mode)
        except BaseException as failure:
            os.write(writer, f"{type(failure).__name__}: {failure}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        return said.read()


@pytest.mark.parametrize(
    ("user", "group", "mode"),
    [(0, OPS, 0o640), (ALICE, OPS, 0o640), (NODE, OPS, 0o664), (ALICE, OTHERS, 0o600)],
)
def test_a_replaced_file_keeps_its_group(
    folder: pathlib.Path, user: int, group: int, mode: int
) -> None:
    path = folder / "node.yaml"
    path.write_bytes(b"old")
    os.chown(path, user, group)
    os.chmod(path, mode)
    assert replaced_by_alice(path, mode) == ""
    found = path.stat()
    assert path.read_bytes() == b"new" and stat.S_IMODE(found.st_mode) == mode
    assert found.st_gid == (OPS if group == OPS else ALICE)


@pytest.mark.parametrize(("user", "group"), [(NODE, OPS), (ALICE, OTHERS)])
def test_a_file_that_the_node_could_not_read_any_more_stays(
    folder: pathlib.Path, user: int, group: int
) -> None:
    path = folder / "node.yaml"
    path.write_bytes(b"old")
    os.chown(path, user, group)
    os.chmod(path, 0o660)
    assert ConfigError.__name__ in (said := replaced_by_alice(path, 0o660)), said
    assert f"{path}: belongs to user {user} and group {group}, and one of them" in said
    assert path.read_bytes() == b"old" and path.stat().st_uid == user
    assert [*folder.iterdir()] == [path]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "make room on its disk"), (errno.EDQUOT, "make room on its disk"),
     (errno.EROFS, "file system is read-only"), (errno.EACCES, "check its folder and permissions")],
)  # fmt: skip
def test_a_file_that_cannot_be_written_says_what_to_do(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    path = tmp_path / "node.yaml"
    path.write_bytes(b"old")
    monkeypatch.setattr("tempfile.mkstemp", fail)
    with pytest.raises(ConfigError, match=remedy):
        replace_file(str(path), b"new", 0o644)
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match=remedy):
        create_file(str(tmp_path / "new.yaml"), b"new", 0o644)
    assert [one.name for one in tmp_path.iterdir()] == ["node.yaml"] and path.read_bytes() == b"old"
