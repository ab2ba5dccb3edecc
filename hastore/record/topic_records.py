"""Topics as records of the log itself: what one record says, and what all of them add up to. Pure.

Each change of a topic is a record:

    topic HASTORE_TOPICS, queue 0, no body
    HS_TOPIC = CRC-32 of the JSON in 8 hex digits, then the JSON, one of
    {"config": {"name": T, "read_queues": n, "write_queues": n, "perm": n, ...}, "origin": O}
    {"deleted": T, "origin": O}

A deletion hides the topic's records before it: they are in the log, but in no queue any more. Its
queues go on at the queue offsets that they had, so no position ever names another message.

Before retention removes the newest record of a topic, the master writes it again, with the offset
of the original as `origin`. Of all records of a topic the one with the greatest origin is in force;
the order in which they are read does not matter. So a copy that follows a newer change in the log
changes nothing.
"""

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec

from hastore.errors import UNREADABLE, MessageIllegalError
from hastore.record.codec import NO_HOST, build_record
from hastore.record.delays import SCHEDULE_TOPIC
from hastore.record.properties import check_topic, find_property
from hastore.record.transactions import HALF_TOPIC, OP_TOPIC

TOPICS_TOPIC = "HASTORE_TOPICS"  # no client may put to it
TOPICS_QUEUE = 0
OWN_PREFIX = "HASTORE_"  # topics of the group itself begin so: they have no configuration
# The delayed and the half messages that wait, which a deletion would hide; what has become of half
# messages; the pattern of new topics.
RESERVED = frozenset({SCHEDULE_TOPIC, HALF_TOPIC, OP_TOPIC, "TBW102"})
PROPERTY = "HS_TOPIC"
OWN_ATTRIBUTES = "hastore."  # names of attributes that begin so are hastore's own
PERM_READ, PERM_WRITE = 4, 2  # bits of `perm`, as RocketMQ numbers them
READ_WRITE = PERM_READ | PERM_WRITE
MAX_QUEUES = 4_096  # of a topic
# Names with a record, of each kind by itself, so that none takes the room of another.
MAX_TOPICS = 50_000  # topics with a configuration
MAX_GROUPS = 50_000  # consumer groups with settings: topics %RETRY%<group> with a configuration
MAX_DELETED = 100_000  # topics that were deleted, and are not forgotten
MAX_ATTRIBUTES_BYTES = 8_192  # of one topic
_NAME = PROPERTY.encode()
_CRC_DIGITS = 8
_VERSION = 1

Queues = Annotated[int, msgspec.Meta(ge=0, le=MAX_QUEUES)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class TopicConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """A topic: consumers read its queues below `read_queues`, producers put to `write_queues`.

    `perm` has the bits PERM_READ and PERM_WRITE. Its bit 1, `order`, `sys_flag` and `attributes`
    are RocketMQ's, and are only kept.
    """

    name: Name
    read_queues: Queues
    write_queues: Queues
    perm: Annotated[int, msgspec.Meta(ge=0, le=7)] = READ_WRITE
    order: bool = False
    sys_flag: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    attributes: dict[str, str] = {}

    @property
    def is_readable(self) -> bool:
        """Whether consumers may read the topic."""
        return bool(self.perm & PERM_READ)

    @property
    def is_writable(self) -> bool:
        """Whether producers may put to the topic."""
        return bool(self.perm & PERM_WRITE)

    @property
    def kept(self) -> "TopicConfig | None":
        """What a deletion leaves of it: hastore's own attributes, such as a group's settings.

        They are no property of the topic: RocketMQ's broker keeps them elsewhere.
        """
        own = {key: self.attributes[key] for key in self.attributes if is_own_attribute(key)}
        count = max(1, self.write_queues)
        return TopicConfig(self.name, count, count, attributes=own) if own else None


def is_own_attribute(name: str) -> bool:
    """Whether an attribute is hastore's own, which clients of RocketMQ neither see nor change."""
    return name.startswith(OWN_ATTRIBUTES)


class TopicChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a record says: a topic's configuration, or the name of a topic that is deleted."""

    config: TopicConfig | None = None
    deleted: Name | None = None
    origin: Offset | None = None

    @property
    def name(self) -> str:
        """Return the topic's name."""
        return self.config.name if self.config is not None else self.deleted or ""


class TopicEntry(NamedTuple):
    """What the log says of a topic up to some offset. All offsets are of records of the topic."""

    config: TopicConfig | None  # None: it was deleted
    origin: int  # of the change that is in force
    at: int  # the last record that says so
    last: int  # the last record of all: another one than `at` says what was in force before
    begin: int = 0  # the last deletion: the topic's messages below are hidden


Before = tuple[Offset, dict[str, TopicEntry | None]]


class SavedTopics(NamedTuple):
    """What a log said of its topics below `offset`, and below some offsets before that.

    `before`: how the topics were at the begin of each log file with a change, the oldest first, as
    far as that differs from the state after it; None stands for a topic that was not known. From
    a begin up to the next one in the list only its own file has changes.
    """

    entries: dict[str, TopicEntry]
    offset: int
    before: tuple[Before, ...] = ()

    def at(self, end: int) -> "SavedTopics":
        """Return the newest state that is not beyond `end`.

        An earlier version saved none from before. Then what changed later is left out, and what it
        had replaced is known only if the log still has it.
        """
        entries, offset, left = self.entries, self.offset, list(self.before)
        if offset <= end:
            return self
        entries = dict(entries)
        while left and offset > end:
            offset, differing = left.pop()
            for name, entry in differing.items():
                if entry is None:
                    entries.pop(name, None)
                else:
                    entries[name] = entry
        if offset > end:
            offset = 0  # all that the log has is added again, which changes nothing else
            entries = {name: entry for name, entry in entries.items() if entry.at < end}
        return SavedTopics(entries, offset, tuple(left))

    def grown(
        self, changes: Iterable[tuple[int, TopicChange]], first: int, file_size: int, removed: int
    ) -> "SavedTopics":
        """Return the state below `first`, after the changes from `offset` on in their order.

        The log has been removed below `removed`, durably: no cut goes back there.
        """
        entries, before, at = dict(self.entries), list(self.before), self.offset
        differing: dict[str, TopicEntry | None] = {}
        for offset, change in changes:
            start = offset - offset % file_size
            if start > at:
                behind = at - at % file_size + file_size if differing else at
                before.append((at, differing))
                if at < behind < start:
                    before.append((behind, {}))
                at, differing = start, {}
            differing.setdefault(change.name, entries.get(change.name))
            apply_change(entries, change, offset)
        before.append((at, differing))
        behind = at - at % file_size + file_size
        if differing and behind < first:
            before.append((behind, {}))
        while len(before) > 1 and before[1][0] <= removed:
            del before[0]
        if first <= removed:
            before.clear()
        return SavedTopics(entries, first, tuple(before))


class _Saved(msgspec.Struct, frozen=True, omit_defaults=True):
    """What `encode_topics` writes. An earlier version reads it without `before`."""

    version: int
    offset: Offset
    topics: dict[str, TopicEntry]
    before: list[Before] = []


_decoder = msgspec.json.Decoder(TopicChange)
_saved_decoder = msgspec.json.Decoder(_Saved)


def check_config(config: TopicConfig) -> None:
    """Raise MessageIllegalError, which names the rule, for a topic that cannot be made."""
    check_name(config.name)
    for what, count in (("read", config.read_queues), ("write", config.write_queues)):
        if not 0 <= count <= MAX_QUEUES:
            raise MessageIllegalError(
                f"topic {config.name}: {count} {what} queues; 0 to {MAX_QUEUES} are allowed"
            )
    try:
        msgspec.convert(msgspec.to_builtins(config), TopicConfig)
    except msgspec.ValidationError as failure:
        raise MessageIllegalError(f"topic {config.name}: {failure}") from failure
    size = len(msgspec.json.encode(config.attributes))
    if size > MAX_ATTRIBUTES_BYTES:
        raise MessageIllegalError(
            f"topic {config.name}: {size} bytes of attributes; at most {MAX_ATTRIBUTES_BYTES}"
        )


def check_name(name: str) -> None:
    """Raise MessageIllegalError for the name of a topic that can have no configuration."""
    check_topic(name)
    if name.startswith(OWN_PREFIX):
        raise MessageIllegalError(f"topic {name}: topics named {OWN_PREFIX}... are the group's own")
    if name in RESERVED:
        raise MessageIllegalError(f"topic {name}: it is RocketMQ's own, and cannot be changed")


def build_change(change: TopicChange, now_ms: int) -> bytes:
    """Return a change as a record; `now_ms` is wall time."""
    # ASCII: any other character of an attribute is escaped, and so are the separators.
    text = json.dumps(msgspec.to_builtins(change), separators=(",", ":"))
    return build_record(
        TOPICS_TOPIC, b"",
        queue_id=TOPICS_QUEUE, properties=[(PROPERTY, _sealed(text))],
        born_timestamp_ms=now_ms, born_host=NO_HOST,
    )  # fmt: skip


def change_in(properties: bytes) -> TopicChange | None:
    """Return what a record of the topic says; None if it is no change, or is damaged."""
    text = _unsealed(find_property(properties, _NAME) or b"")
    if text is None:
        return None
    try:
        change = _decoder.decode(text)
    except UNREADABLE:
        return None  # a form of a later version
    return None if (change.config is None) == (change.deleted is None) else change


def apply_change(entries: dict[str, TopicEntry], change: TopicChange, offset: int) -> None:
    """Add the change in the record at `offset` of the log to what is known."""
    name = change.name
    origin = offset if change.origin is None else min(change.origin, offset)
    known = entries.get(name)
    if known is not None and origin < known.origin:
        entries[name] = known._replace(last=max(known.last, offset))
        return
    last = offset if known is None else max(known.last, offset)
    begin = 0 if known is None else known.begin
    if change.config is None:
        begin = max(begin, origin)
    entries[name] = TopicEntry(change.config, origin, offset, last, begin)


def forget_removed(
    entries: dict[str, TopicEntry], first: int, has_queues: Callable[[str], bool]
) -> None:
    """Forget what only concerned records below `first`, which the log has no more.

    A deletion stays known as long as the topic has queues: without it they would be a topic.
    """
    for name, entry in list(entries.items()):
        if entry.config is None:
            if entry.last < first and not has_queues(name):
                del entries[name]
        elif 0 < entry.begin < first:
            entries[name] = entry._replace(begin=0)


def lacking(
    entries: Mapping[str, TopicEntry], first: int, has_queues: Callable[[str], bool]
) -> list[TopicChange]:
    """Return the changes that a log which begins at `first` must be told again.

    A deletion must, as long as the log has an older record of the topic, which would undo it, or
    the topic has queues.
    """
    return [
        TopicChange(entry.config, None if entry.config is not None else name, entry.origin)
        for name, entry in sorted(entries.items())
        if entry.at < first
        and (entry.config is not None or entry.last >= first or has_queues(name))
    ]


def begins_of(entries: Mapping[str, TopicEntry]) -> dict[str, int]:
    """Return the topics with hidden records, and the offset from which on they show."""
    return {name: entry.begin for name, entry in entries.items() if entry.begin}


def encode_topics(saved: SavedTopics) -> bytes:
    """Return a file's bytes: what the log said of its topics below an offset."""
    form = _Saved(_VERSION, saved.offset, saved.entries, list(saved.before))
    return _sealed(msgspec.json.encode(form).decode()).encode()


def decode_topics(raw: bytes) -> SavedTopics | None:
    """Return what `encode_topics` took; None for a damaged file, or one of a later version."""
    text = _unsealed(raw)
    if text is None:
        return None
    try:
        saved = _saved_decoder.decode(text)
    except UNREADABLE:
        return None
    if saved.version != _VERSION:
        return None
    return SavedTopics(saved.topics, saved.offset, tuple(saved.before))


def size_of_records(changes: Iterable[TopicChange]) -> int:
    """Return about how many bytes of the log the changes take."""
    return sum(200 + len(msgspec.json.encode(change)) for change in changes)


def _sealed(text: str) -> str:
    return f"{zlib.crc32(text.encode()):0{_CRC_DIGITS}x}{text}"


def _unsealed(raw: bytes) -> bytes | None:
    crc, text = raw[:_CRC_DIGITS], raw[_CRC_DIGITS:]
    return text if text and crc == b"%08x" % zlib.crc32(text) else None
