"""Parquet files as Iceberg wants them: a number for each field, and a manifest entry for each file.

Readers find a column by its number, so a table whose columns were renamed stays readable.
"""

import datetime
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import (
    MetricModeTypes,
    MetricsMode,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    pyarrow_to_schema,
    schema_to_pyarrow,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record

from hastore.pipeline.parquet_files import PARTITIONS
from hastore.pipeline.target import StagedFile

_NUMBER = b"PARQUET:field_id"
_EPOCH = datetime.date(1970, 1, 1)
_FIRST_PARTITION_FIELD = 1000  # as the specification has it


def new_table_schema(schema: pa.Schema) -> tuple[Schema, PartitionSpec]:
    """Return Iceberg's schema for one of Arrow, and the partitioning by topic and date."""
    numbers = itertools.count(1)
    iceberg = pyarrow_to_schema(_numbered(schema, lambda _path: next(numbers)))
    fields = [
        PartitionField(
            source_id=iceberg.find_field(name).field_id,
            field_id=_FIRST_PARTITION_FIELD + place,
            transform=IdentityTransform(),
            name=name,
        )
        for place, name in enumerate(PARTITIONS.names)
    ]
    return iceberg, PartitionSpec(*fields)


def file_schema(schema: pa.Schema, iceberg: Schema) -> pa.Schema:
    """Return the schema of the files: that of Arrow, with the numbers that the table gave."""
    return _numbered(schema, lambda path: iceberg.find_field(".".join(path)).field_id)


def has_columns(iceberg: Schema, schema: pa.Schema) -> bool:
    """Return whether a table was made for this schema of Arrow, whatever numbers it gave."""
    wanted, _ = new_table_schema(schema)
    made, asked = (schema_to_pyarrow(one, include_field_ids=False) for one in (iceberg, wanted))
    return bool(made.equals(asked))


def is_partitioned_as_made(spec: PartitionSpec, iceberg: Schema) -> bool:
    """Return whether the table is still partitioned by topic and date, as it was made."""
    made = [iceberg.find_field(name).field_id for name in PARTITIONS.names]
    found = [(one.source_id, isinstance(one.transform, IdentityTransform)) for one in spec.fields]
    return found == [(number, True) for number in made]


def data_file(
    file: StagedFile,
    location: str,
    footer: pq.FileMetaData,
    iceberg: Schema,
    properties: dict[str, str],
    spec_id: int,
) -> DataFile:
    """Return the manifest entry of a file, with the statistics of its footer."""
    numbers = parquet_path_to_id_mapping(iceberg)
    plan = compute_statistics_plan(iceberg, properties)
    for number in {numbers[name] for name in _without_statistics(footer)}:
        plan[number] = replace(plan[number], mode=MetricsMode(MetricModeTypes.NONE))
    statistics = data_file_statistics_from_parquet_metadata(footer, plan, numbers)
    topic, date = (value for _, value in file.partition)
    days = None if date is None else (datetime.date.fromisoformat(date) - _EPOCH).days
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=location,
        file_format=FileFormat.PARQUET,
        partition=Record(topic, days),
        file_size_in_bytes=file.size,
        sort_order_id=None,
        spec_id=spec_id,
        equality_ids=None,
        key_metadata=None,
        **statistics.to_serialized_dict(),
    )


def _without_statistics(footer: pq.FileMetaData) -> Iterator[str]:
    for group in range(footer.num_row_groups):
        columns = footer.row_group(group)
        for place in range(footer.num_columns):
            column = columns.column(place)
            try:
                known = column.is_stats_set and column.statistics.min is not None
            except (OverflowError, ValueError):  # a time that Python has not
                known = False
            if not known:
                yield column.path_in_schema


Path = tuple[str, ...]  # of a field, in Iceberg's words: of a list `element`, of a map `key`
Number = Callable[[Path], int]


def _numbered(schema: pa.Schema, number: Number) -> pa.Schema:
    """Return a schema whose fields, at every depth, have numbers."""
    return pa.schema([_field(one, (one.name,), number) for one in schema])


def _field(field: pa.Field, path: Path, number: Number) -> pa.Field:
    own = str(number(path)).encode()
    kind = _type(field.type, path, number)
    return field.with_type(kind).with_metadata({**(field.metadata or {}), _NUMBER: own})


def _type(kind: pa.DataType, path: Path, number: Number) -> pa.DataType:
    if pa.types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return pa.struct([_field(one, (*path, one.name), number) for one in fields])
    if pa.types.is_map(kind):
        key = _field(kind.key_field, (*path, "key"), number)
        return pa.map_(key, _field(kind.item_field, (*path, "value"), number))
    if pa.types.is_list(kind):
        return pa.list_(_field(kind.value_field, (*path, "element"), number))
    return kind
