"""A store against a list: random puts, cuts, syncs, retention, stops and crashes."""

import random
import shutil
from pathlib import Path

import pytest

from hastore.record.codec import decode_record
from hastore.store.message_store import MessageStore
from tests.store.kit import FILE_SIZE, HOST, bodies, config, crash_copy, message, put

STEPS = 60


class Life:
    """A store and its expected messages: (offset, end, body, sequence) of each, in order."""

    def __init__(self, root: Path, chance: random.Random) -> None:
        self.root = root
        self.chance = chance
        self.lives = 0
        self.sequence = 0
        self.held: list[tuple[int, int, bytes, int]] = []
        self.store = self.start(root / "0")

    def start(self, place: Path) -> MessageStore:
        store = MessageStore(config(place), store_host=HOST)
        store.open()
        return store

    def put(self) -> None:
        count = self.chance.randrange(1, 20)
        size = self.chance.choice([0, 10, 300, 3000])
        records = [
            message(self.sequence + n, size=size, producer="p") for n in range(count)
        ]  # fmt: skip
        payloads = [b"".join(records)] if self.chance.random() < 0.5 else records
        for number, result in enumerate(put(self.store, *payloads)):
            body = decode_record(records[number]).body
            assert result.offset is not None and result.end_offset is not None
            self.held.append((result.offset, result.end_offset, body, self.sequence + number))
        self.sequence += count

    def put_again(self) -> None:
        if self.held:
            offset, _, body, sequence = self.chance.choice(self.held[-1000:])
            again = put(self.store, message(sequence, size=len(body), producer="p"))[0]
            assert (again.offset, again.duplicate) == (offset, True)

    def cut(self) -> None:
        if self.held:
            place = self.chance.randrange(len(self.held))
            self.store.truncate(self.held[place][0])
            del self.held[place:]

    def flush(self) -> None:
        assert self.store.flush() == self.store.max_offset

    def reopen(self) -> None:
        place = Path(self.store.config.root)
        self.store.close()
        self.store = self.start(place)

    def crash(self) -> None:
        self.lives += 1
        copy = crash_copy(self.store, self.root / str(self.lives))
        self.store.close()
        shutil.rmtree(self.store.config.root)
        self.store = self.start(Path(copy))

    def check(self) -> None:
        assert bodies(self.store) == [body for _, _, body, _ in self.held]
        for offset, end, body, _ in self.chance.sample(self.held, min(5, len(self.held))):
            record = self.store.reader.record_at(offset)
            assert record is not None and (record.body, record.size) == (body, end - offset)
        if self.held:
            # A retry of a stored message may append only a blank.
            end = self.held[-1][1]
            assert self.store.max_offset in (end, end - end % FILE_SIZE + FILE_SIZE)
            key = f"key{self.held[-1][3]}"
            assert self.store.reader.query_key("TopicA", key) == [self.held[-1][0]]


@pytest.mark.parametrize("turn", range(6))
def test_a_random_sequence_of_operations(tmp_path: Path, turn: int) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}, turn {turn}")
    life = Life(tmp_path, random.Random(seed))
    acts = [life.put] * 8 + [life.put_again, life.cut, life.flush, life.reopen, life.crash]
    for _ in range(STEPS):
        act = life.chance.choice(acts)
        act()
        if life.chance.random() < 0.2:
            life.check()
    life.check()
    life.store.close()
