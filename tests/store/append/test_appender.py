"""The master's append: what the log holds after a put, and when a put has to wait."""

import shutil
import threading
from pathlib import Path

import pytest

from hastore.errors import Status, StoreError
from hastore.record.codec import Host, check_record, decode_record, encode_record
from hastore.record.layout import BLANK_MAGIC
from hastore.store.message_store import MessageStore
from tests.store.faulty import FaultyFileSystem
from tests.store.kit import (
    BORN,
    FILE_SIZE,
    HOST,
    bodies,
    config,
    message,
    opened,
    put,
    read_log,
)


def test_a_put_is_in_the_log_as_its_result_says(tmp_path: Path) -> None:
    appended: list[tuple[int, int]] = []
    with opened(tmp_path) as store:
        store.hooks.on_append = lambda start, end, _data: appended.append((start, end))
        first = put(store, message(0), message(1, queue_id=1))
        second = put(store, message(2) + message(3, topic="TopicB"))
        results = first + second
        end = 0
        for number, result in enumerate(results):
            assert result.offset == end
            assert result.end_offset is not None and result.offset is not None
            end = result.end_offset
            record = store.reader.record_at(result.offset)
            assert record is not None
            assert record.physical_offset == result.offset
            assert record.queue_offset == result.queue_offset
            assert record.store_timestamp_ms == result.store_timestamp_ms
            assert (record.store_host, record.born_host) == (HOST, BORN)
            assert record.keys == [f"key{number}"]
            assert store.record_size(result.offset) == record.size
        assert [result.queue_offset for result in results] == [0, 0, 1, 0]
        assert appended == [(0, first[1].end_offset), (first[1].end_offset, end)]
        assert store.max_offset == store.whole_offset == end
        assert store.reader.record_at(1) is None
        assert store.reader.record_at(end) is None


def test_a_full_file_is_filled_with_a_blank_and_the_next_begins(tmp_path: Path) -> None:
    with opened(tmp_path, max_message_size=1 << 20) as store:
        results = [put(store, message(n, size=9000, properties=()))[0] for n in range(20)]
        refused = store.put_encoded([message(0, size=FILE_SIZE)])[0][0]
        assert refused.status is Status.MESSAGE_ILLEGAL
        size = results[0].end_offset
        assert size is not None
        starts = [result.offset for result in results]
        per_file = (FILE_SIZE - 8) // size
        expected = [
            number // per_file * FILE_SIZE + number % per_file * size for number in range(20)
        ]
        assert starts == expected
        data = read_log(tmp_path)
        blank_at = per_file * size
        left = FILE_SIZE - blank_at
        assert data[blank_at : blank_at + 8] == left.to_bytes(4) + BLANK_MAGIC.to_bytes(4)
        assert not any(data[blank_at + 8 : FILE_SIZE])
        assert len(bodies(store)) == 20


def test_a_record_that_leaves_less_than_a_blank_rolls_over(tmp_path: Path) -> None:
    base = len(message(0, size=0))
    for spare, offset in ((8, 0), (7, FILE_SIZE)):
        with opened(tmp_path / str(spare)) as store:
            put(store, message(0, size=30_000))
            rest = FILE_SIZE - store.max_offset - base - spare
            result = put(store, message(1, size=rest))[0]
            assert result.offset is not None
            assert result.offset // FILE_SIZE * FILE_SIZE == offset


def test_one_put_may_span_files_and_a_payload_stays_whole(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        payloads = [b"".join(message(p * 10 + n, size=4000) for n in range(10)) for p in range(5)]
        results = store.put_encoded(payloads)
        assert [r.queue_offset for payload in results for r in payload] == list(range(50))
        for payload in results:  # 41 KiB each: one for each file
            files = {(r.offset or 0) // FILE_SIZE for r in payload}
            assert len(files) == 1
        large = b"".join(message(n, size=4000) for n in range(50, 90))  # more than a file
        (more,) = store.put_encoded([large])
        assert [r.queue_offset for r in more] == list(range(50, 90))
        assert len(bodies(store)) == 90


def test_a_transaction_takes_a_place_only_when_committed(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        results = put(
            store, message(0), message(1, sys_flag=0x4), message(2, sys_flag=0x8),
            message(3, sys_flag=0xC), message(4),
        )  # fmt: skip
        assert [result.queue_offset for result in results] == [0, 0, 1, 0, 2]
        assert len(bodies(store)) == 3


@pytest.mark.parametrize("own", ["127.0.0.1:10911", "[::1]:10911"])
@pytest.mark.parametrize("born", ["10.0.0.1:5", "[::2]:5"])
def test_hosts_of_either_family(tmp_path: Path, own: str, born: str) -> None:
    store = MessageStore(config(tmp_path), store_host=Host.parse(own))
    store.open()
    try:
        other = Host.parse(born)
        results = put(store, message(0, born_host=other) + message(1, born_host=other))
        for result in results:
            assert result.offset is not None and result.end_offset is not None
            record = store.reader.record_at(result.offset)
            assert record is not None
            assert (record.store_host.text, record.born_host.text) == (own, born)
            with store.view(result.offset, record.size) as view:
                assert encode_record(record) == view
                assert check_record(view, 0, len(view), result.offset)
        assert len(bodies(store)) == 2
    finally:
        store.close()


def test_the_store_clock_never_goes_back(tmp_path: Path) -> None:
    class Stepping:
        now = 5000

        def monotonic_ms(self) -> float:
            return 0.0

        def wall_ms(self) -> int:
            self.now -= 1000
            return self.now

    store = MessageStore(config(tmp_path), store_host=HOST, clock=Stepping())
    store.open()
    stamps = [put(store, message(number))[0].store_timestamp_ms for number in range(3)]
    store.close()
    assert stamps == [4000, 4000, 4000]
    store = MessageStore(config(tmp_path), store_host=HOST, clock=Stepping())
    store.open()
    assert put(store, message(4))[0].store_timestamp_ms == 4000
    store.close()


def test_threads_put_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        results: list[tuple[int, int]] = []

        def work(queue_id: int) -> None:
            for number in range(100):
                for result in put(store, message(number, queue_id=queue_id)):
                    assert result.offset is not None and result.end_offset is not None
                    results.append((result.offset, result.end_offset))

        threads = [threading.Thread(target=work, args=(queue_id,)) for queue_id in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.sort()
        assert len(results) == 400
        for (_, end), (start, _) in zip(results, results[1:], strict=False):
            assert start == end or start % FILE_SIZE == 0
        for queue_id in range(4):
            wanted = [decode_record(message(number)).body for number in range(100)]
            assert bodies(store, queue_id=queue_id) == wanted


def test_put_waits_until_replay_knows_the_queue_offsets(tmp_path: Path) -> None:
    with opened(tmp_path / "master") as master:
        put(master, message(0, producer="p"), message(1, producer="p"))
        with master.view(0, 1 << 20) as view:
            data = bytes(view)
    with opened(tmp_path / "slave") as store:
        store.append_replica(0, data)
        (again,), (new,) = store.put_encoded([message(1, producer="p"), message(2, producer="p")])
        assert again.duplicate and (again.queue_offset, again.offset) == (1, len(data) // 2)
        assert (new.duplicate, new.queue_offset) == (False, 2)
        store.append_replica(store.max_offset, data[:50])  # the beginning of a record
        assert store.whole_offset == store.max_offset - 50
        store.replay.stop()
        with pytest.raises(StoreError, match="queue offsets"):
            store.put_encoded([message(3)])


def test_no_put_takes_a_queue_offset_while_lost_queues_are_built_anew(tmp_path: Path) -> None:
    """A second message with a queue offset that is taken would be in no queue, although stored."""
    with opened(tmp_path) as store:
        put(store, *(message(number) for number in range(10)))
    shutil.rmtree(tmp_path / "consumequeue")
    fs, may_replay = FaultyFileSystem(), threading.Event()

    def hold_replay(call: str, path: str) -> None:
        if call == "write" and "/consumequeue/" in path:
            assert may_replay.wait(60)

    fs.hook = hold_replay
    store = MessageStore(config(tmp_path), fs=fs, store_host=HOST)
    wait_dispatched = store.replay.wait_dispatched

    def wait(offset: int, timeout_s: float) -> bool:
        may_replay.set()  # the put waits, as it must
        return wait_dispatched(offset, timeout_s)

    store.replay.wait_dispatched = wait  # type: ignore[method-assign]
    store.open()
    try:
        result = put(store, message(10))[0]
        may_replay.set()
        assert result.queue_offset == 10
        assert bodies(store) == [decode_record(message(number)).body for number in range(11)]
    finally:
        may_replay.set()
        store.close()
