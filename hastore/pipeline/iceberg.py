"""A target that is an Iceberg table: a commit of the export is one commit of the table.

    TARGET/catalog.db                           the catalog, unless another one is named
    TARGET/metadata/...                         Iceberg's own metadata: what readers see
    TARGET/data/topic=T/date=D/part-....parquet the files, also those that no commit has yet

One commit of the table adds files in a snapshot and sets the table's properties: the number of the
commit, and the state after it with the positions. So no crash divides them. The snapshot has the
number too: a table that was set back to an older snapshot is found by that.

Files are written under their final names, and do not count until a snapshot names them. Two runs at
once exclude each other: a commit needs the table as the commit before has left it, except for what
other programs did, such as the maintenance of the table.
"""

import contextlib
import json
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table, TableProperties

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    HastoreError,
    StoreBrokenError,
    StoreError,
    StoreInUseError,
    UsageError,
)
from hastore.pipeline.iceberg_files import (
    data_file,
    file_schema,
    has_columns,
    is_partitioned_as_made,
    new_table_schema,
)
from hastore.pipeline.parquet_files import table_schema
from hastore.pipeline.places import Place, is_bucket, place_of
from hastore.pipeline.target import (
    StagedFile,
    another_run,
    local_path,
    needs_room,
    sync_file,
)

DATA = "data"
OWN_CATALOG, OWN_TABLE = "hastore", "hastore.messages"  # of a folder's own catalog
_OWN_FILE = "catalog.db"
_SLACK_MS = 60_000  # by so much Iceberg lets the times of commits go back
_FORMAT = "1"
_PREFIX = "hastore-export."
_COMMIT, _RUN, _STATE = f"{_PREFIX}commit", f"{_PREFIX}run", f"{_PREFIX}state"
_FORMAT_NAME, _SCHEMA = f"{_PREFIX}format", f"{_PREFIX}schema-id"
_FOLDER_URL = re.compile(r"^file:(//(localhost)?)?(?=/)", re.IGNORECASE)


class _CommittedTable(Table):
    """A table to commit to, with a check each time that its present state is loaded.

    If the table has changed, pyiceberg loads it and tries the commit again on top of that. So
    messages that another run has committed meanwhile would be there twice without the check.
    """

    def __init__(self, table: Table, check: Callable[[Table], None]) -> None:
        """Take the table and the check, which raises to give the commit up."""
        super().__init__(
            table.name(), table.metadata, table.metadata_location, table.io, table.catalog
        )
        self._check = check

    def refresh(self) -> Table:
        """Load the present state and check it."""
        super().refresh()
        self._check(self)
        return self


class IcebergTarget:
    """The target of an export in an Iceberg table; use it in a `with`."""

    flat = False
    in_place = True
    staging_name = DATA

    def __init__(
        self, target: str | None, catalog: str | None = None, table: str | None = None
    ) -> None:
        """Name the table: in a folder with a catalog of its own, or in a catalog of pyiceberg's.

        With a catalog, `target` is where a new table lies; None lets the catalog decide. Raises
        UsageError for a place where no table can be.
        """
        self._folder = None
        self._given = None  # where the table must lie
        self._catalog_name, self._name = catalog, table or OWN_TABLE
        if catalog is None:
            if target is None or is_bucket(target):
                raise UsageError(
                    "an Iceberg table in a bucket needs a catalog elsewhere: give --catalog NAME "
                    "and --table NAMESPACE.NAME, too"
                )
            self._folder = local_path(target)
            if set(str(self._folder)) & set("#?%"):  # readers differ in how they take these
                raise UsageError(
                    f"the path {self._folder} has one of the characters # ? %, which an Iceberg "
                    "table's path must not have; name another folder"
                )
            self._given = f"file://{self._folder}"
        elif target is not None:
            self._given = target if is_bucket(target) else f"file://{local_path(target)}"
            if set(self._given) & set("#?"):  # pyiceberg ends a location there
                raise UsageError(
                    f"the target {target} has one of the characters # ?, which an Iceberg table's "
                    "location must not have; name another one"
                )
        self.path = self._folder or f"{catalog}.{self._name}"
        self.run = uuid.uuid4().hex
        self.number = 0  # of the last commit; 0 without one
        self.state: dict[str, Any] = {}  # of the last commit
        self._catalog: Catalog | None = None
        self._table: Table | None = None

    def __enter__(self) -> Self:
        """Find the last commit. Raises UsageError, StoreError, StoreBrokenError, StoreFullError."""
        try:
            self._open(makes=True)
            self._find()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Leave files without a commit: a task may still write."""
        self._close()

    def look(self) -> dict[str, Any]:
        """Return the state of the last commit, and change nothing; {} without a commit.

        Raises UsageError for what `with` would refuse.
        """
        try:
            if self._open(makes=False):
                self._find()
        finally:
            self._close()
        return dict(self.state)

    @property
    def root(self) -> str:
        """Return where the tasks write, after `prepare`: a path, or s3://BUCKET/FOLDER."""
        assert self._table is not None
        return _root(self._table.location())

    def prepare(self, schema: pa.Schema) -> pa.Schema:
        """Make the table in the first run; return the schema of the files.

        `schema` is that of other exports' files, which have topic and date in their folders' names.
        If a run that ended before its first commit has made the table for other columns, it is
        made anew.
        """
        whole = table_schema(schema)
        with self._named():
            self._drop_unused(whole)
            if self._table is None:
                self._table = self._make(whole)
        self._check(self._table)
        self._check_time(self._table)
        root = self.root
        if not is_bucket(root):
            os.makedirs(os.path.join(root, DATA), exist_ok=True)
        return file_schema(whole, self._schema(self._table))

    def commit(
        self,
        state: Mapping[str, Any],
        files: Sequence[StagedFile],
        *,
        removed: Sequence[str] = (),
    ) -> None:
        """Add files to the table, and set the state, as one commit of it.

        Raises StoreInUseError if another run has committed meanwhile, HastoreError if other
        programs changed the table each time that it was tried, and StoreError; then the commit may
        have taken place.
        """
        assert not removed, "Iceberg removes files by its own operations"
        assert self._table is not None
        number = self.number + 1
        with needs_room(self.root), self._named():
            _sync_folders(self.root, files)
            entries = self._entries(self._table, files)
            table = _CommittedTable(self._table, lambda table: self._check_turn(table, number))
            table.refresh()
            try:
                self._append(table, number, state, entries)
            except CommitFailedException as error:
                raise HastoreError(
                    f"the commit to the Iceberg table {self.path} failed, because other programs "
                    "changed the table each time that it was tried. Stop them, and run the job "
                    f"again ({error})"
                ) from error
        self._table, self.number, self.state = table, number, dict(state)

    # -- inside ------------------------------------------------------------------------------------

    def _open(self, *, makes: bool) -> bool:
        """Connect to the catalog; return False if it is a folder's own and not there yet."""
        if self._folder is None:
            with self._named():
                self._catalog = _configured(self._catalog_name or "")
            return True
        file = self._folder / _OWN_FILE
        if not file.exists():
            if self._folder.exists() and not self._folder.is_dir():
                raise UsageError(f"the target {self._folder} is a file; name a folder")
            if self._folder.exists() and any(self._folder.iterdir()):
                raise UsageError(
                    f"the target {self._folder} holds files of something else; name a new or empty "
                    "folder"
                )
            if not makes:
                return False
            with needs_room(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
        with self._named():
            self._catalog = SqlCatalog(
                OWN_CATALOG, uri=f"sqlite:///{file}", warehouse=f"file://{self._folder}"
            )
        return True

    def _close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()
            self._catalog = None

    def _find(self) -> None:
        """Load the table, if it is there, and the state of its last commit."""
        assert self._catalog is not None
        with self._named():
            try:
                self._table = self._catalog.load_table(self._name)
            except (NoSuchTableError, NoSuchNamespaceError):
                return
        self._check(self._table)
        self.number = _number(self._table)
        if self.number:
            try:
                self.state = json.loads(self._table.properties[_STATE])
            except (KeyError, ValueError) as error:
                raise StoreBrokenError(
                    f"the property {_STATE} of the Iceberg table {self.path} is damaged: {error}; "
                    "set the table back to an older version of its metadata, or export to a new one"
                ) from error
        self._check_history(self._table)

    def _check(self, table: Table) -> None:
        """Raise UsageError unless the table is one of this job, where it must lie."""
        if table.properties.get(_FORMAT_NAME) is None:
            raise UsageError(
                f"another program made the Iceberg table {self.path}; name a table that is not "
                "there yet"
            )
        if table.properties[_FORMAT_NAME] != _FORMAT:
            raise UsageError(f"a newer version of hastore wrote {self.path}; use that one")
        if self._given is not None and _root(table.location()) != _root(self._given):
            raise UsageError(
                f"the Iceberg table {self.path} lies at {table.location()}; "
                + ("leave out --target" if self._folder is None else "it cannot be moved")
            )
        if not is_partitioned_as_made(table.spec(), self._schema(table)):
            raise UsageError(
                f"the Iceberg table {self.path} is no longer partitioned by topic and date; set "
                "its partitioning back, or export to a new table"
            )

    def _check_history(self, table: Table) -> None:
        """Raise StoreBrokenError if the table was set back to a snapshot before the last commit.

        Snapshots of other programs may follow; old ones may be gone, and then there is no telling.
        """
        found, snapshot = self.number, table.current_snapshot()
        if snapshot is None:
            found = 0
        while snapshot is not None:
            mark = None if snapshot.summary is None else snapshot.summary[_COMMIT]
            if mark is not None:
                found = int(mark)
                break
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else table.snapshot_by_id(parent)
        if found != self.number:
            raise StoreBrokenError(
                f"the Iceberg table {self.path} has the export's commits up to {found}, but commit "
                f"{self.number} took place: the table was set back to an older snapshot. Set it to "
                "a newer one, or export to a new table"
            )

    def _make(self, schema: pa.Schema) -> Table:
        assert self._catalog is not None
        iceberg, spec = new_table_schema(schema)
        properties = {
            _FORMAT_NAME: _FORMAT,
            _COMMIT: "0",
            _SCHEMA: "0",  # a new table's
            TableProperties.MANIFEST_MERGE_ENABLED: "true",
            TableProperties.METADATA_DELETE_AFTER_COMMIT_ENABLED: "true",
        }
        given: dict[str, Any] = {"location": self._given, "partition_spec": spec}
        given["properties"] = properties
        try:
            return self._catalog.create_table(self._name, iceberg, **given)
        except NoSuchNamespaceError:
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            return self._catalog.create_table(self._name, iceberg, **given)
        except TableAlreadyExistsError as exists:
            raise StoreInUseError(
                f"another run has made the Iceberg table {self.path} meanwhile; wait until it has "
                "ended, and run the job again"
            ) from exists

    def _drop_unused(self, schema: pa.Schema) -> None:
        """Drop a table without a commit that was made for other columns. Raises UsageError."""
        if self._table is None or self.number or has_columns(self._schema(self._table), schema):
            return
        if self._table.current_snapshot() is not None:
            raise UsageError(
                f"the Iceberg table {self.path} has other columns than this export, and rows of "
                "another program; name a table that is not there yet"
            )
        assert self._catalog is not None
        self._catalog.drop_table(self._name)
        self._table = None

    def _schema(self, table: Table) -> Schema:
        """Return the schema with which the table was made; columns may be added or renamed."""
        return table.schemas()[int(table.properties[_SCHEMA])]

    def _entries(self, table: Table, files: Sequence[StagedFile]) -> list[DataFile]:
        place: Place = place_of(self.root)
        schema, location = self._schema(table), table.location().rstrip("/")
        entries = []
        for file in files:
            footer = pq.read_metadata(place.path(file.final), filesystem=place.filesystem)
            where = f"{location}/{file.final}"
            spec = table.spec().spec_id
            entries.append(data_file(file, where, footer, schema, table.properties, spec))
        return entries

    def _check_turn(self, table: Table, number: int) -> None:
        """Raise StoreInUseError if another run has committed, and what `_check` raises.

        If this run's commit `number` is there, its answer was lost; pyiceberg finds its snapshot.
        """
        self._check(table)
        found = _number(table)
        if found == number and table.properties.get(_RUN) == self.run:
            return
        if found != self.number:
            raise another_run(self.path)
        self._check_history(table)
        self._check_time(table)

    def _check_time(self, table: Table) -> None:
        """Raise HastoreError if a commit would have a time before that of the last one.

        pyiceberg makes and reads such a table, but Iceberg for Java, Go and Rust refuse it.
        """
        known = table.metadata
        last_ms = max([known.last_updated_ms, *(one.timestamp_ms for one in known.snapshot_log)])
        ahead_ms = last_ms - SYSTEM_CLOCK.wall_ms()
        if ahead_ms > _SLACK_MS:
            raise HastoreError(
                f"the Iceberg table {self.path} has a commit whose time is {ahead_ms / 1000:.0f} s "
                "ahead of this machine's clock, and with an earlier one behind it Spark and others "
                "could not read the table any more. If this clock is behind, correct it; else run "
                "the job again once that time has come, or export to a new table"
            )

    def _append(
        self, table: Table, number: int, state: Mapping[str, Any], entries: Sequence[DataFile]
    ) -> None:
        """Commit, if need be several times: other programs may change the table meanwhile."""
        with table.transaction() as transaction:
            transaction.set_properties(
                {
                    _COMMIT: str(number),
                    _RUN: self.run,
                    _STATE: json.dumps(state, ensure_ascii=False),
                }
            )
            # Without files too: what makes two runs exclude each other is the snapshot.
            marks = {_COMMIT: str(number)}
            with transaction.update_snapshot(snapshot_properties=marks).merge_append() as append:
                for entry in entries:
                    append.append_data_file(entry)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Turn any error of the catalog, or of its files, into one that names it and the remedy.

        Each kind of catalog has errors of its own: pyiceberg's, SQLAlchemy's, those of HTTP.
        """
        try:
            yield
        except HastoreError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and self._folder is not None:
                raise  # it names the file
            text = str(error).strip().partition("\n")[0]
            remedy = "Check the catalog's configuration for pyiceberg, its server and its keys"
            if self._folder is not None:
                remedy = f"Check the file {self._folder / _OWN_FILE}"
            raise StoreError(
                f"the Iceberg table {self.path}: {type(error).__name__}: {text}. {remedy}, and run "
                "the same command again: it finds out whether a commit took place"
            ) from error


def _configured(name: str) -> Catalog:
    """Return a catalog of pyiceberg's configuration. Raises UsageError if it has none such."""
    try:
        return load_catalog(name)
    except ValueError as error:
        raise UsageError(
            f"pyiceberg knows no catalog {name!r}: {error}. Describe it in ~/.pyiceberg.yaml, or "
            f"by PYICEBERG_CATALOG__{name.upper()}__URI"
        ) from error


def _number(table: Table) -> int:
    return int(table.properties.get(_COMMIT, "0"))


def _root(location: str) -> str:
    """Return a table's location as a path, or as s3://BUCKET/FOLDER. Raises UsageError."""
    if is_bucket(location):
        return "s3://" + location.partition("://")[2].rstrip("/")
    if not location.startswith("/") and not _FOLDER_URL.match(location):
        raise UsageError(
            f"the Iceberg table lies at {location}, and an export writes to folders and to s3:// "
            "only; give a new table another --target"
        )
    return os.path.normpath(_FOLDER_URL.sub("", location))


def _sync_folders(root: str, files: Sequence[StagedFile]) -> None:
    """Make the names of new files in folders durable."""
    if is_bucket(root):
        return
    folders = {os.path.dirname(file.final) for file in files}
    folders |= {os.path.dirname(folder) for folder in folders}
    for folder in sorted(folders | {DATA, ""}, reverse=True):
        sync_file(os.path.join(root, folder))
