"""Pulls of a store: damage, holes in a queue, inner batches, records with certain tags."""

import gc
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hastore.client.messages import decode_messages
from hastore.errors import CorruptRecordError, UsageError
from hastore.protocol.api import Position
from hastore.record.codec import Host
from hastore.record.hashes import tag_codes
from hastore.record.layout import MIN_RECORD_SIZE, offset_of
from hastore.store.derived import consume_queue
from hastore.store.derived.consume_queue import UNIT
from hastore.store.derived.unit_files import BLANK_UNIT_SIZE
from hastore.store.message_reader import MessageReader, PullStatus
from hastore.store.message_store import MessageStore
from tests.store.kit import inner_batch, message, opened, put, read_log, scribble

QUEUE_OFFSET_AT = offset_of("queue_offset")


def test_a_pull_returns_the_records_before_damage_and_refuses_the_damaged_one(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as store:
        offsets = [result.offset for result in put(store, *map(message, range(20)))]
        assert store.wait_dispatched(store.max_offset, 60)

        def pull(at: int):  # type: ignore[no-untyped-def]
            return store.reader.pull(
                "TopicA", 0, at, max_messages=100, max_bytes=1 << 20,
                limit_offset=store.max_offset,
            )  # fmt: skip

        whole = pull(0)
        assert (whole.status, whole.count, whole.next_queue_offset) == (PullStatus.FOUND, 20, 20)
        assert whole.records == read_log(tmp_path)[: store.max_offset]
        assert whole.last_offset == offsets[-1]
        scribble(
            os.path.join(tmp_path, "commitlog", f"{0:020d}"), offsets[7] + MIN_RECORD_SIZE, b"?"
        )
        before = pull(0)
        assert (before.count, before.next_queue_offset, before.last_offset) == (7, 7, offsets[6])
        assert before.records == whole.records[: offsets[7]]
        with pytest.raises(CorruptRecordError, match=f"offset {offsets[7]} is damaged"):
            pull(7)
        assert pull(8).count == 12


@pytest.mark.parametrize("count", [20, 200])
@pytest.mark.parametrize("source", [("secret", 0, 7), ("orders", 0, 9), ("orders", 1, 7)])
def test_a_damaged_unit_gives_nobody_a_record_of_another_place(
    tmp_path: Path, count: int, source: tuple[str, int, int]
) -> None:
    """A consumer of a topic got another one's message, and its own was stepped over."""
    with opened(tmp_path) as store:
        places = [("orders", 0), ("secret", 0), ("orders", 1)]
        put(store, *(message(number, topic=topic, queue_id=queue_id)
                     for number in range(count) for topic, queue_id in places))  # fmt: skip
        assert store.wait_dispatched(store.max_offset, 60)
        wrong: list[int] = []
        store.hooks.on_wrong = wrong.append

        def pull(at: int, **more: Any) -> Any:
            return store.reader.pull("orders", 0, at, max_messages=count, max_bytes=1 << 20,
                                     limit_offset=store.max_offset, **more)  # fmt: skip

        whole = pull(0)
        assert whole.count == count and store.problems == []
        path = tmp_path / "consumequeue" / "orders" / "0" / f"{0:020d}"
        unit = path.read_bytes()[7 * UNIT.size : 8 * UNIT.size]
        topic, queue_id, number = source
        (other,) = store.queues.read(topic, queue_id, number, 1)
        scribble(str(path), 7 * UNIT.size, UNIT.pack(other.offset, other.size, other.tags_code))
        before = pull(0)
        assert (before.count, before.next_queue_offset) == (7, 7)
        assert before.records == whole.records[: sum(whole.sizes[:7])]
        for more in ({}, {"codes": frozenset({0})}):
            with pytest.raises(CorruptRecordError, match=f"offset {other.offset} as its 7, which"):
                pull(7, **more)
        assert pull(8).count == count - 8
        assert set(wrong) == {other.offset}, "the others may have another header there"
        (problem,) = store.problems
        assert "'orders' names the record" in problem and not store.lacks_room
        scribble(str(path), 7 * UNIT.size, unit)
        assert pull(3).records == whole.records[sum(whole.sizes[:3]) :] and store.problems == []
        scribble(str(path), 7 * UNIT.size, UNIT.pack(other.offset, other.size, other.tags_code))
    (tmp_path / "hastore" / "replay").unlink()  # the remedy
    with opened(tmp_path) as store:
        assert store.wait_dispatched(store.max_offset, 60)
        assert pull(0).records == whole.records and store.problems == []


class BothWays:
    """Pulls of a store that are also done without `pull_few`: the outcome must be the same."""

    def __init__(self, store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reader = store.reader
        self.ways: Counter[str] = Counter()
        few = MessageReader.pull_few

        def counted(*arguments: Any) -> Any:
            found = few(*arguments) if self.is_on else None
            self.ways["few" if found is not None else "others"] += self.is_on
            return found

        monkeypatch.setattr(MessageReader, "pull_few", counted)
        self.is_on = True

    def pull(self, topic: str, queue_id: int, at: int, **bounds: Any) -> tuple[Any, ...]:
        found = []
        for self.is_on in (True, False):
            try:
                with self.reader.without_waiting():
                    got = self.reader.pull(topic, queue_id, at, **bounds)
                found.append((
                    got.status, got.next_queue_offset, got.min_queue_offset, got.max_queue_offset,
                    got.records, got.count, got.last_offset, list(got.sizes), got.needs_offset,
                ))  # fmt: skip
            except CorruptRecordError as failure:
                found.append((str(failure),))
        self.is_on = True
        assert found[0] == found[1], (topic, queue_id, at, bounds)
        return found[0]


@pytest.mark.parametrize("file_size", [64 * 1024, 1 << 20])
def test_a_pull_of_few_records_finds_what_any_other_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_size: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    hosts = [Host(b"\x7f\0\0\1", 5)] * 20 + [Host(bytes(16), 5)]
    with opened(tmp_path, commitlog_file_size=file_size, consume_queue_units=50) as store:
        places = [(chance.choice(("A", "Topic" * 9)), chance.randrange(2)) for _ in range(800)]
        results = put(store, *(
            message(number, topic=topic, queue_id=queue_id,
                    size=chance.choice((0, 10, 100, 1_024, 1_024)), born_host=chance.choice(hosts))
            for number, (topic, queue_id) in enumerate(places)
        ))  # fmt: skip
        assert store.wait_dispatched(store.max_offset, 60)
        both, ends = BothWays(store, monkeypatch), [one.end_offset for one in results]

        def pull() -> tuple[Any, ...]:
            return both.pull(
                chance.choice(("A", "A", "Topic" * 9, "none")), chance.randrange(3),
                chance.choice((chance.randrange(250), chance.randrange(-2, 500))),
                max_messages=chance.choice((0, 1, 8, 32, 32, 63, 64, 200)),
                max_bytes=chance.choice((1, 5_000, 1 << 18, 1 << 18)),
                limit_offset=chance.choice((store.max_offset, chance.choice(ends))),
                check_bodies=chance.random() < 0.9,
            )  # fmt: skip

        for _ in range(400):
            pull()
        spoiled = chance.sample(range(800), 40)
        for number in spoiled:
            offset = results[number].offset or 0
            place = divmod(offset + chance.randrange(MIN_RECORD_SIZE), file_size)
            name = os.path.join(tmp_path, "commitlog", f"{place[0] * file_size:020d}")
            scribble(name, place[1], chance.randbytes(1))
        damaged = sum(
            len(both.pull(*places[number], results[number].queue_offset, max_messages=8,
                          max_bytes=1 << 18, limit_offset=store.max_offset)) == 1
            for number in spoiled
        )  # fmt: skip
        for _ in range(800):
            pull()
        queue = store.queues.get("A", 0)
        assert queue is not None
        path = queue.files.path(0)
        blank = UNIT.pack(0, BLANK_UNIT_SIZE, 0)
        for number in chance.sample(range(50), 10):  # without a record
            scribble(path, number * UNIT.size, chance.choice((bytes(UNIT.size), blank)))
            for most in (1, 32):
                both.pull("A", 0, number, max_messages=most, max_bytes=1 << 18,
                          limit_offset=store.max_offset)  # fmt: skip
        for _ in range(400):
            pull()
        assert damaged and min(both.ways["few"], both.ways["others"]) > 30, both.ways


def test_a_large_pull_joins_its_records_in_parts_and_lets_the_garbage_collector_rest(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, commitlog_file_size=1 << 20, consume_queue_units=1_000) as store:
        results = put(store, *(message(n, queue_id=n % 2, size=n % 50) for n in range(8_000)))
        assert store.wait_dispatched(store.max_offset, 60)
        started: list[str] = []

        def note(phase: str, _: dict[str, int]) -> None:
            started.append(phase)

        gc.collect()
        gc.callbacks.append(note)
        try:
            found = store.reader.pull("TopicA", 1, 0, max_messages=5_000, max_bytes=1 << 24,
                                      limit_offset=store.max_offset)  # fmt: skip
        finally:
            gc.callbacks.remove(note)
        raws = [store.reader.record_bytes(one.offset) for one in results[1::2] if one.offset]
        assert found.count == len(raws) == 4_000
        assert found.records == b"".join(raw for raw in raws if raw)
        assert started.count("start") <= 2  # a view of each record at once: five times


def test_a_pull_skips_a_hole_of_whole_queue_files_but_no_record(tmp_path: Path) -> None:
    with opened(tmp_path, consume_queue_units=50) as store:
        offsets = [result.offset or 0 for result in put(store, *map(message, range(30)))]
        assert store.wait_dispatched(store.max_offset, 60)
        # RocketMQ leaves such a queue when its files were deleted but its queue offset continued.
        queue = store.queues.get("TopicA", 0)
        assert queue is not None
        units = queue.files.read(0, 30)
        queue.files.skip_to(5_020)
        queue.files.append(units)
        queue.settle()
        log_path = os.path.join(tmp_path, "commitlog", f"{0:020d}")
        for number, offset in enumerate(offsets):
            scribble(log_path, offset + QUEUE_OFFSET_AT, (5_020 + number).to_bytes(8))
        found = store.reader.pull(
            "TopicA", 0, 31, max_messages=1_000, max_bytes=1 << 20, limit_offset=store.max_offset
        )
        assert (found.count, found.next_queue_offset) == (30, 5_050)


def test_the_next_offset_after_an_inner_batch_is_that_of_the_next_one(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for base, count in ((0, 5), (5, 3), (8, 1)):
            store.append_replica(store.max_offset, inner_batch(base, count, store.max_offset))
        assert store.wait_dispatched(store.max_offset, 60)
        found = []
        for at in (0, 2, 5, 8):
            result = store.reader.pull(
                "Batches", 0, at, max_messages=1, max_bytes=9, limit_offset=store.max_offset
            )
            (message,), damage = decode_messages(result.records, [])
            assert (result.count, damage) == (1, None)
            assert message.next_position == Position(result.next_queue_offset)
            found.append((message.queue_offset, result.next_queue_offset))
        assert found == [(0, 5), (0, 5), (5, 8), (8, 9)]
        every = store.reader.pull(
            "Batches", 0, 0, max_messages=9, max_bytes=9_999, limit_offset=store.max_offset
        )
        assert (every.count, every.next_queue_offset) == (3, 9)


# -- records with certain tags

TAGS = ("", "red", "green", "blue")


def tagged(number: int, tag: str) -> bytes:
    return message(number, size=50 + number % 40, properties=[("TAGS", tag)] if tag else [])


def test_the_hashes_of_a_subscription_are_those_of_java() -> None:
    assert tag_codes("") is None and tag_codes("*") is None
    assert tag_codes("TagA") == {2598919}
    assert tag_codes(" TagA|| TagB ||") == {2598919, 2598920}
    assert tag_codes("polygenelubricants") == {1 << 31}  # its sign is dropped
    assert tag_codes("|") == {ord("|")} and tag_codes(" ") == frozenset()
    assert tag_codes("|| ".join(f"t{n}" for n in range(2_000))) is not None
    with pytest.raises(UsageError, match="names no tag"):
        tag_codes("||||")


def test_a_pull_by_tags_returns_what_looking_at_each_record_returns(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with opened(tmp_path, consume_queue_units=70) as store:
        tags: list[str] = []
        while len(tags) < 400:  # runs of one tag, and mixtures
            few = chance.choices(TAGS, k=chance.randint(1, 3))
            tags += chance.choices(few, k=chance.randint(1, 90))
        results = [put(store, tagged(n, tag))[0] for n, tag in enumerate(tags)]
        ends = [one.end_offset or 0 for one in results]
        starts = [one.offset or 0 for one in results]  # a blank may lie before a record
        assert store.wait_dispatched(store.max_offset, 60)
        for _ in range(300):
            wanted = set(chance.sample(TAGS[1:], chance.randint(1, 3)))
            limit = chance.choice((store.max_offset, chance.choice(ends), chance.choice(ends) - 1))
            at, most = chance.randrange(len(tags)), chance.choice((1, 3, 32, 500))
            most_bytes = chance.choice((1, 900, 1 << 20))
            found = store.reader.pull(
                "TopicA", 0, at, max_messages=most, max_bytes=most_bytes, limit_offset=limit,
                codes=tag_codes("||".join(wanted)),
            )  # fmt: skip
            number, taken, size = at, list[int](), 0
            while number < len(tags) and ends[number] <= limit:
                if tags[number] in wanted:
                    length = ends[number] - starts[number]
                    if len(taken) == most or (taken and size + length > most_bytes):
                        break
                    taken.append(number)
                    size += length
                number += 1
            records, damage = decode_messages(found.records, [])
            assert damage is None
            assert [record.queue_offset for record in records] == taken
            if found.count == most:  # whether it looks for the next one is not promised
                assert taken[-1] < found.next_queue_offset <= number
            else:
                assert found.next_queue_offset == number
            if not taken and number < len(tags):
                assert (found.status, found.needs_offset) == (PullStatus.NO_NEW, ends[number])
            readable = sum(end <= limit for end in ends)
            assert store.reader.readable_range("TopicA", 0, limit) == (0, readable)
        assert store.reader.readable_range("TopicB", 0, limit) is None


def test_a_pull_by_tags_looks_at_a_bounded_number_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consume_queue, "TAGGED_UNITS_MAX", 100)
    with opened(tmp_path) as store:
        put(store, *[tagged(n, "red") for n in range(250)], tagged(250, "blue"))
        assert store.wait_dispatched(store.max_offset, 60)
        at, seen = 0, []
        for _ in range(4):
            found = store.reader.pull(
                "TopicA", 0, at, max_messages=32, max_bytes=1 << 20,
                limit_offset=store.max_offset, codes=tag_codes("blue"),
            )  # fmt: skip
            at = found.next_queue_offset
            seen.append((found.status, at, found.count))
        no_match = PullStatus.NO_MATCH
        assert seen == [
            (no_match, 100, 0), (no_match, 200, 0), (PullStatus.FOUND, 251, 1),
            (PullStatus.NO_NEW, 251, 0),
        ]  # fmt: skip


def test_inner_batches_are_returned_whatever_their_tags(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.append_replica(0, inner_batch(0, 5, 0))
        assert store.wait_dispatched(store.max_offset, 60)
        found = store.reader.pull(
            "Batches", 0, 0, max_messages=9, max_bytes=9_999, limit_offset=store.max_offset,
            codes=tag_codes("red"),
        )  # fmt: skip
        assert (found.count, found.next_queue_offset) == (1, 5)
        assert store.reader.readable_range("Batches", 0, store.max_offset) == (0, 5)
