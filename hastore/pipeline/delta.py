"""A target that is a Delta table: a commit of the export is one commit of the table.

    TARGET/_delta_log/...                      Delta's own log: what readers see
    TARGET/part-....parquet                    data files
    TARGET/_hastore/commits/00000001.json      the state of the export after its commit 1

The state of commit N is written first. Then one commit of the table adds the files and sets the
number N of the application "hastore-export" (Delta's `txn` action). So the table alone decides
whether commit N took place; the next run removes what belongs to a commit that did not.

Delta's RESTORE sets a table back by a new version, which keeps that number, and the property
delta.setTransactionRetentionDuration removes it. The history keeps the action of each commit.
"""

import contextlib
import datetime
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from hastore.errors import HastoreError, StoreBrokenError, UsageError
from hastore.pipeline.parquet_files import PARTITIONS, table_schema
from hastore.pipeline.places import place_of
from hastore.pipeline.target import StagedFile, Target, needs_room

if TYPE_CHECKING:
    from deltalake import DeltaTable

# Older ones leave out the numbers of applications when they add files to a table.
_LEAST_VERSION = (1, 6)
# What deltalake takes for something else: it decodes %20, ends a URL at # and ?, and reads \ in a
# path as /. So a table would be elsewhere than its files, perhaps where another one is.
_ODD_IN_URL = re.compile(r"%[0-9A-Fa-f]{2}|[#?\x00-\x1f]")
_ODD_IN_PATH = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f]")
APPLICATION = "hastore-export"
DELTA_JOB = "export --format delta"


class _Version(NamedTuple):
    """What the history has of a version: the number of the export's commit, if it is one."""

    number: int | None
    info: Mapping[str, Any]


class DeltaLog:
    """The log of a table, in a folder or, with the options of a bucket, elsewhere."""

    def __init__(self, place: str, options: dict[str, str] | None = None) -> None:
        """Name the table.

        Raises UsageError without deltalake, with one that is too old, or for a place that it takes
        for another.
        """
        try:
            import deltalake
        except ImportError as missing:
            raise UsageError(
                'an export to Delta needs deltalake: pip install "hastore[delta]"'
            ) from missing
        if tuple(map(int, re.findall(r"\d+", deltalake.__version__)[:2])) < _LEAST_VERSION:
            raise UsageError(
                f"deltalake {deltalake.__version__} loses the number of a commit, and the next run "
                "would undo that commit: pip install --upgrade deltalake"
            )
        if (_ODD_IN_URL if "://" in place else _ODD_IN_PATH).search(place):
            raise UsageError(
                f"a Delta table cannot be at {place}, which deltalake takes for another place: "
                "leave out %, #, ? and \\, and name another one"
            )
        self._place = place
        self._options = options
        self._seen: dict[int, _Version] = {}  # of a bucket, each takes a request

    def table(self) -> "DeltaTable | None":
        """Return the table as it is now; None if there is none."""
        from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self._place, storage_options=self._options)
        except TableNotFoundError:
            return None

    def add(
        self,
        table: "DeltaTable | None",
        marks: Mapping[str, int],
        schema: pa.Schema,
        partition_by: Sequence[str],
        files: Sequence[StagedFile],
    ) -> None:
        """Add files to the table, or make it, by one commit with versions of applications.

        `schema` is the table's, with the columns of `partition_by`, which the files do not have.
        If a commit since `table` was read has set one of the versions, deltalake refuses this one.
        Raises DeltaError and OSError.
        """
        from deltalake import CommitProperties, Schema, Transaction
        from deltalake.transaction import AddAction, create_table_with_add_actions

        whole = Schema.from_arrow(schema)
        now_ms = time.time_ns() // 1_000_000
        actions = [
            AddAction(
                file.final,
                file.size,
                dict(file.partition),
                now_ms,
                True,
                json.dumps({"numRecords": file.rows}),
            )
            for file in files
        ]
        properties = CommitProperties(
            app_transactions=[Transaction(name, mark, now_ms) for name, mark in marks.items()],
            custom_metadata={"hastoreCommit": next(iter(marks.values()))},
        )
        if table is None:
            create_table_with_add_actions(
                self._place,
                whole,
                actions,
                mode="error",
                partition_by=list(partition_by),
                storage_options=self._options,
                commit_properties=properties,
            )
            return
        table.create_write_transaction(
            list(actions),
            mode="append",
            schema=whole,
            partition_by=list(partition_by),
            commit_properties=properties,
        )

    def last_number(self, table: "DeltaTable", states: Callable[[], Sequence[object]]) -> int:
        """Return the number of the export's last commit; 0 if neither table nor history has one.

        Without `states` of commits the table is another program's, whose history may be long.
        """
        number: int | None = table.transaction_version(APPLICATION)
        if not number and states():
            number = self._find_commit(table, through_restores=False)
        return number or 0

    def check_shown(self, table: "DeltaTable", number: int) -> None:
        """Raise StoreBrokenError if the table was set back to a version before commit `number`.

        Versions may be gone from the history, and then there is no telling.
        """
        shown = self._find_commit(table, through_restores=True)
        if shown is not None and shown < number:
            raise StoreBrokenError(
                f"the Delta table {self._place} shows the export's commits up to {shown}, but "
                f"commit {number} took place: the table was set back to an older version. Restore "
                "a newer one, or export to a new table"
            )

    def merge(self, file_bytes: int) -> tuple[int, int]:
        """Let Delta merge small files; return how many became how many."""
        table = self.table()
        if table is None:
            return 0, 0
        found = table.optimize.compact(target_size=file_bytes)
        return found["numFilesRemoved"], found["numFilesAdded"]

    # -- inside ------------------------------------------------------------------------------------

    def _find_commit(self, table: "DeltaTable", *, through_restores: bool) -> int | None:
        """Return the number of the export's last commit in the history; None if it is not there.

        With `through_restores` it is the last one that the table shows: after a RESTORE the table
        is what it was at an older version.
        """
        at = table.version()
        while at >= 0 and (version := self._history_at(at)) is not None:
            if version.number is not None:
                return version.number
            is_restore = through_restores and version.info.get("operation") == "RESTORE"
            at = self._version_restored(version.info, at) if is_restore else at - 1
        return None

    def _version_restored(self, entry: Mapping[str, Any], at: int) -> int:
        """Return the version to which that of a RESTORE has set the table back; -1 if unknown."""
        version, limit_ms = _restored_to(entry)
        if limit_ms is None:
            return -1 if version is None else min(version, at - 1)
        while at > 0:
            at -= 1
            older = self._history_at(at)
            if older is None:
                break
            if older.info.get("timestamp", limit_ms + 1) <= limit_ms:
                return at
        return -1

    def _history_at(self, version: int) -> _Version | None:
        """Return what the history has of a version; None if it is gone.

        deltalake gives the history only as a whole, and keeps all threads waiting meanwhile.
        """
        if version in self._seen:
            return self._seen[version]
        place, name = place_of(self._place), f"_delta_log/{version:020}.json"
        try:
            if place.filesystem is None:
                data = Path(place.path(name)).read_bytes()
            else:
                with place.filesystem.open_input_stream(place.path(name)) as stream:
                    data = stream.read()
        except FileNotFoundError:
            return None
        seen = self._seen[version] = _parse_version(data)
        return seen


def _parse_version(data: bytes) -> _Version:
    number: int | None = None
    info: Mapping[str, Any] = {}
    for line in data.splitlines():
        if b'"commitInfo"' in line or b'"txn"' in line:
            action = json.loads(line)
            info = action.get("commitInfo", info)
            transaction = action.get("txn", {})
            if transaction.get("appId") == APPLICATION:
                number = int(transaction["version"])
    return _Version(number, info)


def _restored_to(entry: Mapping[str, Any]) -> tuple[int | None, float | None]:
    """Return the version, or the time in ms since 1970, to which a RESTORE has set a table back.

    Both are None if the entry of the history does not say it.
    """
    given = {
        name: str(value).strip('"')  # Spark writes JSON
        for name, value in (entry.get("operationParameters") or {}).items()
        if value not in (None, "null")
    }
    try:
        if "version" in given:
            return int(given["version"]), None
        if "datetime" in given:  # of deltalake
            return None, float(given["datetime"])
        moment = datetime.datetime.fromisoformat(given["timestamp"])
        return None, moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp() * 1000
    except (KeyError, ValueError):
        return None, None


class DeltaTarget(Target):
    """A Delta table that this process has locked; call `prepare` before a commit."""

    flat = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the table. Raises UsageError without deltalake, or for another place than a folder.

        Another job, or an export to Parquet, is refused when the target is opened.
        """
        super().__init__(path, DELTA_JOB)
        self._log = DeltaLog(str(self.path))
        self.schema: pa.Schema | None = None

    def prepare(self, schema: pa.Schema) -> pa.Schema | None:
        """Keep the files' schema for the table, whose log has topic and date."""
        self.schema = schema
        return None

    def commit(
        self,
        state: Mapping[str, Any],
        files: Sequence[StagedFile],
        *,
        removed: Sequence[str] = (),
    ) -> None:
        """Add files to the table as one commit of it."""
        from deltalake.exceptions import DeltaError

        assert not removed, "Delta removes files by its own operations"
        number = self.number + 1
        with needs_room(self.path):
            self._write_entry(number, state, files, ())
            self._sync(self._move(files_of(files)))
        try:
            self._add(number, files)
        except DeltaError as error:
            raise HastoreError(
                f"the commit to the Delta table {self.path} failed: {error}. Run the job again: it "
                "finds out whether the commit took place"
            ) from error
        self.number, self.state = number, dict(state)

    def merge(self, file_bytes: int) -> tuple[int, int]:
        """Let Delta merge small files; return how many became how many."""
        return self._log.merge(file_bytes)

    # -- inside ------------------------------------------------------------------------------------

    def _done(self, table: "DeltaTable | None") -> int:
        return 0 if table is None else self._log.last_number(table, self._numbers)

    def _last(self) -> int:
        done = self._done(self._log.table())
        return done if done in self._numbers() else 0

    def _recover(self) -> None:
        table = self._log.table()
        done = self._done(table)
        numbers = self._numbers()
        if table is not None and not done:
            raise lost_number(self.path) if numbers else foreign_table(self.path, "folder")
        if numbers and max(numbers) > done + 1:  # only the last commit of a run may not take place
            raise StoreBrokenError(
                f"the Delta table {self.path} has the export's commits up to {done}, but commit "
                f"{max(numbers) - 1} took place: the table was set back to an older version, or "
                "its _delta_log was removed. Restore it, or export to a new folder"
            )
        if table is not None:
            self._log.check_shown(table, done)
        if numbers and max(numbers) > done:
            self._undo(max(numbers))
        if done:
            if done not in self._numbers():
                raise StoreBrokenError(
                    f"{self.path} has no state of its commit {done}: restore _hastore/commits from "
                    "a backup, or export to a new table"
                )
            entry = self._read_entry(done)
            self._check(entry)
            self.number, self.state = done, entry["state"]
        self._renew_staging()

    def _undo(self, number: int) -> None:
        """Remove the files of a commit that did not take place, then its state."""
        entry = self._read_entry(number)
        self._check(entry)
        for file in entry["files"]:
            with contextlib.suppress(FileNotFoundError):
                (self.path / file["final"]).unlink()
        self._entry_path(number).unlink()

    def _add(self, number: int, files: Sequence[StagedFile]) -> None:
        assert self.schema is not None
        table, marks = self._log.table(), {APPLICATION: number}
        if table is not None:
            self._log.check_shown(table, self.number)
        self._log.add(table, marks, table_schema(self.schema), PARTITIONS.names, files)


def foreign_table(path: Path | str, place: str) -> UsageError:
    """Return the error of a table without any commit of an export."""
    return UsageError(f"another program made the Delta table {path}; name a new {place}")


def lost_number(path: Path | str) -> StoreBrokenError:
    """Return the error of a table that does not say any more which commits took place."""
    return StoreBrokenError(
        f"the Delta table {path} has no number of the export's commits. Either another program "
        "made it, or its property delta.setTransactionRetentionDuration has removed the number, "
        "and the history does not have it any more. Nothing was changed; export to a new table"
    )


def files_of(files: Sequence[StagedFile]) -> list[dict[str, str]]:
    """Return the staged and final places of files, as a commit's entry has them."""
    return [{"staged": file.staged, "final": file.final} for file in files]
