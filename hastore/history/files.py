"""Read histories from files, and the records of a store, for the checker."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Collection, Iterator, Sequence

from hastore.errors import CorruptRecordError, UsageError
from hastore.history.rules import events as e
from hastore.history.rules.checker import Checker
from hastore.history.rules.findings import Report
from hastore.record.codec import Record, decode_record
from hastore.record.compression import decompress
from hastore.record.properties import find_property, offsets_taken, producer_of
from hastore.store.offline.reader import StoreReader

_EVERY = 10_000  # lines or records between two calls of `on_progress`
OnProgress = Callable[[int], None]
Path = str | os.PathLike[str]


class Lines:
    """The lines of several files, numbered through; a finding names a number."""

    def __init__(self) -> None:
        """Begin without files."""
        self._files: list[str] = []
        self._begins: list[int] = []

    def begin(self, path: Path, line: int) -> None:
        """Lines from `line` on are of this file."""
        self._files.append(os.fspath(path))
        self._begins.append(line)

    def name(self, line: int) -> str:
        """Return a line as "FILE:LINE"."""
        at = bisect.bisect_right(self._begins, line) - 1
        return f"{self._files[at]}:{line - self._begins[at] + 1}"


def check(
    paths: Path | Sequence[Path],
    *,
    store: Path | None = None,
    expect: Collection[str] = (),
    lines: Lines | None = None,
    on_progress: OnProgress = lambda _done: None,
) -> Report:
    """Check the history in a file, or in several that have one group and one clock in common.

    `store`: the folder of a node's store, whose log is compared too. `expect`: faults that must
    have come while puts went on, or what `checker.MET` has. `lines` is filled. Raises UsageError
    for a line that is none, OSError, and StoreError or CorruptRecordError for the store.
    """
    checker = Checker()
    lines = Lines() if lines is None else lines
    at = 1
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        lines.begin(path, at)
        with open(path, "rb") as file:
            first = file.readline()
            checker.begin(e.decode_header(first, f"{os.fspath(path)}:1"))
            at += 1
            for line in file:
                event = e.decode(line, lines.name(at)) if line.endswith(b"\n") else None
                if event is None:
                    break  # the recorder's process was killed while it wrote
                try:
                    checker.feed(event, at)
                except UsageError as wrong:
                    raise UsageError(f"{lines.name(at)}: {wrong}") from wrong
                if at % _EVERY == 0:
                    on_progress(at)
                at += 1
    if store is not None:
        for count, record in enumerate(records_of(store, checker.topics)):
            checker.feed(record)
            if count % _EVERY == 0:
                on_progress(at + count)
    return checker.finish(expect)


def records_of(store: Path, topics: Collection[str]) -> Iterator[e.Log | e.Record]:
    """Yield the log of a store, and its records of these topics, as events."""
    with StoreReader(os.fspath(store)) as reader:
        begin, end = reader.min_offset, reader.limit_offset
        yield e.Log(begin, end)
        for offset, raw in reader.raw_records(begin, end):
            record = decode_record(raw)
            if record.topic in topics:
                yield record_event(offset, len(raw), record)


def record_event(offset: int, size: int, record: Record) -> e.Record:
    """Return a record of the log, of `size` bytes at `offset`, as an event."""
    key = find_property(record.properties, b"KEYS")
    try:
        body = decompress(record.body, record.sys_flag, f"the record at {offset}")
    except (CorruptRecordError, UsageError):  # as the recorder of a reader does
        body = record.body
    text = None if key is None else key.decode("utf-8", "surrogateescape")
    producer = producer_of(record.properties)
    return e.Record(
        offset,
        size,
        record.topic,
        record.queue_id,
        record.queue_offset,
        e.digest_of(record.topic, text, body),
        None if producer is None else producer[0].decode("utf-8", "replace"),
        None if producer is None else producer[1],
        f"{record.store_host}",
        offsets_taken(record.sys_flag, record.properties),
    )
