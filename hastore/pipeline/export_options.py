"""The options of `export`, and what the first run into a target fixes: the columns of its files.

Later runs take over what is not given, so a run is repeated without its options. What is given must
agree with the first run: files of other columns would make the target unreadable as one table.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hastore.errors import UsageError
from hastore.pipeline.json_columns import parse_schema
from hastore.pipeline.parquet_files import TASK_BYTES
from hastore.pipeline.target import check_compression
from hastore.spark.arrow.schema import KAFKA_COLUMNS, METADATA_COLUMNS, Column

FORMATS = ("parquet", "orc", "delta", "iceberg")
COMMIT_EVERY_S = 30.0
INFER = "infer"


@dataclass(frozen=True)
class ExportOptions:
    """What is exported. None is as in the first run into the target, and there the default."""

    headers: bool | None = None  # default: False
    metadata: bool | None = None  # default: False
    compression: str = "snappy"
    fail_on_data_loss: bool = True
    check_crcs: bool = True
    decompress: bool = True  # False: bodies that producers have compressed as they are stored
    file_bytes: int = TASK_BYTES  # of records in one task: its files have about this size at most
    commit_every_s: float = COMMIT_EVERY_S
    json_schema: str | None = None  # DDL, or INFER: decode JSON bodies into columns; default: none
    keep_value: bool | None = None  # beside the decoded columns; default: True
    merge: bool = False  # merge small files at the end
    format: str = "parquet"
    catalog: str | None = None  # Iceberg: a catalog of pyiceberg's configuration
    table: str | None = None  # its table there: NAMESPACE.NAME

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the files; the topic is the name of a folder."""
        columns: tuple[Column, ...] = KAFKA_COLUMNS
        if self.headers:
            columns += (Column.HEADERS,)
        if self.metadata:
            columns += METADATA_COLUMNS
        return tuple(column.value for column in columns if column is not Column.TOPIC)


def check_options(options: ExportOptions) -> None:
    """Check what does not depend on the target. Raises UsageError."""
    check_compression(options.compression)
    if options.format not in FORMATS:
        raise UsageError(f"format is {options.format!r}; use " + ", ".join(FORMATS))
    if options.merge and options.format == "orc":
        raise UsageError("ORC files are not merged: leave out --merge, or give --format parquet")
    if options.merge and options.format == "iceberg":
        raise UsageError(
            "an Iceberg table is merged by its own maintenance, such as Spark's procedure "
            "rewrite_data_files: leave out --merge"
        )
    if options.catalog is None and options.table is None:
        return
    if options.format != "iceberg":
        raise UsageError("--catalog and --table are for --format iceberg: give it, too")
    if not options.catalog or not options.table:
        raise UsageError("give --catalog and --table together, or neither")
    if not all(options.table.split(".")) or "." not in options.table:
        raise UsageError(f"--table is {options.table!r}; write NAMESPACE.NAME")


def take_over(
    target: Path | str, state: Mapping[str, Any], options: ExportOptions
) -> tuple[ExportOptions, tuple[str, ...]]:
    """Return the options with the first run's where none are given, and the names of these.

    `state` is that of the target's last commit. Raises UsageError if a given option differs. Two
    schemas are compared later: Spark parses DDL.
    """
    there = state.get("shape")
    if there is None:
        first = {"headers": False, "metadata": False, "keep_value": True}
    else:
        columns = there["columns"]
        first = {
            "headers": Column.HEADERS.value in columns,
            "metadata": Column.PHYSICAL_OFFSET.value in columns,
            "keep_value": there["keep_value"],
        }
    given = {name: getattr(options, name) for name in first}
    settled = {name: first[name] if given[name] is None else given[name] for name in first}
    schema = options.json_schema
    has_schema = there is not None and there["json_schema"] is not None
    taken = []
    if there is not None:
        words = {"headers": "--headers", "metadata": "--metadata", "keep_value": "--drop-value"}
        for name, word in words.items():
            has = first[name] != (name == "keep_value")  # whether the first run had the option
            if settled[name] != first[name]:
                raise _differs(target, f"with{'' if has else 'out'} {word}")
            if has and given[name] is None:
                taken.append(word)
        if schema is not None and not has_schema:
            raise _differs(target, "without --json-schema")
        if schema is None and has_schema:
            taken.append("--json-schema")
            schema = INFER  # in a later run it means that of the first
    if not settled["keep_value"] and schema is None:
        raise UsageError(
            "without the column `value`, give a JSON schema; else bodies would be lost"
        )
    found = replace(
        options,
        headers=settled["headers"],
        metadata=settled["metadata"],
        keep_value=settled["keep_value"],
        json_schema=schema,
    )
    return found, tuple(taken)


def shape_of(
    target: Path | str, state: Mapping[str, Any], options: ExportOptions, inferred: str | None
) -> dict[str, Any]:
    """Return what never changes for a target; call it with a running Spark, which parses DDL.

    `options` are those of `take_over`. `inferred` is the schema of the bodies, in Spark's JSON, if
    the first run is to find it. Raises UsageError for a schema that is none, or another one.
    """
    there, given = state.get("shape"), options.json_schema
    if there is not None and (given in (None, INFER) or given == state.get("json_ddl")):
        return dict(there)
    schema = inferred if given == INFER else given and parse_schema(given).json()
    if there is None:
        return {
            "columns": list(options.columns()),
            "json_schema": schema,
            "keep_value": options.keep_value,
        }
    if schema != there["json_schema"]:
        known = state.get("json_ddl")
        raise _differs(target, "with another --json-schema" + (f", {known!r}" if known else ""))
    return dict(there)


def _differs(target: Path | str, how: str) -> UsageError:
    return UsageError(
        f"the first run into {target} was {how}, and all files of a target have the same columns: "
        "repeat it without options for columns, or name another folder"
    )
