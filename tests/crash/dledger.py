"""A store of mode dledger: the random changes of its own tests, over a disk that may crash."""

import contextlib
import random
from dataclasses import dataclass, replace
from typing import Any

from hastore.dledger.driver.requests import RequestFile, write_request
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from tests.crash.inline import step
from tests.crash.recording import RecordingFileSystem
from tests.crash.violation import Violation
from tests.dledger.store.kit import folder_bytes, make, walk
from tests.dledger.store.random_run import (
    FILE_SIZE,
    Model,
    Run,
    found_in,
    is_kept,
    is_rescued,
)

ROOT = "/node"


@dataclass(frozen=True)
class EntryNote:
    """What must hold: the store has what one of these models has."""

    models: tuple[Model, ...]


class EntryRun(Run):
    """The random changes; what may be true meanwhile is promised to the disk."""

    def __init__(self, fs: RecordingFileSystem, seed: int) -> None:
        super().__init__(seed, ROOT, fs)

    @property
    def after(self) -> list[Model]:
        return self._after

    @after.setter
    def after(self, models: list[Model]) -> None:
        self._after = models
        self.fs.promise(EntryNote(tuple(models)))

    def go(self, count: int) -> None:
        """Carry out steps; what the store's threads do is done between them."""
        self.store.open()
        more = (self.keep, self.keep, self.replay, self.request)
        steps = (
            self.put, self.put, self.put, self.take, self.take, self.flush, self.flush, self.vote,
            self.forget, self.cut, self.own, self.commit, self.commit, self.retain, self.install,
            self.restart, *more,
        )  # fmt: skip
        for _ in range(count):
            self.chance.choice(steps)()
        self.flush()
        self.act(self.now, self.store.close)

    def keep(self) -> None:
        self.act(self.now, self.store.messages._keep)

    def replay(self) -> None:
        step(self.store.messages.replay)

    def request(self) -> None:
        """Take an administrator's request: it is carried out once."""
        write_request(self.fs, ROOT, "add", 4, term=1, members=(1, 2, 3), wall_ms=1)
        self.act(self.now, RequestFile(self.fs, ROOT, self.store.messages._clock).pop)


def check(fs: RecordingFileSystem, note: EntryNote, chance: random.Random) -> EntryNote:
    """Open the store that a crash has left; return what must be there from now on."""
    fs.promise(note)
    store = make(ROOT, fs=fs, commitlog_file_size=FILE_SIZE)
    store.open()
    try:
        found = found_in(store)
        reasons = [is_kept(model, found) for model in note.models]
        if "" not in reasons:
            raise Violation(f"{'; or '.join(reasons)}: found {_short(found)}")
        model = note.models[reasons.index("")]
        for position, tail in model.rescued:
            if not is_rescued(fs, ROOT, position, tail):
                raise Violation(f"{len(tail)} bytes from {position} on are not in rescued/")
        now = EntryNote((_from(found, model),))
        fs.promise(now)
        check_files(store, fs)
        while step(store.messages.replay):
            continue
        if store.messages.replay.blocked_reason is not None:
            raise Violation(store.messages.replay.blocked_reason)
        if chance.random() < 0.3:
            store.messages._keep()
        return now
    finally:
        with contextlib.suppress(Exception):
            store.close()


def check_files(store: DLedgerMmapFileStore, fs: RecordingFileSystem) -> None:
    """Log and index are those of FORMATS, and of each other."""
    if store.end_index < store.begin_index:
        return
    data = folder_bytes(f"{store.messages.directory}/data", fs)
    try:
        _, units = walk(data, FILE_SIZE, store.messages.min_offset)
    except AssertionError as failure:
        raise Violation(f"the log is not as FORMATS says: {failure}") from failure
    folder = f"{store.messages.directory}/index"
    at = store.begin_index * 32 - int(min(fs.list_dir(folder)))
    index = folder_bytes(folder, fs)
    if not index[at:].startswith(units) or any(index[at + len(units) :]):
        raise Violation("the index is not that of the log")


def _from(found: Model, model: Model) -> Model:
    """What was found is synced when the store is open."""
    return replace(found, rescued=model.rescued)


def _short(found: Model) -> Any:
    return found.begin, len(found.entries), found.persisted, found.state, found.committed
