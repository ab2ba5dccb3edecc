"""Random changes of a store of mode dledger, and a model of what must survive each of them."""

import random
from dataclasses import dataclass, replace

from hastore.config.model import RetentionConfig
from hastore.dledger.core.events import HardState, OwnEntry, TakenEntries
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.fs.protocols import FileSystem
from hastore.protocol.dledger import AppendRequest, MemberSet
from hastore.record.codec import decode_record
from hastore.record.log_format import OWN_TOPIC, pack_header
from tests.dledger.store.kit import folder_bytes, make
from tests.dledger.store.records import record
from tests.store.kit import log_has, message

FILE_SIZE = 8192
RETENTION = RetentionConfig(max_size_bytes=4 * FILE_SIZE)
Entry = tuple[int, int | None]  # term, number of the message


@dataclass(frozen=True)
class Model:
    """What the store must have: begin, entries, how many of all are on the disk, hard state."""

    begin: int = 0
    entries: tuple[Entry, ...] = ()
    persisted: int = 0
    state: HardState = HardState(0, None)
    remembers: bool = False
    committed: int = -1
    rescued: tuple[tuple[int, bytes], ...] = ()  # what installs had to keep: position, bytes


class Run:
    """Random changes of a store; `after` has the models before and after the change at work."""

    def __init__(self, seed: int, root: str, fs: FileSystem) -> None:
        self.chance = random.Random(seed)
        self.fs = fs
        self.root = root
        self.store = self.made()
        self.now = Model()
        self.after: list[Model] = [self.now]
        self.number = 0

    def made(self) -> DLedgerMmapFileStore:
        return make(self.root, fs=self.fs, commitlog_file_size=FILE_SIZE, retention=RETENTION)

    def act(self, after: Model, *steps) -> None:
        self.after = [self.now, after]
        for step in steps:
            step()
        self.now = after
        self.after = [after]

    def go(self, count: int) -> None:
        self.store.open()
        for _ in range(count):
            self.chance.choice(
                (self.put, self.put, self.put, self.take, self.take, self.flush, self.flush,
                 self.vote, self.forget, self.cut, self.own, self.commit, self.commit, self.retain,
                 self.install, self.restart)
            )()  # fmt: skip

    def put(self) -> None:
        term = max(self.now.state.term, 1)
        self.hard(term)
        count = self.chance.randrange(1, 8)
        numbers = range(self.number, self.number + count)
        self.number += count
        records = [message(one, size=self.chance.choice((0, 80, 900))) for one in numbers]
        new = tuple((term, number) for number in numbers)
        after = replace(self.now, entries=self.now.entries + new)
        self.act(after, lambda: self.store.put(term, [b"".join(records)]))

    def hard(self, term: int) -> None:
        if self.now.state.term < term:
            self.save(HardState(term, 1), self.chance.choice((True, None)))

    def save(self, state: HardState, remembers: bool | None) -> None:
        knows = self.now.remembers if remembers is None else remembers
        after = replace(self.now, state=state, remembers=knows)
        # A crash in between may leave the new vote in a store that does not remember.
        between = replace(after, remembers=knows and self.now.remembers)
        self.after = [self.now, between, after]
        self.store.save_hard_state(state, remembers=remembers)
        self.now = after
        self.after = [after]

    def forget(self) -> None:
        self.save(self.now.state, False)

    def own(self) -> None:
        self.hard(self.now.state.term + 1)
        term, index = self.now.state.term, self.now.begin + len(self.now.entries)
        group = self.chance.choice((None, MemberSet((1, 2, 3)), MemberSet((1, 2), (3,))))
        after = replace(
            self.now,
            entries=(*self.now.entries, (term, None)),
        )
        self.act(after, lambda: self.store.append_own(OwnEntry(index, term, group)))

    def take(self) -> None:
        """Take entries of a leader: several at once, of one file, which may be the next one."""
        self.hard(max(self.now.state.term, 1))
        term, first = self.now.state.term, self.now.begin + len(self.now.entries)
        pos = self.store.end_position(first - 1)
        if self.chance.random() < 0.3 and pos % FILE_SIZE:
            pos += FILE_SIZE - pos % FILE_SIZE  # the leader's next entry was too large
        room = FILE_SIZE - pos % FILE_SIZE - 8
        data, new = b"", []
        for number in range(self.number, self.number + self.chance.randrange(1, 30)):
            body = record(pos + len(data) + 48, number, bytes(self.chance.choice((0, 50, 700))))
            if len(data) + 48 + len(body) > room:
                break
            data += pack_header(first + len(new), term, pos + len(data), len(body)) + body
            new.append((term, number))
        if not new:
            return
        self.number += len(new)
        request = AppendRequest(
            term, first - 1, self.store.end_term, pos, len(data), ((term, len(new)),), -1
        )
        taken = TakenEntries(0, first + len(new) - 1)
        after = replace(self.now, entries=(*self.now.entries, *new))
        self.act(after, lambda: self.store.append_taken(request, data, taken))

    def retain(self) -> None:
        """Let retention remove what is committed and too much."""
        self.flush()
        messages = self.store.messages
        assert messages.wait_dispatched(messages.max_offset, 60)
        hold = self.store.end_position(self.now.committed) if self.now.committed >= 0 else 0
        end = messages.retention.expired_end(hold)
        if end is None:
            return
        before, ends = self.now, range(messages.min_offset + FILE_SIZE, end + 1, FILE_SIZE)
        models = [self._without(self.store.index_at(each) + 1) for each in ends]
        self.after = [before, *models]  # the files go one by one
        messages.retention.delete_expired(hold)
        self.now = models[-1]
        self.after = [self.now]

    def _without(self, begin: int) -> Model:
        return replace(self.now, begin=begin, entries=self.now.entries[begin - self.now.begin :])

    def restart(self) -> None:
        self.flush()
        self.act(self.now, self.store.close)
        self.store = self.made()
        state = self.now.state
        if self.now.entries and self.now.entries[-1][0] > state.term:
            state = HardState(self.now.entries[-1][0], None)
        self.act(replace(self.now, state=state), self.store.open)

    def flush(self) -> None:
        after = replace(self.now, persisted=self.now.begin + len(self.now.entries))
        self.act(after, self.store.flush)

    def vote(self) -> None:
        state = HardState(self.now.state.term + 1, self.chance.choice((None, 2, 3)))
        self.save(state, self.chance.choice((True, None)))

    def commit(self) -> None:
        low, high = self.now.committed, self.now.persisted - 1
        if high > low:
            index = self.chance.randrange(low + 1, high + 1)
            self.act(replace(self.now, committed=index), lambda: self.store.commit(index))

    def cut(self) -> None:
        end = self.now.begin + len(self.now.entries)
        low = max(self.now.committed + 1, self.now.begin)
        if low >= end or self.chance.random() < 0.5:
            return
        index = self.chance.randrange(low, end)
        after = replace(
            self.now,
            entries=self.now.entries[: index - self.now.begin],
            persisted=min(self.now.persisted, index),
        )
        self.act(after, lambda: self.store.truncate(index))

    def install(self) -> None:
        if self.chance.random() < 0.7:
            return
        index = self.now.begin + len(self.now.entries) + self.chance.randrange(100)
        pos = self.store.messages.max_offset // FILE_SIZE * FILE_SIZE + 5 * FILE_SIZE
        self.hard(max(self.now.state.term, 1))
        after = replace(self.now, begin=index, entries=(), persisted=index, committed=index - 1)
        first = self.store.end_position(self.store.committed_index)
        data = folder_bytes(f"{self.store.messages.directory}/data", self.fs)
        tail = data[first - self.first_file() : self.store.messages.max_offset - self.first_file()]
        after = replace(after, rescued=(*after.rescued, *([(first, tail)] if tail else [])))
        self.act(after, lambda: self.store.install(index, pos, self.now.state.term))

    def first_file(self) -> int:
        return int(min(self.fs.list_dir(f"{self.store.messages.directory}/data"), default="0"))


def is_rescued(fs, root: str, pos: int, tail: bytes) -> bool:
    """Whether an archive has these bytes of the log, in files of the log's names."""
    for name in fs.list_dir(f"{root}/rescued"):
        folder = f"{root}/rescued/{name}"
        files = {int(one): fs.read_bytes(f"{folder}/{one}") for one in fs.list_dir(folder)}
        if log_has(files, pos, tail, FILE_SIZE):
            return True
    return False


def found_in(store) -> Model:
    entries: list[Entry] = []
    for index in range(store.begin_index, store.end_index + 1):
        pos, end = store.position(index), store.end_position(index)
        with store.messages.view(pos, end - pos) as view:
            record = decode_record(view, 48)
        is_own = record.topic == OWN_TOPIC
        number = None if is_own else int(dict(record.property_pairs)["KEYS"][3:])
        entries.append((store.term_of(index), number))
    return Model(
        store.begin_index, tuple(entries), store.persisted_index + 1, store.hard_state,
        store.remembers, store.committed_index,
    )  # fmt: skip


def is_kept(model: Model, found: Model) -> str:
    """Return what of the model is missing in what was found; nothing if it is all there."""
    count = len(found.entries)
    if found.begin != model.begin:
        return "another begin"
    if model.entries[:count] != found.entries:
        return "other entries"
    if found.begin + count < model.persisted:
        return "synced entries are lost"
    reached = max([model.state.term, *(term for term, _ in found.entries[-1:])])
    seen = found.state.term, found.state.voted_for
    if seen not in ((model.state.term, model.state.voted_for), (reached, None)):
        return "another hard state"
    if found.state.term < model.state.term or found.remembers != model.remembers:
        return "the vote is forgotten, or what was forgotten is not"
    if found.committed > max(model.committed, model.begin - 1):
        return "more is committed"
    return ""
