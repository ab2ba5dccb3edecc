"""What a kill or a power loss leaves, at every kind of call: nothing that was promised is lost."""

import os
import random
from dataclasses import dataclass, replace

import pytest

from hastore.dledger.core.events import HardState, OwnEntry
from hastore.record.codec import decode_record
from hastore.record.entry import OWN_TOPIC
from hastore.store.state.limits import LimitsPage, read_limits
from tests.dledger.store.kit import folder_bytes, make, walk
from tests.dledger.store.lossy import LossyFileSystem
from tests.store.kit import message

FILE_SIZE = 8192
SAMPLES = int(os.environ.get("CRASH_SAMPLES", "40"))
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


class Run:
    """Random changes of a store; a snapshot has the model before and after the change at work."""

    def __init__(self, seed: int, root: str) -> None:
        self.chance = random.Random(seed)
        self.fs = LossyFileSystem()
        self.root = root
        self.store = make(root, fs=self.fs, commitlog_file_size=FILE_SIZE)
        self.now = Model()
        self.after: list[Model] = [self.now]
        self.number = 0

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
                (self.put, self.put, self.put, self.flush, self.flush, self.vote, self.cut,
                 self.own, self.commit, self.install)
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
            state = HardState(term, 1)
            after = replace(self.now, state=state, remembers=True)
            self.act(after, lambda: self.store.save_hard_state(state, remembers=True))

    def own(self) -> None:
        self.hard(self.now.state.term + 1)
        term, index = self.now.state.term, self.now.begin + len(self.now.entries)
        members = self.chance.choice((None, (1, 2, 3), (1, 2)))
        after = replace(
            self.now,
            entries=(*self.now.entries, (term, None)),
        )
        self.act(after, lambda: self.store.append_own(OwnEntry(index, term, members)))

    def flush(self) -> None:
        after = replace(self.now, persisted=self.now.begin + len(self.now.entries))
        self.act(after, self.store.flush)

    def vote(self) -> None:
        state = HardState(self.now.state.term + 1, self.chance.choice((None, 2, 3)))
        after = replace(self.now, state=state, remembers=True)
        self.act(after, lambda: self.store.save_hard_state(state, remembers=True))

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
        self.act(after, lambda: self.store.install(index, pos, self.now.state.term))


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
    if found.state.term < model.state.term or found.remembers < model.remembers:
        return "the vote is forgotten"
    if found.committed > max(model.committed, model.begin - 1):
        return "more is committed"
    return ""


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_nothing_that_was_promised_is_lost(tmp_path, kind):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    for part in range(2):
        check_run(tmp_path / f"{part}", seed + part, kind)


def check_run(tmp_path, seed, kind):
    run = Run(seed, str(tmp_path / "s"))
    snapshots = []

    def notice(number: int) -> None:
        if number % 7 == wanted:
            snapshots.append(run.fs.snapshot(list(run.after)))

    wanted = run.chance.randrange(7)
    run.fs.on_call = notice
    try:
        run.go(60)
    finally:
        run.store.close()
    assert len(snapshots) > 30
    chance = random.Random(seed)
    for number, snapshot in enumerate(chance.sample(snapshots, min(SAMPLES, len(snapshots)))):
        fs = snapshot.restored(chance if kind == "power" else None)
        if kind == "power":
            forget_boot(fs, run.root)
        check(fs, run.root, snapshot.note, f"seed {seed} number {number}")


def forget_boot(fs, root):
    """Make the limits page one of another boot."""
    found = read_limits(fs, root)
    if found is not None:
        page = LimitsPage(fs, root)
        page.open(found._replace(boot_id=b"another boot id."))
        page.close()


def check(fs, root, models, where):
    store = make(root, fs=fs, commitlog_file_size=FILE_SIZE)
    store.open()
    try:
        found = found_in(store)
        reasons = [is_kept(model, found) for model in models]
        assert "" in reasons, (where, reasons, found, models)
        if found.entries:
            data = folder_bytes(f"{store.messages.directory}/data", fs)
            _, units = walk(data, FILE_SIZE, store.messages.min_offset)
            first = store.begin_index * 32
            folder = folder_bytes(f"{store.messages.directory}/index", fs)
            start = first // 4096 * 4096
            assert folder[first - start :].startswith(units), where
            assert not any(folder[first - start + len(units) :]), where
    finally:
        store.close()
