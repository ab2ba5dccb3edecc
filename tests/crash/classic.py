"""A node of mode classic: random changes of its store and its state, over a disk that may crash.

A node is a master, or the slave of a log that grows elsewhere, is cut, and begins anew.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import msgspec

from hastore.config.model import RetentionConfig
from hastore.fs.memory import MemoryFileSystem
from hastore.ha.replica.rewind import cut_back
from hastore.ha.rules.epochs import EpochEntry, next_epoch
from hastore.store.append import dedup_window
from hastore.store.cuts import Dismissal, dismissal_path
from hastore.store.derived import deliveries, transactions
from hastore.store.message_store import MessageStore
from hastore.store.rebuild import rebuild
from hastore.store.rebuild.layout import Sizes
from tests.crash.book import Book
from tests.crash.inline import provide, step
from tests.crash.node import FILE_SIZE, ROOT, SIZES, Parts, Ticks, fail, start
from tests.crash.puts import Puts
from tests.crash.recording import RecordingFileSystem
from tests.store.kit import HOST, config
from tests.store.rebuild.kit import how

DERIVED = ("consume_queue_units", "index_slots", "index_entries")
ITSELF, OTHER = 1, 2


@dataclass(frozen=True)
class Version:
    """A log that may be there: it begins at one of these offsets, and has all below `synced`.

    These bytes are archived then, each part from an offset on.
    """

    book: Book
    begins: frozenset[int] = frozenset({0})
    synced: int = 0
    rescued: tuple[tuple[int, bytes], ...] = ()
    whole_from: int = 0  # positions that were committed below this are another node's to state
    derived: int = 0  # retention may have removed what is derived from records before this


@dataclass(frozen=True)
class Note:
    """What must hold: one of these logs is there; the bytes of `mending` may be damaged."""

    versions: tuple[Version, ...]
    mending: range = range(0)


def small_steps() -> list[object]:
    """Let what is written after megabytes be written after some records."""
    return [
        patch.object(deliveries, "_STEP_BYTES", 2048),
        patch.object(transactions, "_STEP_BYTES", 2048),
        patch.object(dedup_window, "_SNAPSHOT_STEP_BYTES", 4096),
        # It asks the system for the time of a file.
        patch.object(rebuild, "fingerprint", lambda fs, log: [log.first, log.limit]),
    ]


class ClassicRun(Puts):
    """One workload; `go` carries out random steps."""

    def __init__(
        self,
        fs: RecordingFileSystem,
        seed: int,
        *,
        slave: bool | None = None,
        favour: Sequence[str] = (),
    ) -> None:
        """Open a node; `favour` are names of steps that are carried out as often as all others."""
        super().__init__()
        self.favour = favour
        self.chance = random.Random(seed)
        self.fs = fs
        self.clock = Ticks()
        self.note = Note((Version(Book()),))
        self.is_slave = self.chance.random() < 0.5 if slave is None else slave
        self.parts = Parts(fs, self.clock)
        self.fs.promise(self.note)
        start(self.parts)
        self.source = self.parts.store
        if self.is_slave:
            elsewhere = MemoryFileSystem()
            self.source = MessageStore(
                config("/other", **{**SIZES, "retention": RetentionConfig(max_age_ms=None)}),
                fs=elsewhere, clock=self.clock, store_host=HOST, on_failure=fail,
            )  # fmt: skip
            self.source.open()
        self.open_epoch()

    # -- steps ------------------------------------------------------------------------------------

    def go(self, count: int) -> None:
        """Carry out steps, and close the store."""
        own = [
            *([self.flush] * 3), *([self.replay] * 3), self.keep, self.keep, self.confirm,
            self.promise, self.allocate, self.retain, self.retain, self.restart, self.cut,
            self.learn, self.dismiss, self.mend, self.fill_disk, self.set_back, self.rebuild,
        ]  # fmt: skip
        puts = [
            *([self.put] * 6), self.commit, self.commit, self.topic, self.half, self.end_half,
            self.delay, self.deliver, self.state_ends,
        ]  # fmt: skip
        more = [*([self.take] * 8), self.resync] if self.is_slave else [self.open_epoch]
        steps: list[Callable[[], None]] = [*own, *puts, *more]
        favoured = [getattr(self, name) for name in self.favour]
        for _ in range(count):
            self.chance.choice(favoured if favoured and self.chance.random() < 0.5 else steps)()
        self.act(self.note, self.close)

    def act(self, after: Note, *steps: Callable[[], object]) -> None:
        """Let both what held before and what will hold be true meanwhile."""
        self.fs.promise(self.either(after))
        for one in steps:
            one()
        self.note = after
        self.fs.promise(after)

    def either(self, after: Note) -> Note:
        versions = (*self.note.versions, *after.versions)
        return replace(self.note, versions=tuple(dict.fromkeys(versions)))

    @property
    def version(self) -> Version:
        return self.note.versions[-1]

    def with_version(self, **changes: object) -> Note:
        return replace(self.note, versions=(replace(self.version, **changes),))

    # -- what the node does -----------------------------------------------------------------------

    def take(self) -> None:
        """Take bytes of the other log, which may end inside a record."""
        store, end = self.parts.store, self.parts.store.max_offset
        size = self.source.max_offset - end
        size = min(size, FILE_SIZE - end % FILE_SIZE, self.chance.choice((100, 700, 1 << 20)))
        if size <= 0:
            return
        with self.source.view(end, size) as view:
            data = bytes(view)
        if self.chance.random() < 0.3:  # as from a socket: past the interface of the file
            place = store.replica_range(end, len(data))
            with open(f"/proc/self/fd/{place.fd}", "r+b", buffering=0) as file:
                file.seek(place.position)
                file.write(data)
            store.commit_replica(end, len(data))
        else:
            store.append_replica(end, data)

    def flush(self) -> None:
        end = self.parts.store.whole_offset
        self.act(self.with_version(synced=max(self.version.synced, end)), self.parts.store.flush)

    def replay(self) -> None:
        for _ in range(self.chance.randrange(1, 4)):
            step(self.parts.store.replay)

    def keep(self) -> None:
        self.parts.store._keep()

    def allocate(self) -> None:
        provide(self.parts.store.log.allocator)

    def confirm(self) -> None:
        store = self.parts.store
        low = store.confirmed_offset
        if store.whole_offset > low:
            end = self.chance.randrange(low, store.whole_offset + 1)
            store.set_limits(confirmed=end, readable=end)

    def promise(self) -> None:
        state = self.parts.state
        epoch = next_epoch(max(state.data.promised_epoch, state.last_epoch), OTHER)
        state.promise(epoch, 1, (ITSELF, OTHER))

    def open_epoch(self) -> None:
        state = self.parts.state
        epoch = next_epoch(max(state.data.promised_epoch, state.last_epoch), ITSELF)
        start = self.parts.store.whole_offset
        state.promise(epoch, 1, (ITSELF, OTHER))
        if self.parts.store.max_offset == start:
            entry = EpochEntry(epoch, start, 1, (ITSELF, OTHER))
            state.open_epoch((*state.history, entry))

    def learn(self) -> None:
        self.parts.state.learn_store(OTHER, f"store{self.chance.randrange(3)}")

    def retain(self) -> None:
        store, files = self.parts.store, self.parts.store.log.queue.files
        end = store.retention.expired_end(None)
        if end is None:
            return
        begins = [file.start for file in files if store.min_offset <= file.start <= end]
        between = self.with_version(begins=frozenset({*self.version.begins, *begins, end}))
        after = self.with_version(begins=frozenset({end}))
        self.fs.promise(self.either(between))
        assert self.parts.kept.gather(store, end, lambda: False)
        store.retention.delete_expired(None)
        self.note = after
        self.fs.promise(after)

    def cut(self) -> None:
        """Cut back to a common point; a master's log is that of a node that lost an election."""
        store, book = self.parts.store, self.version.book
        low = max(store.confirmed_offset, store.min_offset)
        ends = sorted(end for end in book.ends if low <= end <= store.whole_offset)
        if len(ends) < 2 or self.chance.random() < 0.5:
            return
        at = self.chance.choice(ends[:-1])
        new = book.until(at)
        tail = bytes(book.data[at : store.max_offset])
        lower = replace(self.version, synced=min(self.version.synced, at))
        done = replace(lower, book=new, rescued=(*lower.rescued, (at, tail)))
        self.fs.promise(Note((self.version, lower, done)))
        state = self.parts.state
        entries = sum(1 for one in state.history if one.start <= at)
        cut_back(store, state, at, entries, accept_loss=False, why="a test")
        self.note = Note((done,))
        if self.is_slave:
            self.source.truncate(at)
        self.fs.promise(self.note)

    def resync(self) -> None:
        """Set the log aside, as HAClient does, and begin at a record of the other log."""
        store, state = self.parts.store, self.parts.state
        book = self.version.book
        choices = [one for one in book.entries if one.end <= self.source.max_offset]
        if not choices or self.chance.random() < 0.6:
            return
        at, begin = self.chance.choice(choices).offset, store.min_offset
        tail = bytes(book.data[begin : max(begin, self.version.synced)])
        rescued = (*self.version.rescued, *([(begin, tail)] if tail else []))
        done = Version(book, frozenset({at}), at, rescued, at)
        empty = Version(book, frozenset({0, at, begin}), 0, rescued, max(at, begin))
        self.fs.promise(Note((self.version, empty, done)))
        state.save(unclean=True, aside=state.data.aside + 1)
        store.set_aside(f"{state.last_epoch}-{begin}-{state.data.aside}")
        store.begin_at(at)
        state.replace_history(())
        store.set_limits(confirmed=at, readable=at)
        self.note = Note((done,))
        self.fs.promise(self.note)

    def dismiss(self) -> None:
        request = Dismissal(ids=(1, 2), by="eve")
        self.fs.replace_bytes(dismissal_path(ROOT), msgspec.json.encode(request))
        self.parts.store.cuts.take_dismissal()

    def mend(self) -> None:
        """Write sound bytes over damaged ones, in a file before the last one."""
        self.restart()  # what recovery reads again lies behind this
        store, synced = self.parts.store, self.version.synced
        if not store.log.queue.files:
            return
        end = min(synced - synced % FILE_SIZE, store.log.queue.files[-1].start)
        choices = self.version.book.within(store.min_offset, end)
        if not choices:
            return
        one = self.chance.choice(choices)
        data = bytes(self.version.book.data[one.offset : one.end])
        file = store.log.queue.find(one.offset)
        assert file is not None
        self.fs.promise(replace(self.note, mending=range(one.offset, one.end)))
        file.pwrite(bytes(len(data)), one.offset)
        file.sync()
        store.mend([(one.offset, data)], store.times_cut)
        self.fs.promise(self.note)

    def fill_disk(self) -> None:
        """Note something on a full disk, in a file of the reserve."""
        self.parts.store.keep_reserve([])
        self.fs.full = True
        try:
            self.promise()
        finally:
            self.fs.full = False

    def set_back(self) -> None:
        """Set the clock back: where store times fall is noted in a file."""
        if self.chance.random() < 0.3:
            self.clock.ms -= 60_000

    def rebuild(self) -> None:
        """Build queues and index anew from the log of the stopped node."""
        if self.chance.random() < 0.3:
            sizes = Sizes(*(SIZES[name] for name in DERIVED))
            ranges = how(range_bytes=4096)
            self.restart(lambda: rebuild.rebuild_in_place(self.fs, ROOT, sizes, ranges))

    def close(self) -> None:
        self.parts.store.close()
        self.parts.state.end_cleanly()

    def restart(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        store = self.parts.store
        whole = store.whole_offset
        after = self.with_version(synced=max(whole, self.version.synced))
        self.act(after, self.close)
        self.act(after, meanwhile)
        self.parts = Parts(self.fs, self.clock)
        self.act(after, partial(start, self.parts))
        if not self.is_slave:
            self.source = self.parts.store
