"""Which transactions of a log are open, by the records in the log itself.

A half message opens a transaction (record/transactions.py). The first of these in the log ends it:

    a committed message     names the half message's offset, and has its UNIQ_KEY
    a message set aside     has its UNIQ_KEY, PGROUP and REAL_TOPIC, or names its offset; with
                            another UNIQ_KEY only if it is a copy, made after these were damaged
    an ended half message   is listed by its queue offset

RocketMQ's clients and brokers put a half message again: the client if it got no answer, the broker
for each check. So a half message with the UNIQ_KEY, the producer group and the topic of an open
transaction is one more of the same transaction; each of them may be named by what ends it. The key
alone is no proof: another producer may have chosen the same. `unsaid` has the queue offsets of
those that have ended, but are not listed yet: RocketMQ would take them for open.

The file `<root>/hastore/transactions` keeps that state at several ends of the log:

    magic "HSTX" 4 | version 4 | MessagePack: [state, ...] | CRC-32 (of all before) 4
    state: MessagePack: [end of the log, [half message, ...], [queue offset that is unsaid, ...]]
    half message: [offset, queue offset, store time in ms, checks, seconds without a check or null,
                   UNIQ_KEY, [[offset, queue offset] of an earlier one, ...],
                   PGROUP or null, REAL_TOPIC or null]

The last two are missing in files of earlier versions: then the key alone must do.

A start replays from the last state that the log still reaches. A cut goes back to such a state, and
reads the log again from there. Without one, the first half message that is left comes first.

Replay's thread writes. Any thread reads, each method for itself: between two calls more may have
been read.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from hastore.errors import UNREADABLE
from hastore.fs.filesystem import FileSystem, read_or_empty
from hastore.record.layout import FLAG_IPV6, FLAG_ROLLBACK, HEADER_SIZES, header_struct, offset_of
from hastore.record.log_format import LogFormat
from hastore.record.properties import find_property
from hastore.record.transactions import (
    ASIDE_TOPIC,
    CHECKS_TOPIC,
    FLAG_COMMIT,
    HALF_TOPIC,
    OP_TOPIC,
    OPEN_MAX,
    Ended,
    Half,
    Identity,
    checks_in,
    ended_in,
    half_in,
    identity_in,
)
from hastore.shares import Shares
from hastore.store.derived.consume_queue import ConsumeQueueTable
from hastore.store.derived.contract import (
    Dispatched,
    RecordColumns,
    ReplayableLog,
    is_of_transaction,
)
from hastore.store.derived.scalar_walk import reread
from hastore.store.state.crc_frame import FILE_BYTES_MAX, CrcFrame

log = logging.getLogger(__name__)

ENDED_MAX = 10_000  # transactions of which it is remembered how they ended
EARLIER_MAX = 64  # half messages of one transaction, beside the last
_STEP_BYTES = 4 << 20  # of the log between two states, while transactions change
_QUIET_STEP_BYTES = 64 << 20  # and else
_STEP_FACTOR = 64  # of a large state's own bytes
_KEPT = 16  # states; then every second one of the older half goes
_KEPT_BYTES = 32 << 20
_FRAME = CrcFrame(b"HSTX", 1)
_PREPARED = "prepared_transaction_offset"
_OFFSET = header_struct(_PREPARED, start=offset_of(_PREPARED))
_LENGTH = header_struct("body_length", start=offset_of("body_length"))
_FACTS = [
    (offset_of(name), header_struct(name, start=offset_of(name)))
    for name in ("body_crc", "born_timestamp_ms")
]


class _State(msgspec.Struct, frozen=True, array_like=True):
    end: int
    halves: list[Half]
    unsaid: list[int]


_read_states = msgspec.msgpack.Decoder(list[bytes]).decode
_read_state = msgspec.msgpack.Decoder(_State).decode


class OpenTransactions:
    """The open transactions of a log; a Dispatcher, called after the consume queues."""

    def __init__(
        self, fs: FileSystem, root: str, log: ReplayableLog, queues: ConsumeQueueTable,
        form: LogFormat,
    ) -> None:  # fmt: skip
        """Prepare; nothing is read before `load`."""
        self._fs = fs
        self._path = f"{root}/hastore/transactions"
        self._log = log
        self._queues = queues
        self._form = form
        self.end = 0  # of the log, as far as it was read
        self._states: list[tuple[int, bytes]] = []  # by their ends
        self._unsaved = False
        # How transactions have ended that replay has read since the store was made.
        self._counts = dict.fromkeys(Ended, 0)
        self._set(_State(0, [], []))

    def _set(self, state: _State) -> None:
        open_ = {half.offset: half for half in state.halves}
        self._open: dict[int, Half] = open_  # by the offset of the last half message
        self._of_topic = Shares(half.topic or b"" for half in state.halves)
        self._of_identity = {half.identity: half.offset for half in state.halves if half.key}
        self._of_offset = {at: half.offset for half in state.halves for at in half.offsets}
        self._of_place = {place: half.offset for half in state.halves for place in half.places}
        self._unsaid = dict.fromkeys(state.unsaid)
        self._ended: OrderedDict[int, tuple[Half, Ended]] = OrderedDict()
        self.end = state.end

    # -- reading -----------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._open)

    def halves(self) -> list[Half]:
        """Return the open transactions, in the log's order."""
        return list(self._open.values())

    def find(self, offset: int) -> Half | None:
        """Return the open transaction with a half message at this offset."""
        last = self._of_offset.get(offset)
        return None if last is None else self._open.get(last)

    def is_open(self, half: Half) -> bool:
        """Whether a transaction is still open, with this last half message."""
        return half.offset in self._open

    def ended(self, offset: int) -> tuple[Half, Ended] | None:
        """Return the transaction of a half message, and how it ended; None if it is not known."""
        return self._ended.get(offset)

    def unsaid(self) -> list[int]:
        """Return the queue offsets of half messages that have ended, but are not listed so."""
        return list(self._unsaid)

    def why_full(self, topic: bytes) -> str | None:
        """Return why a topic gets no more transactions now; None if it does.

        A topic may have as many as are left for others, so one alone half of OPEN_MAX: who may
        produce to a topic, and ends none of its transactions, leaves room for those of others.
        """
        count, own = len(self._open), self._of_topic.get(topic, 0)
        if own < OPEN_MAX - count:
            return None
        return (
            f"{count:,} transactions are open, {own:,} of topic {topic.decode('utf-8', 'replace')}:"
            " commit them, or roll them back"
        )

    def problems(self) -> list[str]:
        """Return for the status that the room for open transactions is nearly used up."""
        count = len(self._open)
        crowding = self._of_topic.crowding(OPEN_MAX, count)
        if crowding is None:
            return []
        topic, own = crowding
        name = (topic or b"").decode("utf-8", "replace")
        return [
            f"{count:,} transactions are open, {own:,} of topic {name};"
            f" at most {OPEN_MAX:,} may be, and of a topic as many as are left: see that its"
            " producers end them"
        ]

    def status(self) -> dict[str, int]:
        """Return for the status how many are open, and how others have ended.

        The latter count what this node's replay has read since its start.
        """
        counts = {how.name.lower(): count for how, count in self._counts.items()}
        return {"open": len(self._open), **counts}

    # -- replay ------------------------------------------------------------------------------------

    def load(self, offset: int, synced: bool) -> int:
        """Read the file; return from where the log is needed."""
        del synced  # the file is replaced durably
        raw = read_or_empty(self._fs, self._path, FILE_BYTES_MAX)
        self._states, self._unsaved = _unpack(raw), False
        self._go_back(offset, min(offset, self._queues.loaded_end))
        return self.end

    def _go_back(self, log_end: int, queues_end: int) -> None:
        """Take the last state that a log has that ends at `log_end`.

        The queues have every record below `queues_end`.
        """
        kept = [state for state in self._states if state[0] <= log_end]
        if len(kept) < len(self._states):
            self._states = kept
            self._save()  # the log may grow again, with other records
        if kept:
            self._set(_read_state(kept[-1][1]))
            return
        first = self._first_half()
        begin = queues_end if first is None else first - self._form.lead
        self._set(_State(min(begin, log_end), [], []))

    def _first_half(self) -> int | None:
        """Return the offset of the first half message in the log, open or not."""
        queue = self._queues.get(HALF_TOPIC, 0)
        if queue is None:
            return None
        units = queue.read_on(queue.files.first_at(self._log.min_offset), 1)
        return units[0].offset if units else None

    def dispatch(self, batch: Sequence[Dispatched]) -> None:
        """Take the records of a batch."""
        if not batch or batch[-1].end_offset <= self.end:
            return
        if isinstance(batch, RecordColumns):
            found = batch.of_transactions()
        else:
            found = [record for record in batch if is_of_transaction(record)]
        changed = self._take(found)
        self.end = batch[-1].end_offset
        self._keep(changed)

    def _take(self, records: Sequence[Dispatched]) -> bool:
        """Take records; return whether one has changed something."""
        changed = False
        for record in records:
            if record.offset >= self.end:
                changed |= self._take_one(record)
                self.end = record.end_offset
        return changed

    def _take_one(self, record: Dispatched) -> bool:
        topic, flags = record.topic, record.sys_flag
        if topic == HALF_TOPIC:
            if not record.takes_unit or record.queue_id:
                return False  # no broker writes it
            self._begin(record)
            return True
        if topic == OP_TOPIC:
            return self._take_places(record)
        if not self._open:
            return False
        if topic == CHECKS_TOPIC:
            return self._count(record)
        half = None
        if flags & FLAG_ROLLBACK == FLAG_COMMIT:
            half = self.find(self._named(record))
            if half is not None and half.key != _key(record):
                half = None  # a client's own flag
        elif topic == ASIDE_TOPIC:
            identity = identity_in(record.properties)
            half = self._same(identity) or self._set_aside_by(record)
        if half is None:
            return False
        for place in half.places:
            self._unsaid[place] = None
        self._end(half, Ended.SET_ASIDE if topic == ASIDE_TOPIC else Ended.COMMITTED)
        return True

    def _begin(self, record: Dispatched) -> None:
        said = half_in(record.properties)
        earlier: tuple[tuple[int, int], ...] = ()
        checks = said.checks
        known = self._same(said.identity)
        if known is not None:
            places = [*known.earlier, (known.offset, known.place)]
            for offset, place in places[:-EARLIER_MAX]:
                self._of_offset.pop(offset, None)
                self._of_place.pop(place, None)
            earlier = tuple(places[-EARLIER_MAX:])
            checks = max(checks, known.checks)
        half = Half(
            record.offset, record.queue_offset, record.store_timestamp_ms, checks,
            said.immunity_s, said.identity.key, earlier, said.identity.group, said.identity.topic,
        )  # fmt: skip
        self._open[half.offset] = half
        self._of_topic.change(half.topic or b"", 1)
        for offset in half.offsets:
            self._of_offset[offset] = half.offset
        for place in half.places:
            self._of_place[place] = half.offset
        if known is not None:
            self._remove(known)
            self._of_identity.pop(known.identity, None)  # it may lack group and topic
        if half.key:
            self._of_identity[half.identity] = half.offset

    def _same(self, identity: Identity) -> Half | None:
        """Return the open transaction of other half messages with this identity."""
        if not identity.key:
            return None
        last = self._of_identity.get(identity)
        if last is None:
            last = self._of_identity.get(Identity(identity.key, None, None))
        return None if last is None else self._open.get(last)

    def _set_aside_by(self, record: Dispatched) -> Half | None:
        """Return the open transaction that a record sets aside whose identity no other has.

        The half message may have been damaged before it was set aside, so its offset counts. One
        with a key must be a copy: a client may put it, or RocketMQ, which names offset 0.
        """
        offset = self._named(record)
        half = self.find(offset)
        if half is None or not _key(record):
            return half
        is_there = offset >= self._log.min_offset
        return half if is_there and self._facts(offset) == self._facts(record.offset) else None

    def _facts(self, offset: int) -> tuple[int, ...]:
        """Return what a record and its copy under another topic have in common."""
        found: list[int] = []
        for at, field in _FACTS:
            with self._log.view(offset + at, field.size) as view:
                found += field.unpack_from(view)
        return tuple(found)

    def _end(self, half: Half, how: Ended) -> None:
        self._counts[how] += 1
        for offset in half.offsets:
            self._ended[offset] = half, how
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
        self._forget(half)

    def _forget(self, half: Half) -> None:
        self._remove(half)
        for offset in half.offsets:
            self._of_offset.pop(offset, None)
        for place in half.places:
            self._of_place.pop(place, None)
        if self._of_identity.get(half.identity) == half.offset:
            del self._of_identity[half.identity]

    def _remove(self, half: Half) -> None:
        if self._open.pop(half.offset, None) is not None:
            self._of_topic.change(half.topic or b"", -1)

    def _take_places(self, record: Dispatched) -> bool:
        """Take the list of half messages that have ended."""
        if not (self._open or self._unsaid):
            return False
        changed = False
        for place in ended_in(self._body(record)):
            last = self._of_place.get(place)
            half = None if last is None else self._open.get(last)
            if half is not None:
                for other in half.places:
                    self._unsaid[other] = None
                self._end(half, Ended.ROLLED_BACK)
            changed |= half is not None or place in self._unsaid
            self._unsaid.pop(place, None)
        return changed

    def _count(self, record: Dispatched) -> bool:
        changed = False
        for offset, checks in checks_in(record.properties):
            half = self.find(offset)
            if half is not None and checks > half.checks:
                self._open[half.offset] = msgspec.structs.replace(half, checks=checks)
                changed = True
        return changed

    def _named(self, record: Dispatched) -> int:
        """Return the offset that a record's header names as its half message's."""
        at = offset_of(_PREPARED, ipv6_flags=record.sys_flag & FLAG_IPV6)
        with self._log.view(record.offset + at, _OFFSET.size) as view:
            return int(_OFFSET.unpack_from(view)[0])

    def _body(self, record: Dispatched) -> bytes:
        flags = record.sys_flag & FLAG_IPV6
        at = offset_of("body_length", ipv6_flags=flags)
        with self._log.view(record.offset, record.size) as view:
            (size,) = _LENGTH.unpack_from(view, at)
            return bytes(view[HEADER_SIZES[flags] : HEADER_SIZES[flags] + size])

    # -- states ------------------------------------------------------------------------------------

    def _keep(self, changed: bool) -> None:
        """Keep the present state for a later start or cut, if it is time for one more."""
        if not self._states and not (changed or self._open):
            return
        last, size = (self._states[-1][0], len(self._states[-1][1])) if self._states else (0, 0)
        step = max(_STEP_BYTES, _STEP_FACTOR * size) if changed else _QUIET_STEP_BYTES
        if self._states and self.end - last < step:
            return
        state = _State(self.end, self.halves(), self.unsaid())
        self._states = [*self._states, (self.end, msgspec.msgpack.encode(state))]
        while len(self._states) > _KEPT or (
            len(self._states) > 2 and sum(len(raw) for _, raw in self._states) > _KEPT_BYTES
        ):
            half = max(len(self._states) // 2, 2)
            self._states = [*self._states[:half:2], *self._states[half:]]
        self._unsaved = True

    def truncate(self, log_end: int) -> None:
        """Go back to the transactions of a log that now ends at `log_end`, durably.

        Raises StoreError, OSError if the log cannot be read.
        """
        if log_end >= self.end:
            return
        self._go_back(log_end, log_end)  # replay has read the log up to there
        for batch in reread(self._log, self._form, self.end, log_end):
            changed = self._take([record for record in batch if is_of_transaction(record)])
            self.end = batch[-1].end_offset
            self._keep(changed)
        self.end = log_end

    def flush(self) -> None:
        """Save the states, if there is a new one. Raises OSError."""
        if self._unsaved:
            self._save()

    def reset(self) -> None:
        """Forget everything, durably."""
        self._states = []
        self._set(_State(0, [], []))
        if self._fs.exists(self._path):
            self._save()

    def delete_before(self, min_offset: int) -> None:
        """Forget the transactions whose last half message retention has removed.

        And the places of what is gone, which nobody could list as ended any more.
        """
        for half in self.halves():
            if half.offset < min_offset:
                log.error(
                    "the transaction of the half message at offset %d (UNIQ_KEY %s) was not ended"
                    " before retention removed it",
                    half.offset, half.key.decode("utf-8", "replace"),
                )  # fmt: skip
                self._forget(half)
        queue = self._queues.get(HALF_TOPIC, 0) if self._unsaid else None
        if queue is not None:
            first = queue.files.first_at(min_offset)
            for place in [place for place in self._unsaid if place < first]:
                del self._unsaid[place]

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _save(self) -> None:
        self._unsaved = False
        raw = msgspec.msgpack.encode([raw for _, raw in self._states])
        try:
            self._fs.replace_bytes(self._path, _FRAME.pack(raw))
        except BaseException:
            self._unsaved = True
            raise


def _key(record: Dispatched) -> bytes:
    return (find_property(record.properties, b"UNIQ_KEY") or b"")[:255]


def _unpack(raw: bytes) -> list[tuple[int, bytes]]:
    """Return what the file holds; nothing if it is damaged, which only makes a start slower."""
    content = _FRAME.unpack(raw)
    if content is None:
        return []
    try:
        return [(_read_state(state).end, state) for state in _read_states(content)]
    except UNREADABLE:
        return []
