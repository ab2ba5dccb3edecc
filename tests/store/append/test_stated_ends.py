"""What a log states of its quiet queues, taken by replay, restarts, cuts and rebuilds."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import Status
from hastore.fs.filesystem import REAL
from hastore.record.codec import decode_record, encode_record, patch_for_store
from hastore.record.layout import FLAG_INNER_BATCH
from hastore.record.queue_ends import QueueNext, build_queue_ends
from hastore.store.append.results import own_records
from hastore.store.derived.contract import Dispatched
from hastore.store.message_store import MessageStore
from hastore.store.offline.reader import StoreReader
from hastore.store.rebuild.rebuild import rebuild_in_place, rebuild_to_verify
from tests.ha.nodes import wait_for
from tests.store.faulty import NO_SPACE, FaultyFileSystem
from tests.store.kit import FILE_SIZE, HOST, bodies, config, crash_copy, message, opened, put
from tests.store.rebuild.kit import SIZES, derived_files, how

Append = Callable[[MessageStore, int, int], bytes]
UNITS = SIZES.units
QUIET: tuple[QueueNext, ...] = (
    ("quiet", 0, 10),
    ("quiet", 7, 3),  # beyond store.default_queues
    ("aligned", 0, UNITS),  # the queue's next file would begin there
    ("large", 0, 5 * UNITS + 1),
    ("TopicA", 0, 1),  # less than the log has
)


def state(
    store: MessageStore, queues: Sequence[QueueNext] = QUIET, *, since: int = 1, ident: int = 1,
    part_bytes: int = 24_000, parts: slice = slice(None),
) -> list[int]:  # fmt: skip
    """Append a statement, or some of its parts; return the records' ends."""
    records = build_queue_ends(queues, since=since, ident=ident, now_ms=1, part_bytes=part_bytes)
    results = store.put_encoded(records[parts], [own_records] * len(records[parts]))
    ends = [result.end_offset for one in results for result in one]
    assert store.wait_dispatched(store.max_offset, 60), store.problems
    return [end for end in ends if end is not None]


def check_ends(store: MessageStore) -> None:
    for topic, queue_id, after in QUIET[:-1]:
        assert store.queues.queue_range(topic, queue_id) == (after, after), topic


@pytest.mark.parametrize("messages", [20, 1500], ids=["scalar walk", "vector walk"])
def test_queues_go_on_where_the_log_states_it(tmp_path: Path, messages: int) -> None:
    """The log of another store without its queues, as a node gets it that begins anew."""
    with opened(tmp_path / "old") as store:
        put(store, *(message(number) for number in range(messages)))
        put(store, *(message(number, topic="near") for number in range(3)))
        (end,) = state(store, [*QUIET, ("near", 0, 3)])
        assert store.max_offset == end
        put(store, *(message(number) for number in range(messages, 2 * messages)))
        assert store.wait_dispatched(store.max_offset, 60)
        with opened(tmp_path / "new") as other:
            at = 0
            while at < store.max_offset:  # in large pieces, for the vector walk
                with store.view(at, FILE_SIZE) as view:
                    at = other.append_replica(at, bytes(view))
            assert other.wait_dispatched(at, 60), other.problems
            check_ends(other)
            assert other.stated.since(end) == 1
            assert other.stated.since(end - 1) is None
            assert len(bodies(other)) == 2 * messages
            assert len(bodies(other, "near")) == 3  # perhaps first seen in the statement's batch
    with opened(tmp_path / "new") as other:
        check_ends(other)
        assert other.stated.since(end) == 1
        assert [
            put(other, message(1, topic=topic, queue_id=queue_id))[0].queue_offset
            for topic, queue_id, _ in QUIET
        ] == [after for _, _, after in QUIET[:-1]] + [2 * messages]
        for topic, queue_id, _ in QUIET[:-1]:
            assert len(bodies(other, topic, queue_id)) == 1
        other.set_limits(confirmed=other.max_offset, readable=other.max_offset)
    with StoreReader(str(tmp_path / "new")) as reader:
        assert reader.topics()["quiet"] == {0: (10, 11), 7: (3, 4)}
        assert reader.topics()["aligned"] == {0: (UNITS, UNITS + 1)}


def test_a_rebuild_takes_the_stated_ends(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, *(message(number) for number in range(300)))
        state(store, part_bytes=20)
        put(store, *(message(number, topic="quiet") for number in range(500)))
        state(store, [("quiet", 0, 12)], since=2, ident=2)
        assert store.wait_dispatched(store.max_offset, 60)
        store.flush()
    expected = derived_files(tmp_path)
    _, difference = rebuild_to_verify(REAL, str(tmp_path), str(tmp_path / "work"), SIZES, how())
    assert difference is None
    shutil.rmtree(tmp_path / "consumequeue")
    rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    found = derived_files(tmp_path)
    assert [path for path in {*found, *expected} if found.get(path) != expected.get(path)] == []
    with opened(tmp_path) as store:
        assert put(store, message(1, topic="aligned"))[0].queue_offset == UNITS


def test_lost_queues_are_replayed_with_the_stated_ends(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, message(1))
        state(store)
    shutil.rmtree(tmp_path / "consumequeue")
    with opened(tmp_path) as store:
        assert store.wait_dispatched(store.max_offset, 60)
        check_ends(store)


def test_no_client_may_state_the_ends_of_queues(tmp_path: Path) -> None:
    forged = build_queue_ends(QUIET, since=1, ident=1, now_ms=1)[0]
    with opened(tmp_path) as store:
        put(store, message(1))
        for payload in (forged, forged * 40, message(2) + forged):
            results = store.put_encoded([payload])[0]
            assert results[-1].status is Status.MESSAGE_ILLEGAL
            assert "HASTORE_QUEUES" in str(results[-1].reason)
        assert store.wait_dispatched(store.max_offset, 60)
        assert store.queues.queue_range("quiet", 0) is None


def test_a_statement_counts_once_the_log_has_all_its_parts(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        ends = state(store, since=5, part_bytes=20, parts=slice(0, 2))
        assert store.stated.since(store.max_offset) is None
        assert store.queues.queue_range("quiet", 7) == (3, 3)  # each part has its effect
        copy = crash_copy(store, tmp_path / "copy")
        ends = state(store, since=5, part_bytes=20, parts=slice(2, None))
        assert len(ends) > 1
        assert store.stated.since(ends[-1]) == 5
        assert store.stated.since(ends[-1] - 1) is None
    with opened(copy) as store:
        state(store, since=6, ident=2, part_bytes=20, parts=slice(2, None))  # of another statement
        assert store.stated.since(store.max_offset) is None
        state(store, since=6, ident=3, part_bytes=20, parts=slice(0, 2))
        state(store, since=6, ident=4)  # the first one was given up
        assert store.stated.since(store.max_offset) == 6
        state(store, since=7, ident=3, part_bytes=20, parts=slice(2, None))
        assert store.stated.since(store.max_offset) == 6
    with opened(copy) as store:
        (end,) = state(store, since=9, ident=5)
        assert store.stated.since(end) == 9


def test_a_restart_goes_on_with_a_statement_that_is_not_complete(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        state(store, since=5, part_bytes=20, parts=slice(0, 2))
    with opened(tmp_path) as store:
        state(store, since=5, part_bytes=20, parts=slice(2, None))
        assert store.stated.since(store.max_offset) == 5


def test_a_cut_statement_does_not_count(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, message(1))
        (first,) = state(store, since=2)
        put(store, message(2))
        (second,) = state(store, since=3, ident=2)
        assert store.stated.since(store.max_offset) == 3
        store.truncate(second - 1)
        assert store.stated.since(second) == 2
        put(store, *(message(number) for number in range(10)))  # the log is as long again
        assert store.max_offset > second
    with opened(tmp_path) as store:
        assert store.stated.since(store.max_offset) == 2
        assert store.stated.since(first - 1) is None
        store.truncate(0)
        assert store.stated.since(1 << 62) is None
        store.set_aside("1-0-1")
        assert store.stated.since(1 << 62) is None
    with opened(tmp_path) as store:
        put(store, *(message(number) for number in range(20)))
        assert store.stated.since(store.max_offset) is None


def test_a_damaged_file_only_lets_retention_wait(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        state(store)
    path = tmp_path / "hastore" / "queues"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with opened(tmp_path) as store:
        assert store.stated.since(store.max_offset) is None
        check_ends(store)
        (end,) = state(store, since=4, ident=2)
        assert store.stated.since(end) == 4


def test_a_statement_that_could_not_be_noted_is_noted_when_there_is_room(tmp_path: Path) -> None:
    """Else a restart forgets it, and retention would wait on the disk that was full."""
    fs = FaultyFileSystem()
    store = MessageStore(config(tmp_path), store_host=HOST, fs=fs)
    store.open()
    with contextlib.closing(store):
        put(store, message(1))
        assert store.wait_dispatched(store.max_offset, 60)
        fs.fail("rename", "hastore/queues", NO_SPACE)
        records = build_queue_ends(QUIET, since=5, ident=1, now_ms=1)
        store.put_encoded(records, [own_records])
        wait_for(lambda: store.replay.blocked_reason is not None)
        fs.heal()
        assert store.wait_dispatched(store.max_offset, 60)
    with opened(tmp_path) as store:
        assert store.stated.since(store.max_offset) == 5


def test_only_queues_without_a_later_record_are_quiet(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, message(1), message(2, queue_id=1))
        middle = store.max_offset
        put(store, message(3, queue_id=1), message(4, topic="TopicB"))
        (end,) = state(store)
        quiet = [*QUIET[2:1:-1], QUIET[3], *QUIET[:2]]
        assert list(store.queues.quiet_since(middle)) == [("TopicA", 0, 1), *quiet]
        assert list(store.queues.quiet_since(end)) == [
            ("TopicA", 0, 1), ("TopicA", 1, 2), ("TopicB", 0, 1), *quiet,
        ]  # fmt: skip
        assert list(store.queues.quiet_since(0)) == quiet


def append_at(store: MessageStore, queue_offset: int, number: int, topic: str = "quiet") -> bytes:
    """Append a record as another master placed it; return its body."""
    return append_raw(store, bytearray(message(number, topic=topic)), queue_offset)


def append_batch(store: MessageStore, base: int, count: int) -> bytes:
    """Append an inner batch of a RocketMQ broker; return its body."""
    properties = f"INNER_BASE\x01{base}\x02INNER_NUM\x01{count}\x02".encode()
    record = decode_record(message(base, topic="quiet"))
    record = replace(record, properties=properties, sys_flag=record.sys_flag | FLAG_INNER_BATCH)
    return append_raw(store, bytearray(encode_record(record)), base)


def append_raw(store: MessageStore, raw: bytearray, queue_offset: int) -> bytes:
    """Append an encoded record at this place of its queue; return its body."""
    offset = store.max_offset
    patch_for_store(
        raw, 0, queue_offset=queue_offset, physical_offset=offset, store_timestamp_ms=1,
        store_host=HOST,
    )  # fmt: skip
    assert store.wait_dispatched(store.append_replica(offset, raw), 60), store.problems
    return decode_record(raw).body


@pytest.mark.parametrize("removed", [True, False], ids=["its records", "stated ends"])
def test_a_queue_that_a_master_began_again_is_followed(
    tmp_path: Path, removed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A master that did not know the queue's next offset: no message may be in no queue here."""
    with opened(tmp_path, retention=RetentionConfig(max_size_bytes=FILE_SIZE)) as store:
        if removed:
            put(store, *(message(number, topic="quiet") for number in range(10)))
            while store.max_offset < 2 * FILE_SIZE:
                put(store, *(message(number) for number in range(50)))
            assert store.wait_dispatched(store.max_offset, 60)
            store.flush()
            assert store.retention.delete_expired(None)
        else:
            state(store)
        assert store.queues.queue_range("quiet", 0) == (10, 10)
        wanted = [append_at(store, queue_offset, queue_offset) for queue_offset in range(3)]
        assert store.queues.queue_range("quiet", 0) == (0, 3)
        assert bodies(store, "quiet") == wanted
        assert "begins again at queue offset 0, and not at 10" in caplog.text
        append_at(store, 1, 99)  # its place has a message that is in the log
        assert bodies(store, "quiet") == wanted
        assert "which an earlier record has" in caplog.text
        store.flush()
    with opened(tmp_path) as store:
        assert bodies(store, "quiet") == wanted
        assert store.queues.queue_range("quiet", 0) == (0, 3)
    if not removed:  # retention's own copy of the old units is no part of a rebuild
        expected = derived_files(tmp_path)
        shutil.rmtree(tmp_path / "consumequeue")
        rebuild_in_place(REAL, str(tmp_path), SIZES, how())
        found = derived_files(tmp_path)
        assert [path for path in {*found, *expected} if found.get(path) != expected.get(path)] == []


def check_both(store: MessageStore, path: Path, wanted: dict[int, bytes], end: int) -> None:
    """Check that pulls, and a reader of the files, get these records of queue 0."""
    assert store.queues.queue_range("quiet", 0) == (0, end)
    assert bodies(store, "quiet") == [wanted[place] for place in sorted(wanted)]
    store.flush()
    store.set_limits(readable=store.max_offset)
    with StoreReader(str(path)) as reader:
        assert reader.queue_range("quiet", 0) == (0, end)
        units = reader.queue_units("quiet", 0)
        assert units.queue_offsets.tolist() == sorted(wanted)
        got = {one.queue_offset: one.body for one in reader.queue_records("quiet", 0)}
        assert got == wanted


def test_single_messages_beside_inner_batches_are_read(tmp_path: Path) -> None:
    """As after a switch: the broker's batches, then what a producer sends to hastore, and so on."""
    wanted = {}
    with opened(tmp_path) as store:
        for base in (0, 5):
            wanted[base] = append_batch(store, base, 5)
        for place in range(10, 14):
            wanted[place] = append_at(store, place, place)
        check_both(store, tmp_path, wanted, 14)
        wanted[14] = append_batch(store, 14, 2)
        wanted[16] = append_at(store, 16, 16)
        check_both(store, tmp_path, wanted, 17)
    with opened(tmp_path) as store:
        check_both(store, tmp_path, wanted, 17)
    expected = derived_files(tmp_path)
    rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    assert derived_files(tmp_path) == expected


@pytest.mark.parametrize("before", [append_batch, append_at], ids=["batches", "singles"])
@pytest.mark.parametrize("after", [append_batch, append_at], ids=["batches", "singles"])
@pytest.mark.parametrize("new", [2, 9], ids=["fewer than before", "more than before"])
def test_a_topic_of_inner_batches_that_a_broker_made_again_has_its_new_messages(
    tmp_path: Path, before: Append, after: Append, new: int
) -> None:
    """Also if it was of the other kind before. The old ones are gone, as at the broker."""

    def append(store: MessageStore, kind: Append, count: int) -> tuple[dict[int, bytes], int]:
        """Append so many records; return their bodies, and where the queue ends."""
        step = 3 if kind is append_batch else 1
        found = {step * n: kind(store, step * n, 3) for n in range(count)}
        return found, step * count

    with opened(tmp_path) as store:
        append(store, before, 6)
        wanted, end = append(store, after, new)
        check_both(store, tmp_path, wanted, end)
        [result] = put(store, message(200, topic="quiet"))
        assert result.queue_offset == end
        assert store.wait_dispatched(store.max_offset, 60)
    with opened(tmp_path) as store:
        assert store.queues.queue_range("quiet", 0) == (0, end + 1)
    expected = derived_files(tmp_path)
    rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    assert derived_files(tmp_path) == expected


@pytest.mark.parametrize("counts", [[5, 3], [1, 5, 1, 1, 3, 1]])
def test_a_limit_inside_a_record_ends_a_queue_of_batches_before_it(
    tmp_path: Path, counts: list[int]
) -> None:
    """A group that began at the end there would not get this record."""
    places = [0]
    with opened(tmp_path) as store:
        for count in counts:
            begin = store.max_offset
            if count == 1:
                append_at(store, places[-1], 0)
            else:
                append_batch(store, places[-1], count)
            places.append(places[-1] + count)
            assert store.wait_dispatched(store.max_offset, 60)
            for limit, end in ((begin, -2), (begin + 1, -2), (store.max_offset, -1)):
                assert store.reader.readable_range("quiet", 0, limit) == (0, places[end])


@pytest.mark.parametrize("lost", [False, True], ids=["all there", "index lost"])
def test_a_topic_that_a_broker_made_again_twice_has_the_last_messages(
    tmp_path: Path, *, lost: bool
) -> None:
    """Single ones, then batches, then single ones; also if replay goes over all of them again."""
    with opened(tmp_path) as store:
        for place in range(2):
            append_at(store, place, place)
        for place in (0, 3):
            append_batch(store, place, 3)
        wanted = {place: append_at(store, place, 7 + place) for place in range(5)}
        check_both(store, tmp_path, wanted, 5)
    if lost:
        shutil.rmtree(tmp_path / "index")
    with opened(tmp_path) as store:
        assert store.wait_dispatched(store.max_offset, 60)
        check_both(store, tmp_path, wanted, 5)


def test_a_single_message_at_the_place_of_a_batch_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        wanted = {0: append_at(store, 0, 0), 1: append_batch(store, 1, 3)}
        append_at(store, 1, 9)
        check_both(store, tmp_path, wanted, 4)
    assert "has queue offset 1, which an earlier record has" in caplog.text


def test_a_rebuild_takes_inner_batches_before_the_end_that_was_stated_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as store:
        wanted = {base: append_batch(store, base, 3) for base in (0, 3)}
        state(store, [("quiet", 0, 6)])
        wanted[6] = append_at(store, 6, 6)
        check_both(store, tmp_path, wanted, 7)
    expected = derived_files(tmp_path)
    rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    assert "begins again" not in caplog.text and derived_files(tmp_path) == expected


@pytest.mark.parametrize("new", [3, 14], ids=["fewer than before", "more than before"])
def test_a_topic_that_a_broker_deleted_and_made_again_has_its_new_messages(
    tmp_path: Path, new: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the broker: the old ones are in no queue any more, and none of the new ones is missing.

    A broker's deletion is no record, so only the queue offset 0 tells of it.
    """
    with opened(tmp_path) as store:
        put(store, *(message(number, topic="quiet") for number in range(10)))
        put(store, *(message(number) for number in range(5)))
        assert store.wait_dispatched(store.max_offset, 60)
        wanted = [append_at(store, queue_offset, 100 + queue_offset) for queue_offset in range(new)]
        assert bodies(store, "quiet") == wanted
        assert store.queues.queue_range("quiet", 0) == (0, new)
        said = [one for one in caplog.records if "begins again at queue offset 0" in one.message]
        assert len(said) == 1 and "10 earlier messages" in said[0].message
        [result] = put(store, message(200, topic="quiet"))
        assert result.queue_offset == new
        assert store.wait_dispatched(store.max_offset, 60)
        wanted = bodies(store, "quiet")
        assert len(wanted) == new + 1
        store.flush()
    with opened(tmp_path) as store:
        assert bodies(store, "quiet") == wanted
    expected = derived_files(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue")
    rebuild_in_place(REAL, str(tmp_path), SIZES, how())
    assert derived_files(tmp_path) == expected


def test_a_batch_that_is_replayed_twice_leaves_a_queue_that_began_again(tmp_path: Path) -> None:
    """The first time another queue could not be written."""
    with opened(tmp_path) as store:
        batch = [
            Dispatched(1000 * n, 100, "T", 0, at, 0, 1, 0, b"")
            for n, at in enumerate([5, 6, 0, 1, 2])
        ]
        for _ in range(2):
            store.queues.dispatch(batch)
            assert [one.offset for one in store.queues.read("T", 0, 0, 9)] == [2000, 3000, 4000]
            assert store.queues.queue_range("T", 0) == (0, 3)


def test_replay_that_reads_a_statement_again_leaves_a_queue_that_began_again(
    tmp_path: Path,
) -> None:
    """Queues may be ahead of replay at a start, for example after the loss of the snapshot."""
    with opened(tmp_path) as store:
        state(store)
        wanted = [append_at(store, queue_offset, queue_offset) for queue_offset in range(3)]
    (tmp_path / "hastore" / "idempotence").unlink()
    with opened(tmp_path) as store:
        assert store.wait_dispatched(store.max_offset, 60)
        assert store.queues.queue_range("quiet", 0) == (0, 3)
        wanted.append(append_at(store, 3, 3))
        assert bodies(store, "quiet") == wanted
