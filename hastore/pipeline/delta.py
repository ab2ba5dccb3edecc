"""A target that is a Delta table: a commit of the export is one commit of the table.

    TARGET/_delta_log/...                      Delta's own log: what readers see
    TARGET/part-....parquet                    data files
    TARGET/_hastore/commits/00000001.json      the state of the export after its commit 1

The state of commit N is written first. Then one commit of the table adds the files and sets the
number N of the application "hastore-export" (Delta's `txn` action). So the table alone decides
whether commit N took place; the next run removes what belongs to a commit that did not.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from hastore.errors import HastoreError, StoreBrokenError, UsageError
from hastore.pipeline.parquet_files import PARTITIONS, table_schema
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

        `schema` is the table's, with the columns of `partition_by`, which the files do not have. If
        a commit since `table` was read has set one of the versions, deltalake refuses this one.
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

    def merge(self, file_bytes: int) -> tuple[int, int]:
        """Let Delta merge small files; return how many became how many."""
        table = self.table()
        if table is None:
            return 0, 0
        found = table.optimize.compact(target_size=file_bytes)
        return found["numFilesRemoved"], found["numFilesAdded"]


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
        return 0 if table is None else table.transaction_version(APPLICATION) or 0

    def _last(self) -> int:
        done = self._done(self._log.table())
        return done if done in self._numbers() else 0

    def _recover(self) -> None:
        table = self._log.table()
        done = self._done(table)
        numbers = self._numbers()
        if numbers and max(numbers) > done + 1:  # only the last commit of a run may not take place
            raise StoreBrokenError(
                f"the Delta table {self.path} has the export's commits up to {done}, but commit "
                f"{max(numbers) - 1} took place: the table was set back to an older version, or "
                "its _delta_log was removed. Restore it, or export to a new folder"
            )
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
        elif table is not None:
            raise UsageError(f"another program made the Delta table {self.path}; name a new folder")
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
        self._log.add(table, marks, table_schema(self.schema), PARTITIONS.names, files)


def files_of(files: Sequence[StagedFile]) -> list[dict[str, str]]:
    """Return the staged and final places of files, as a commit's entry has them."""
    return [{"staged": file.staged, "final": file.final} for file in files]
