"""A folder of Parquet files with a log of commits, so that each run's files appear exactly once.

    TARGET/topic=T/date=D/part-....parquet     what readers see
    TARGET/_hastore/commits/00000001.json      a commit: the state after it, its files
    TARGET/_hastore/staging/RUN/...            files of a run that is not committed yet
    TARGET/_hastore/lock                       held by the run that is going on

Spark, pandas and Arrow skip names that begin with `_`, so they see no staged file. A commit is one
rename of its JSON file. After it, the staged files are renamed to their places, and the files that
they replace are removed. A run that dies in between is finished by the next one, before anything
else: every step can be repeated. The lock is released by the kernel when its process ends.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from hastore.addresses import folder_of_url
from hastore.errors import StoreBrokenError, StoreFullError, StoreInUseError, UsageError
from hastore.fs.filesystem import NO_ROOM
from hastore.fs.private_files import UMASK_MODE, open_fresh

COMPRESSIONS = ("snappy", "zstd", "lz4", "gzip", "none")  # of the files
_FORMAT = 1
_STATE = "_hastore"
_COMMIT_NAME = re.compile(r"([0-9]{8,})\.json")
_DATA_NAME = re.compile(r"part-([0-9a-f]{16}-(\d+|merged)|[0-9a-f]{32})\.(parquet|orc)")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")


@dataclass(frozen=True)
class StagedFile:
    """A file that a task has written and synced: its place under staging, and its final place.

    Both are relative to the target.
    """

    staged: str
    final: str
    rows: int
    size: int
    partition: tuple[tuple[str, str | None], ...] = ()  # (column, value), for Delta


class Target:
    """A target that this process has locked; use it in a `with`."""

    flat = False  # whether all files are in the target's own folder, not in one for each partition
    in_place = False  # whether files are written under their final names

    def __init__(self, path: str | os.PathLike[str], kind: str) -> None:
        """Name the target; `kind` is the job's, so that no other job writes into it.

        Raises UsageError for a place where a rename is not atomic, such as an object store.
        """
        self.path = local_path(os.fspath(path))
        self._kind = kind
        self._state = self.path / _STATE
        self._commits = self._state / "commits"
        self._lock: int | None = None
        self._unapplied = 0  # a commit that may be there while its files are still staged
        self.run = uuid.uuid4().hex
        self.number = 0  # of the last commit; 0 without one
        self.state: dict[str, Any] = {}  # of the last commit

    def __enter__(self) -> Self:
        """Lock the target and finish what a run that died has left.

        Raises UsageError if another run has the lock or the target is not one of this job, and
        StoreFullError.
        """
        try:
            with needs_room(self.path):
                self._create()
                self._recover()
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the run's staged files and release the lock.

        If the run ended within a commit, by Ctrl-C or a full disk, and the commit is there, they
        stay: the next run renames them to their places.
        """
        try:
            if not (self._unapplied and self._entry_path(self._unapplied).exists()):
                self.clear_staging()
        finally:
            self._unlock()

    @property
    def staging(self) -> Path:
        """Return the run's folder for staged files."""
        return self._state / "staging" / self.run

    @property
    def root(self) -> str:
        """Return where the tasks write: a path."""
        return str(self.path)

    def prepare(self, schema: pa.Schema) -> pa.Schema | None:
        """Return None: topic and date are the names of folders."""
        return None

    @property
    def staging_name(self) -> str:
        """Return the same, relative to the target."""
        return os.path.relpath(self.staging, self.path)

    def look(self) -> dict[str, Any]:
        """Return the state of the last commit, and change nothing; {} without a commit.

        Raises UsageError for what `with` would refuse, but another run may have the lock.
        """
        self._check_place()
        number = self._last()
        if not number:
            return {}
        entry = self._read_entry(number)
        self._check(entry)
        return dict(entry["state"])

    def commit(
        self,
        state: Mapping[str, Any],
        files: Sequence[StagedFile],
        *,
        removed: Sequence[str] = (),
    ) -> None:
        """Make files visible and remove others, as one step that no crash divides.

        When this returns, the commit is durable. `state` is what the next run finds as `state`.
        Raises StoreFullError; then the commit may have taken place.
        """
        number = self.number + 1
        self._unapplied = number
        with needs_room(self.path):
            entry = self._write_entry(number, state, files, removed)  # the commit
            self.number, self.state = number, dict(state)
            self._apply(entry)
        self._unapplied = 0

    def files(self) -> dict[str, int]:
        """Return the job's visible files and their sizes in bytes; the paths are relative.

        Files that somebody else has put there are not among them, so they are never removed.
        """
        found = {}
        for folder, names, files in os.walk(self.path):
            names[:] = sorted(name for name in names if not name.startswith(("_", ".")))
            for name in sorted(files):
                if _DATA_NAME.fullmatch(name):
                    path = Path(folder, name)
                    found[str(path.relative_to(self.path))] = path.stat().st_size
        return found

    # -- inside ------------------------------------------------------------------------------------

    def _check_place(self) -> None:
        """Raise UsageError unless the path is free, an empty folder, or a target."""
        if self.path.exists() and not self._state.exists():
            if not self.path.is_dir():
                raise UsageError(f"the target {self.path} is a file; name a folder")
            if any(self.path.iterdir()):
                raise UsageError(
                    f"the target {self.path} holds files of something else; name a new or empty "
                    "folder, or the --format of the table that it is"
                )

    def _create(self) -> None:
        self._check_place()
        self._commits.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._state / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failed:
            os.close(lock)
            if failed.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise UsageError(
                f"another run writes into {self.path}; wait until it has ended"
            ) from failed
        self._lock = lock

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _recover(self) -> None:
        self.number = self._last()
        if self.number:
            entry = self._read_entry(self.number)
            self._check(entry)
            self.state = entry["state"]
            self._apply(entry)
        self._renew_staging()

    def _renew_staging(self) -> None:
        """Remove what a run that died has staged, and make the folder of this run."""
        for left in self._commits.glob(".*.new"):
            left.unlink()
        try:
            shutil.rmtree(self._state / "staging")
        except OSError as failed:
            # Nothing is staged yet; or a task has outlived its driver and writes there, and then
            # a later run removes its files.
            if failed.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise
        self.staging.mkdir(parents=True)
        for folder in (self.staging.parent, self._state, self.path):
            _sync_folder(folder)

    def _numbers(self) -> list[int]:
        """Return the numbers of all commits."""
        names = os.listdir(self._commits) if self._commits.is_dir() else []
        matches = map(_COMMIT_NAME.fullmatch, names)
        return sorted(int(match[1]) for match in matches if match)

    def _last(self) -> int:
        """Return the number of the last commit; 0 without one."""
        return max(self._numbers(), default=0)

    def _entry_path(self, number: int) -> Path:
        return self._commits / f"{number:08}.json"

    def _read_entry(self, number: int) -> dict[str, Any]:
        return _read_json(self._entry_path(number))

    def _write_entry(
        self,
        number: int,
        state: Mapping[str, Any],
        files: Sequence[StagedFile],
        removed: Sequence[str],
    ) -> dict[str, Any]:
        """Write what a commit is, at once and durably; return it."""
        _sync_folder(self.staging)
        entry = {
            "format": _FORMAT,
            "job": self._kind,
            "number": number,
            "state": state,
            "files": [
                {"staged": one.staged, "final": one.final, "rows": one.rows, "bytes": one.size}
                for one in files
            ],
            "removed": list(removed),
        }
        _write_json(self._entry_path(number), entry)
        return entry

    def _check(self, entry: Mapping[str, Any]) -> None:
        if entry.get("format") != _FORMAT:
            raise UsageError(f"a newer version of hastore wrote {self.path}; use that one")
        if entry.get("job") != self._kind:
            raise UsageError(
                f"{self.path} is a target of `hastore pipeline {entry.get('job')}`; name another "
                "folder"
            )

    def clear_staging(self) -> None:
        """Remove the staged files that no commit has named."""
        shutil.rmtree(self.staging, ignore_errors=True)

    def _apply(self, entry: Mapping[str, Any]) -> None:
        """Rename the files of a commit to their places and remove others; may be repeated.

        A file that is at neither place was there once: somebody has removed it since.
        """
        folders = self._move(entry["files"])
        for name in entry["removed"]:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).unlink()
            folders.add((self.path / name).parent)
        self._sync(folders)

    def _move(self, files: Sequence[Mapping[str, Any]]) -> set[Path]:
        """Rename staged files to their places; return the folders to sync."""
        folders = set()
        for file in files:
            final = self.path / file["final"]
            staged = self.path / file["staged"]
            if staged.exists():
                try:
                    final.parent.mkdir(parents=True, exist_ok=True)
                except OSError as failed:
                    if failed.errno != errno.ENAMETOOLONG:
                        raise
                    # Runs are refused in time now (check_folders), but older versions were not.
                    raise UsageError(
                        f"{self.path} has a commit whose files cannot get to their places: the "
                        f"name of {os.path.dirname(file['final'])} is too long for its file "
                        f"system; remove {staged} to go on without its messages, and export that "
                        "topic to another target with --format delta"
                    ) from failed
                os.rename(staged, final)
                folders.add(final.parent)
        return folders

    def _sync(self, folders: set[Path]) -> None:
        """Make the names in folders durable, and the folders' own."""
        for folder in sorted(folders):
            if folder.exists():
                for one in (folder, *folder.relative_to(self.path).parents):
                    _sync_folder(self.path / one)


@contextlib.contextmanager
def needs_room(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the OSError of a full disk, or of a quota, into a StoreFullError that names the target.

    In a task, Spark hands that to the driver as it is.
    """
    try:
        yield
    except OSError as failure:
        if failure.errno not in NO_ROOM:
            raise
        raise StoreFullError(
            f"{os.fspath(target)}: no room is left on its file system "
            f"({os.strerror(failure.errno)}); free space there, and run the same command again"
        ) from failure


def another_run(path: Path | str) -> StoreInUseError:
    """Return the error of a run that may not commit: another one has, since this one began."""
    return StoreInUseError(
        f"another run has exported to {path} meanwhile, and nothing of this commit was made "
        "visible; wait until the other run has ended, and run the job again"
    )


def check_compression(name: str) -> None:
    """Raise UsageError unless the files can be compressed by this."""
    if name not in COMPRESSIONS:
        raise UsageError(f"compression is {name!r}; use " + ", ".join(COMPRESSIONS))


def local_path(text: str) -> Path:
    """Return a target's path. Raises UsageError for another file system than the local one."""
    match = _SCHEME.match(text)
    if match and match[1].lower() != "file":
        raise UsageError(
            f"the target {text!r} is not a folder of this machine: files of other file systems "
            "cannot be made visible by one atomic rename. Name a local or mounted folder; "
            "`export` and `compact` also take s3://BUCKET/FOLDER"
        )
    if match:
        text = folder_of_url(text)
        if not text.startswith("/"):
            raise UsageError(
                f"the target {text!r} names no folder of this machine: write the whole path, "
                "file:///FOLDER"
            )
    if not text.strip() or "\0" in text:
        raise UsageError("the target is empty; name a folder")
    return Path(text).absolute()


def spark_path(path: Path) -> str:
    """Return a path for `spark.read`, which takes some characters for patterns otherwise."""
    return re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", str(path))


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make a file's bytes durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    if path.exists():
        sync_file(path)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file at once and durably: it is there whole, or not at all."""
    new = path.with_name(f".{path.name}.new")
    with io.TextIOWrapper(open_fresh(new, UMASK_MODE), encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.rename(new, path)
    _sync_folder(path.parent)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise StoreBrokenError(f"{path} is damaged: {error}; restore it from a backup") from error
    if not isinstance(value, dict):
        raise StoreBrokenError(f"{path} is damaged: it holds no object; restore it from a backup")
    return value


def check_folders(root: str | os.PathLike[str], topics: Iterable[str]) -> None:
    """Raise UsageError for a topic whose folder under a path would have too long a name.

    To be called before a commit: one that names such files could never be completed.
    """
    there = next(path for path in (Path(root), *Path(root).parents) if path.exists())
    most = os.pathconf(there, "PC_NAME_MAX")
    for topic in topics:
        size = len(os.fsencode(folder_of(topic)))
        if size > most:
            raise UsageError(
                f"the topic {topic!r} cannot have a folder in {os.fspath(root)}: its name has "
                f"{size} bytes there, and the file system takes {most}. Leave this topic out "
                "(--topic, --pattern); give it another target, in a bucket (s3://BUCKET/FOLDER), "
                "or one of `export --format delta`"
            )


def folder_of(topic: str) -> str:
    """Return the name of a topic's folder."""
    return f"topic={escape(topic)}"


def escape(value: str) -> str:
    """Write a value as the name of a partition's folder, as Spark does; Spark reads it back."""
    return "".join(f"%{ord(c):02X}" if ord(c) < 32 or c in _ESCAPED else c for c in value)


_ESCAPED = frozenset("\"#%'*/:=?\\\x7f{[]^")
