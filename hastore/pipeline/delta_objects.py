"""A target that is a Delta table in a bucket of S3, where a commit of the table is one new object.

    TARGET/_delta_log/...                           Delta's own log: what readers see
    TARGET/part-....parquet                         data files, also those that no commit has yet
    TARGET/_hastore/commits/00000001-RUN.json       the state of the export after its commit 1

The state of commit N is written first. Then one commit of the table adds the files and sets two
numbers: N, of the application "hastore-export", and that of the run, of "hastore-export-run". So
the table alone decides which run's commit N took place, and with it which state counts.

Delta's log takes no two commits of the same version, because the server creates an object only if
there is none of that name (a conditional put). And deltalake refuses a commit if one that it has
not read has set the same application's number. So two runs at once exclude each other.
"""

import contextlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from hastore.errors import StoreBrokenError, StoreError, UsageError
from hastore.pipeline.delta import (
    APPLICATION,
    DELTA_JOB,
    DeltaLog,
    foreign_table,
    lost_number,
)
from hastore.pipeline.parquet_files import PARTITIONS, table_schema
from hastore.pipeline.places import Bucket, one_line
from hastore.pipeline.target import StagedFile, another_run

if TYPE_CHECKING:
    from deltalake import DeltaTable

_RUN = f"{APPLICATION}-run"
_FORMAT = 1
_COMMITS = "_hastore/commits"
_COMMIT_NAME = re.compile(rf"{_COMMITS}/([0-9]{{8,}})-[0-9a-f]{{16}}\.json")
_KEPT_COMMITS = 100  # of the states before the last one: nobody needs them
_OURS = re.compile(r"_hastore|part-[0-9a-f]{16}-\d+\.parquet")  # without a table: a run died


class DeltaObjectTarget:
    """A Delta table in a bucket; use it in a `with`, and call `prepare` before a commit."""

    flat = True
    in_place = True
    staging_name = ""

    def __init__(self, url: str) -> None:
        """Name the table: s3://BUCKET/FOLDER. Raises UsageError and StoreError, as Bucket does."""
        self._place = Bucket(url)
        self.path = self.root = self._place.url
        self._log = DeltaLog(self.path, options_of(self._place))
        self._schema: pa.Schema | None = None
        self.run = secrets.randbits(62) + 1  # fits the number of an application
        self.number = 0  # of the last commit; 0 without one
        self.state: dict[str, Any] = {}  # of the last commit

    def __enter__(self) -> Self:
        """Find the last commit. Raises UsageError, StoreError, StoreBrokenError."""
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave files without a commit to Delta's vacuum: a task may still write."""

    def look(self) -> dict[str, Any]:
        """Return the state of the last commit, and change nothing; {} without a commit.

        Raises UsageError for a bucket that is not there, or a place with other objects.
        """
        with self._named():
            self._place.check_bucket()
            table = self._log.table()
            if table is None:
                names = [name for name, _ in self._place.listing("")]
                if not all(map(_OURS.fullmatch, names)):
                    raise UsageError(
                        f"the target {self.path} holds objects of something else; name a new or "
                        "empty place"
                    )
                return {}
            self.number = self._log.last_number(table, self._states)
            if not self.number:
                states = self._states()
                raise lost_number(self.path) if states else foreign_table(self.path, "place")
            self._check_history()
            self._log.check_shown(table, self.number)
            self.state = self._read(self.number, _mark(table, _RUN) or self._run_of(self.number))
        return dict(self.state)

    def prepare(self, schema: pa.Schema) -> pa.Schema | None:
        """Keep the files' schema for the table, whose log has topic and date."""
        self._schema = schema
        return None

    def commit(
        self,
        state: Mapping[str, Any],
        files: Sequence[StagedFile],
        *,
        removed: Sequence[str] = (),
    ) -> None:
        """Add files to the table as one commit of it.

        Raises StoreInUseError if another run has committed meanwhile, and StoreError; then the
        commit may have taken place.
        """
        from deltalake.exceptions import DeltaError

        assert not removed, "Delta removes files by its own operations"
        assert self._schema is not None
        number = self.number + 1
        entry = {"format": _FORMAT, "job": DELTA_JOB, "number": number, "state": dict(state)}
        with self._named():
            table = self._log.table()
            self._check_turn(table)
            self._place.write_json(_entry(number, self.run), entry)
            try:
                marks = {APPLICATION: number, _RUN: self.run}
                self._log.add(table, marks, table_schema(self._schema), PARTITIONS.names, files)
            except (DeltaError, OSError):
                # Another run was faster, or the answer was lost; the table knows.
                now = self._log.table()
                if now is None or _mark(now, _RUN) != self.run or _mark(now, APPLICATION) != number:
                    self._check_turn(now)
                    raise
        self.number, self.state = number, dict(state)
        with contextlib.suppress(OSError):  # they are in the way of nobody
            self._remove_old()

    def merge(self, file_bytes: int) -> tuple[int, int]:
        """Let Delta merge small files; return how many became how many."""
        with self._named():
            return self._log.merge(file_bytes)

    # -- inside ------------------------------------------------------------------------------------

    def _check_turn(self, table: "DeltaTable | None") -> None:
        if (0 if table is None else self._log.last_number(table, self._states)) != self.number:
            raise another_run(self.path)
        if table is not None:
            self._log.check_shown(table, self.number)

    def _states(self) -> list[tuple[int, str]]:
        matches = [_COMMIT_NAME.fullmatch(name) for name, _ in self._place.listing(_COMMITS)]
        return sorted((int(match[1]), match[0]) for match in matches if match)

    def _run_of(self, number: int) -> int:
        """Return which run made a commit, if the table does not have that any more: see delta.py.

        It is known if no other run has tried to make the commit. Raises StoreBrokenError.
        """
        runs = [name for one, name in self._states() if one == number]
        if len(runs) != 1:
            raise lost_number(self.path)
        return int(runs[0].removesuffix(".json").rpartition("-")[2], 16)

    def _check_history(self) -> None:
        last = max((number for number, _ in self._states()), default=0)
        if last > self.number + 1:  # only the last commit of a run may not take place
            raise StoreBrokenError(
                f"the Delta table {self.path} has the export's commits up to {self.number}, but "
                f"commit {last - 1} took place: the table was set back to an older version. "
                "Restore it, or export to a new place"
            )

    def _read(self, number: int, run: int) -> dict[str, Any]:
        try:
            entry = self._place.read_json(_entry(number, run))
        except FileNotFoundError as missing:
            raise StoreBrokenError(
                f"{self.path} has no state of its commit {number}: restore {_COMMITS} from a "
                "backup, or export to a new table"
            ) from missing
        if entry.get("format") != _FORMAT:
            raise UsageError(f"a newer version of hastore wrote {self.path}; use that one")
        return dict(entry["state"])

    def _remove_old(self) -> None:
        for number, name in self._states():
            if number < self.number - _KEPT_COMMITS:
                self._place.filesystem.delete_file(self._place.path(name))

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn an error of the server or of Delta into one that names the table and the remedy."""
        from deltalake.exceptions import DeltaError

        try:
            with self._place.named():
                yield
        except DeltaError as error:
            raise StoreError(
                f"the Delta table {self.path}: {one_line(error)}. Run the job again: it finds "
                "out whether a commit took place"
            ) from error


def options_of(place: Bucket) -> dict[str, str]:
    """Return the options with which deltalake reaches a bucket as the other exports do."""
    options = {"aws_conditional_put": "etag"}
    if place.filesystem.region:
        options["aws_region"] = place.filesystem.region
    if place.endpoint is not None:
        options["aws_endpoint_url"] = place.endpoint
        options["aws_allow_http"] = str(place.endpoint.startswith("http:")).lower()
    return options


def _mark(table: "DeltaTable", application: str) -> int:
    return table.transaction_version(application) or 0


def _entry(number: int, run: int) -> str:
    return f"{_COMMITS}/{number:08}-{run:016x}.json"
