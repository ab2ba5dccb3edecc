"""Make rows fit for a write that must not be refused: what cannot be sent of them is left out.

A log may have messages that the sink refuses, because RocketMQ's clients and brokers allow more: a
byte that separates properties, properties that leave no room for the row's identity, headers with
names that are reserved. Headers and tags that cannot be sent are dropped. Whether a row whose key
or body cannot be sent is left out, the caller decides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hastore.record.codec import Host
from hastore.record.layout import MAX_PROPERTIES_BYTES
from hastore.spark.sink.options import SinkColumns
from hastore.spark.sink.records import (
    MAX_BODY_BYTES,
    REFUSED_HEADERS,
    RecordBuilder,
    RowError,
    batch_task,
)

Header = Mapping[str, Any]
_OTHER_BYTES = 256  # more than a row's identity and the names of its properties have
_SEPARATORS = "[\x01\x02]"


class SendableRows:
    """Makes the rows of one task fit, in their order: a row's number is sent, too.

    `refuse` is called with a row, by column, that cannot be sent, and the problem. It raises, or
    the row is left out.
    """

    def __init__(self, refuse: Callable[[Mapping[str, Any], str], None]) -> None:
        self._refuse = refuse
        self._rows = 0  # kept so far
        self.dropped = 0  # headers, and tags
        self.left_out = 0

    def apply(self, table: pa.Table) -> pa.Table:
        """Return the rows as they can be sent. Raises what `refuse` raises."""
        batches = [part for batch in table.to_batches() for part in self._fit(batch)]
        return pa.Table.from_batches(batches, table.schema)

    def _fit(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        start = 0
        for row in [*_suspects(batch).tolist(), batch.num_rows]:
            if row > start:
                self._rows += row - start
                yield batch.slice(start, row - start)
            if row < batch.num_rows and (fit := self._fit_row(batch.slice(row, 1))) is not None:
                self._rows += 1
                yield fit
            start = row + 1

    def _fit_row(self, row: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return a row without what cannot be sent of it; None if it is left out."""
        (given,) = row.to_pylist()
        headers: Sequence[Header] = given["headers"] or ()
        tags = None if _has_separator(given["tags"]) else given["tags"]
        problem = self._problem(row, tags, ())
        if problem is not None and tags is not None:
            tags = None
            problem = self._problem(row, tags, ())
        if problem is not None:
            self._refuse(given, problem)
            self.left_out += 1
            return None
        kept = self._fitting(row, tags, [one for one in headers if _can_be_sent(one)])
        self.dropped += len(headers) - len(kept) + (tags != given["tags"])
        return _with(row, tags, kept if given["headers"] is not None else None)

    def _fitting(
        self, row: pa.RecordBatch, tags: str | None, headers: Sequence[Header]
    ) -> list[Header]:
        """Return as many headers as there is room for, the shortest ones, in their order."""
        if row.column("value").is_valid()[0].as_py():  # a large body is compressed each time
            row = _replaced(row, "value", b"")
        by_size = sorted(range(len(headers)), key=lambda at: _size(headers[at]))
        fits, fails = 0, len(headers) + 1
        while fails - fits > 1:
            count = len(headers) if fails > len(headers) else (fits + fails) // 2
            if self._problem(row, tags, [headers[at] for at in by_size[:count]]) is None:
                fits = count
            else:
                fails = count
        return [headers[at] for at in sorted(by_size[:fits])]

    def _problem(
        self, row: pa.RecordBatch, tags: str | None, headers: Sequence[Header]
    ) -> str | None:
        """Return why the sink would refuse a row with these tags and headers; None if it takes it.

        It is asked itself, for the row with its number.
        """
        names = row.schema.names
        columns = {name: names.index(name) for name in ("value", "key", "headers", "tags")}
        identity = batch_task("", 0)
        builder = RecordBuilder(
            SinkColumns(**columns),
            topic="any",
            partition=0,
            producer_id=identity.producer_id,
            first_number=identity.first,
            queues_of=lambda _: 1,
            born_host=Host(b"\x7f\0\0\1", 1),
        )
        try:
            for _ in builder.build(_with(row, tags, headers), self._rows, 1):
                pass
        except RowError as refused:
            return refused.problem
        return None


def _suspects(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Return the rows that the sink may refuse: all that it does, and some others."""
    key, tags, lists = (batch.column(name) for name in ("key", "tags", "headers"))
    pairs, counts = lists.flatten(), _ints(lists.value_lengths())
    owners = np.repeat(np.arange(batch.num_rows), counts)
    names, values = pairs.field("key"), pairs.field("value")
    sizes = np.bincount(owners, _sizes(names) + _sizes(values) + 2, minlength=batch.num_rows)
    bad = _sizes(batch.column("value")) > MAX_BODY_BYTES
    bad |= _sizes(key) + _sizes(tags) + sizes > MAX_PROPERTIES_BYTES - _OTHER_BYTES
    bad |= _separated(key) | _separated(tags)
    refused = pc.is_in(names, pa.array(sorted(REFUSED_HEADERS), names.type))
    refused = pc.or_(refused, pc.or_(names.is_null(), values.is_null()))
    of_pairs = refused.to_numpy(zero_copy_only=False) | _separated(names) | _separated(values)
    bad[owners[of_pairs]] = True
    return np.flatnonzero(bad)


def _ints(values: pa.Array) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = values.fill_null(0).to_numpy().astype(np.int64)
    return found


def _sizes(values: pa.Array) -> npt.NDArray[np.int64]:
    return _ints(pc.binary_length(values))


def _separated(values: pa.Array) -> npt.NDArray[np.bool_]:
    found = pc.match_substring_regex(values, _SEPARATORS).fill_null(False)
    bools: npt.NDArray[np.bool_] = found.to_numpy(zero_copy_only=False)
    return bools


def _has_separator(text: str | None) -> bool:
    return text is not None and ("\x01" in text or "\x02" in text)


def _can_be_sent(header: Header | None) -> bool:
    if header is None or header["key"] is None or header["value"] is None:
        return False
    name, value = header["key"], header["value"]
    separated = _has_separator(name) or b"\x01" in value or b"\x02" in value
    return name not in REFUSED_HEADERS and not separated


def _size(header: Header) -> int:
    return len(header["key"].encode()) + len(header["value"])


def _with(
    row: pa.RecordBatch, tags: str | None, headers: Sequence[Header] | None
) -> pa.RecordBatch:
    return _replaced(_replaced(row, "tags", tags), "headers", headers)


def _replaced(row: pa.RecordBatch, name: str, value: Any) -> pa.RecordBatch:
    """Return a row with another value of a column."""
    at = row.schema.get_field_index(name)
    field = row.schema.field(at)
    return row.set_column(at, field, pa.array([value], field.type))
