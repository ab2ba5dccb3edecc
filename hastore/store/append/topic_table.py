"""The topics of a store: what the records of HASTORE_TOPICS in its log add up to.

Every node replays the log, so all nodes with the same log have the same topics. The records are a
queue like any other. So after a start or a cut they are read again, from that queue; nothing else
need be undone. The file `<root>/hastore/topics` has what the log said below its first file, when
retention was about to remove that:

    CRC-32 of the JSON in 8 hex digits, then the JSON: version, the log's new first offset,
    by topic [configuration or null, origin, at, last, begin] of record/topic_records.py, and how
    that was at the begin of each file to be removed: after a crash the log may still have
    them, and be cut there

A topic without a record, which some producer began by putting to it, has a configuration that is
derived from its queues.

A put is checked against `limits` as the log's end has them: the appender itself adds the changes
that it writes (`take`), and replay all others. Any thread may read.
"""

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from hastore.errors import HastoreError
from hastore.fs.filesystem import FileSystem, read_or_empty
from hastore.record.codec import find_parts
from hastore.record.delays import RETRY_PREFIX
from hastore.record.layout import FLAG_PREPARED
from hastore.record.topic_records import (
    MAX_DELETED,
    MAX_GROUPS,
    MAX_TOPICS,
    OWN_PREFIX,
    TOPICS_QUEUE,
    TOPICS_TOPIC,
    SavedTopics,
    TopicChange,
    TopicConfig,
    TopicEntry,
    apply_change,
    begins_of,
    change_in,
    decode_topics,
    encode_topics,
    forget_removed,
    lacking,
)
from hastore.store.derived.contract import Dispatched, RecordColumns
from hastore.store.state.crc_frame import FILE_BYTES_MAX

log = logging.getLogger(__name__)

_UNITS_AT_ONCE = 256
NOT_WRITABLE = -1  # of `limits`
MAX_OTHER = 1_000  # in each map of the group, which clients ask for


class _Unit(Protocol):
    @property
    def queue_offset(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def size(self) -> int: ...


class TopicQueues(Protocol):
    """The part of a ConsumeQueueTable that topics need."""

    def queue_range(self, topic: str, queue_id: int) -> tuple[int, int] | None:
        """Return the first and the next queue offset of a queue; None if it does not exist."""
        ...

    def read(self, topic: str, queue_id: int, queue_offset: int, max_units: int) -> Sequence[_Unit]:
        """Return units from a queue offset on."""
        ...

    def show_from(self, begins: Mapping[str, int]) -> None:
        """Hide the records of these topics below these offsets of the log, and no others."""
        ...

    def hide_before(self, topic: str, begin: int) -> None:
        """Hide the records of a topic below this offset of the log; others stay as they are."""
        ...

    def has(self, topic: str) -> bool:
        """Whether a topic has queues, perhaps without records."""
        ...

    def shown(self, topic: str) -> Collection[int]:
        """Return the numbers of a topic's queues, if it has a record that is not hidden."""
        ...

    def shown_topics(self) -> Sequence[str]:
        """Return the topics with a record that is not hidden."""
        ...


View = Callable[[int, int], AbstractContextManager[memoryview]]


class TopicTable:
    """The topics as the log has them; a Dispatcher, called after the consume queues.

    These call `add` for each batch before its records are in them: what a deletion hides is hidden
    before anything that was put after it shows.
    """

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        queues: TopicQueues,
        view: View,
        default_queues: int,
        *,
        file_size: int,
    ) -> None:
        """Prepare; `view(offset, max_bytes)` lends bytes of the log, in files of `file_size`."""
        self._file_size = file_size
        self._fs = fs
        self._path = f"{root}/hastore/topics"
        self._queues = queues
        self._view = view
        self._default_queues = default_queues
        self._guard = threading.RLock()  # changes come from replay, the appender and cuts
        self._saved = SavedTopics({}, 0)  # what the log said below its `offset`
        # What it says. Others read it meanwhile: each change of it is one step of the interpreter.
        self._entries: dict[str, TopicEntry] = {}
        self._end = 0  # of the last record that was added, or where `_saved` ends
        self._removed = 0  # where the log began at the last removal of files
        self._derived: dict[str, TopicConfig] = {}  # a cache
        self._unreadable: set[str] = set()
        self._topics: set[str] = set()  # with a configuration
        self._groups: set[str] = set()  # the same, of topics %RETRY%<group>
        # How many queues puts may use, by topic: only of those that have a record. Changed in
        # place, because the queue offsets share it.
        self.limits: dict[bytes, int] = {}
        self.version = 0  # rises with each change
        self._other: tuple[int, dict[str, int]] = (-1, {})  # of a version; see `other_queues`
        self._other_names: list[str] = []  # all of them, sorted
        self.lost = 0  # records that could not be read

    # -- reading -----------------------------------------------------------------------------------

    def find(self, name: str) -> TopicConfig | None:
        """Return a topic; None if there is none of that name."""
        entry = self._entries.get(name)
        if entry is not None and entry.config is not None:
            return entry.config
        numbers = self._queues.shown(name)
        if not numbers:
            return None
        count = max(self._default_queues, max(numbers) + 1)
        known = self._derived.get(name)
        if known is None or known.read_queues != count:
            known = self._derived[name] = TopicConfig(name, count, count)
        return known

    def recorded(self, name: str) -> TopicConfig | None:
        """Return what a record says of a topic; None if none does, or it was deleted."""
        entry = self._entries.get(name)
        return None if entry is None else entry.config

    def deleted(self) -> list[str]:
        """Return the names of the topics that were deleted, and are not forgotten."""
        return [name for name, entry in list(self._entries.items()) if entry.config is None]

    def gone(self) -> set[str]:
        """Return the names of the deleted topics that no put has begun anew."""
        return {name for name in self.deleted() if self.find(name) is None}

    def all(self) -> list[TopicConfig]:
        """Return all topics but the group's own, by name."""
        names = {name for name, entry in list(self._entries.items()) if entry.config is not None}
        names.update(name for name in self._queues.shown_topics())
        found = (self.find(name) for name in sorted(names) if not name.startswith(OWN_PREFIX))
        return [one for one in found if one is not None]

    def no_room_for(self, name: str) -> str | None:
        """Return why a topic gets no configuration; None if it may get one."""
        if name in self._topics or name in self._groups:
            return None
        if name.startswith(RETRY_PREFIX):
            if len(self._groups) < MAX_GROUPS:
                return None
            return (
                f"{len(self._groups):,} consumer groups have settings, and no more can: delete"
                " those of groups that are gone (`hastore groups delete`), then their topics"
                " %RETRY%<group> (`hastore topics delete`)"
            )
        if len(self._topics) < MAX_TOPICS:
            return None
        return (
            f"{len(self._topics):,} topics have a configuration, and no more can: delete those that"
            " are not needed (`hastore topics delete`)"
        )

    def no_room_to_delete(self, name: str) -> str | None:
        """Return why a topic is not deleted; None if it may be."""
        entry = self._entries.get(name)
        deleted = len(self._entries) - len(self._topics) - len(self._groups)
        if deleted < MAX_DELETED or (entry is not None and entry.config is None):
            return None
        return (
            f"{deleted:,} topics are deleted, and not forgotten, as their queues' next offsets are"
            f" kept: take away the permission instead (`hastore topics set {name} --perm none`)"
        )

    def offset_of(self, name: str) -> int:
        """Return the offset of the newest record that says what is in force; -1 without one."""
        entry = self._entries.get(name)
        return -1 if entry is None else entry.at

    def origin_of(self, name: str) -> int:
        """Return the offset of the change of a topic that is in force; -1 without one."""
        entry = self._entries.get(name)
        return -1 if entry is None else entry.origin

    @property
    def other_queues(self) -> dict[str, int]:
        """How many queues puts use, of the topics for which that is not `store.default_queues`.

        Of more than MAX_OTHER the first ones by name. It is made again after a change only.
        """
        version, found = self._other
        if version != self.version:
            version, found = self.version, {}
            for name in self._other_names[:MAX_OTHER]:
                entry = self._entries.get(name)
                if entry is not None and entry.config is not None:
                    found[name] = entry.config.write_queues
            self._other = version, found
        return found

    def may_read(self, name: str) -> bool:
        """Whether consumers may read a topic; also if there is none of that name."""
        return name not in self._unreadable

    def lacking(self, first: int) -> list[TopicChange]:
        """Return the changes that a log which begins at `first` must be told again."""
        with self._guard:
            return lacking(self._entries, first, self._queues.has)

    # -- the master's append -----------------------------------------------------------------------

    def take(self, offset: int, size: int, properties: bytes) -> None:
        """Add a record that the appender has written; it holds the log's lock."""
        with self._guard:
            self._add(offset, size, properties)

    # -- replay ------------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Read the file, and the queue of records, which was cut to `offset`."""
        del synced  # the file is replaced durably
        with self._guard:
            raw = read_or_empty(self._fs, self._path, FILE_BYTES_MAX)
            saved = decode_topics(raw)
            if raw and saved is None:
                log.error("%s is damaged: topics whose records retention has removed are lost on"
                          " this node until a master states them again", self._path)  # fmt: skip
            self._saved = saved or SavedTopics({}, 0)
            self._go_back(offset)
            self._read_again()
        return offset

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Do nothing: the consume queues have called `add`."""

    def add(self, batch: Sequence[Dispatched]) -> None:
        """Add the changes in a batch that replay dispatches."""
        for record in _changes_of(batch):
            with self._guard:
                self._add(record.offset, record.size, record.properties)

    def truncate(self, log_end: int) -> None:
        """Read the records again that a cut has left; the consume queues have been cut."""
        with self._guard:
            self._go_back(log_end)
            if self._end > log_end:
                self._read_again()

    def flush(self) -> None:
        """Do nothing: the records are in the log, and the file is written durably."""

    def reset(self) -> None:
        """Forget everything, durably."""
        with self._guard:
            self._saved, self._end, self._removed = SavedTopics({}, 0), 0, 0
            if self._fs.exists(self._path):
                self._save()
            self._publish({})

    def save_before(self, first: int) -> None:
        """Save what the log says below `first`, before it loses that. Raises OSError."""
        with self._guard:
            before = self._saved
            if first <= before.offset:
                return
            changes = [
                (offset, change)
                for _, offset, change in self._changes(before.offset, first)
                if change is not None
            ]
            if not changes and not before.entries:
                return
            # Not `first`: a crash may prevent the removal.
            saved = before.grown(changes, first, self._file_size, self._removed)
            forget_removed(saved.entries, self._removed, self._queues.has)
            self._saved = saved
            self._save()

    def delete_before(self, min_offset: int) -> None:
        """Forget deletions of which nothing in the log is left."""
        with self._guard:
            self._removed = min_offset
            forget_removed(self._entries, min_offset, self._queues.has)
            self._queues.show_from(begins_of(self._entries))

    def close(self) -> None:
        """Do nothing: no file is open."""

    @property
    def file_bytes(self) -> int:
        """Return about how large the file may become."""
        return 200 * (len(self._entries) + sum(len(one) for _, one in self._saved.before))

    # -- inside ------------------------------------------------------------------------------------

    def _add(self, offset: int, size: int, properties: bytes) -> None:
        if offset < self._end:  # the appender has taken it, or it was read at the start
            return
        self._end = offset + size
        change = change_in(properties)
        if change is None:
            log.warning("no change of a topic at offset %d: it is passed over", offset)
            return
        known = self._entries.get(change.name)
        apply_change(self._entries, change, offset)
        entry = self._entries[change.name]
        self._publish_one(change.name, entry.config)
        place = bisect_left(self._other_names, change.name)
        is_other = self._other_names[place : place + 1] == [change.name]
        if self._is_other(entry.config) and not is_other:
            self._other_names.insert(place, change.name)
        elif is_other and not self._is_other(entry.config):
            del self._other_names[place]
        if entry.begin != (0 if known is None else known.begin):
            self._queues.hide_before(change.name, entry.begin)
        self.version += 1

    def _go_back(self, end: int) -> None:
        """Forget durably what was saved of the log beyond `end`; the log may have ended there.

        The removal that it was saved for did not happen, or replay goes there again.
        """
        saved = self._saved.at(end)
        if saved is not self._saved:
            self._saved = saved
            self._save()

    def _read_again(self) -> None:
        entries = dict(self._saved.entries)
        self._end = self._saved.offset
        for end, offset, change in self._changes(self._saved.offset):
            self._end = max(self._end, end)
            if change is not None:
                apply_change(entries, change, offset)
        self._publish(entries)

    def _changes(
        self, start: int, stop: int | None = None
    ) -> Iterator[tuple[int, int, TopicChange | None]]:
        """Yield end, offset and change of each record of the queue in [start, stop) of the log."""
        for offset, size in self._units():
            if offset < start:
                continue
            if stop is not None and offset >= stop:
                break
            properties = self._properties_at(offset, size)
            change = None if properties is None else change_in(properties)
            yield offset + size, offset, change

    def _units(self) -> Iterator[tuple[int, int]]:
        known = self._queues.queue_range(TOPICS_TOPIC, TOPICS_QUEUE)
        at, end = known or (0, 0)
        while at < end:
            units = self._queues.read(TOPICS_TOPIC, TOPICS_QUEUE, at, min(end - at, _UNITS_AT_ONCE))
            for unit in units:
                yield unit.offset, unit.size
            at = units[-1].queue_offset + 1 if units else at + _UNITS_AT_ONCE

    def _properties_at(self, offset: int, size: int) -> bytes | None:
        """Return the properties of a record; None, with a log line, if it cannot be read."""
        try:
            with self._view(offset, size) as view:
                raw = bytes(view)
        except (OSError, HastoreError) as failure:
            log.error("the change of a topic at offset %d cannot be read: %s", offset, failure)
            self.lost += 1
            return None
        parts = find_parts(raw, 0, len(raw))
        if parts is None or raw[parts[6] : parts[6] + parts[7]] != TOPICS_TOPIC.encode():
            log.error("the change of a topic at offset %d is damaged", offset)
            self.lost += 1
            return None
        return raw[parts[8] : parts[0]]

    def _publish(self, entries: dict[str, TopicEntry]) -> None:
        """Let everybody see other entries than before."""
        self._entries = entries
        for name, entry in entries.items():
            self._publish_one(name, entry.config)
        for gone in self.limits.keys() - {_raw(name) for name in entries}:
            del self.limits[gone]
        for names in (self._unreadable, self._topics, self._groups):
            names.intersection_update(entries)
        self._other_names = sorted(
            name for name, entry in entries.items() if self._is_other(entry.config)
        )
        self._queues.show_from(begins_of(entries))
        self.version += 1

    def _is_other(self, config: TopicConfig | None) -> bool:
        return config is not None and config.write_queues not in (0, self._default_queues)

    def _publish_one(self, name: str, config: TopicConfig | None) -> None:
        names = self._groups if name.startswith(RETRY_PREFIX) else self._topics
        if config is None:
            names.discard(name)
            self.limits.pop(_raw(name), None)
        else:
            names.add(name)
            limit = config.write_queues if config.is_writable else NOT_WRITABLE
            self.limits[_raw(name)] = limit
        if config is not None and not config.is_readable:
            self._unreadable.add(name)
        else:
            self._unreadable.discard(name)

    def _save(self) -> None:
        self._fs.replace_bytes(self._path, encode_topics(self._saved))


def _changes_of(batch: Sequence[Dispatched]) -> Iterator[Dispatched]:
    if isinstance(batch, RecordColumns) and not batch.has_inner_batches:
        for run in batch.queue_runs():
            if run.topic == TOPICS_TOPIC and run.queue_id == TOPICS_QUEUE:
                yield from batch.pick(run)
        return
    # A tuple's field by its number: this looks at every record of a small batch.
    for record in batch:
        if record[2] == TOPICS_TOPIC and record[3] == TOPICS_QUEUE:
            if not record[5] & FLAG_PREPARED:
                yield record


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
