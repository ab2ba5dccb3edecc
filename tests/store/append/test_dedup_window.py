"""The deduplication window: retries are answered, not stored, also after restarts and cuts."""

import random
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hastore.clock import SystemClock
from hastore.errors import Status
from hastore.fs.filesystem import REAL, RealFileSystem
from hastore.protocol import api
from hastore.record.codec import Host
from hastore.record.properties import encode_properties
from hastore.store.append import dedup_window
from hastore.store.append.dedup_window import WINDOW, DedupWindow, UnheldNumber
from hastore.store.derived.contract import Dispatched
from hastore.store.message_store import PutResult
from hastore.store.state.crc_frame import FILE_BYTES_MAX
from tests.store.faulty import FaultyFileSystem, NoticedLock
from tests.store.kit import bodies, crash_copy, message, opened, put


class Clock(SystemClock):
    """A clock that a test moves."""

    now_ms = 0.0

    def monotonic_ms(self) -> float:
        return self.now_ms


def record(producer: str, sequence: int, offset: int) -> Dispatched:
    raw = encode_properties([("HS_PID", producer), ("HS_SEQ", str(sequence))])
    return Dispatched(offset, 100, "T", 0, 0, 0, 0, 0, raw)


def window(tmp_path: Path) -> DedupWindow:
    REAL.make_dirs(f"{tmp_path}/hastore")
    return DedupWindow(REAL, str(tmp_path))


def test_a_retry_is_answered_like_its_original(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first = put(store, message(0, producer="p"), message(1, producer="p"))
        again = put(store, message(1, producer="p"), message(0, producer="p"))
        for retried, original in zip(again, reversed(first), strict=True):
            assert retried.duplicate
            assert (retried.offset, retried.end_offset) == (original.offset, original.end_offset)
            assert retried.queue_offset == original.queue_offset
            assert retried.store_timestamp_ms == original.store_timestamp_ms
        twice = store.put_encoded([message(2, producer="p") * 2, message(2, producer="p")])
        flat = [result for payload in twice for result in payload]
        assert [result.duplicate for result in flat] == [False, True, True]
        assert {result.offset for result in flat} == {flat[0].offset}
        put(store, message(0, producer="q"), message(0), message(0))
        assert len(bodies(store)) == 6


@pytest.mark.parametrize("born", ["10.0.0.7:4242", "[::2]:5"])
def test_a_duplicate_has_the_original_s_timestamp(tmp_path: Path, born: str) -> None:
    with opened(tmp_path) as store:
        record = message(0, producer="p", born_host=Host.parse(born))
        (first,), (again,) = put(store, record), put(store, record)
        assert again.duplicate and again.store_timestamp_ms == first.store_timestamp_ms


@pytest.mark.parametrize("stop", ["clean", "kill"])
def test_the_window_survives_a_restart(tmp_path: Path, stop: str) -> None:
    with opened(tmp_path / "a") as store:
        for number in range(20):
            put(store, message(number, producer="p"))
        copy = crash_copy(store, tmp_path / "b")
    with opened(tmp_path / "a" if stop == "clean" else copy) as store:
        assert put(store, message(7, producer="p"))[0].duplicate
        assert not put(store, message(20, producer="p"))[0].duplicate
        assert len(bodies(store)) == 21


def test_a_window_built_from_a_log_without_its_beginning_knows_what_is_left(tmp_path: Path) -> None:
    """As on a slave that joins after retention has removed records: docs/pipeline.md, "Sink"."""
    known = window(tmp_path)
    known.advance(5_000)  # where the log begins; `gone` wrote before, `p` its numbers up to 49
    known.dispatch([record("p", number, 100 * number) for number in range(50, 70)])
    assert known.progress(b"gone") == (None, None)
    assert known.find(b"gone", 49) is UnheldNumber.NEW
    assert known.progress(b"p") == (69, None)
    assert (known.find(b"p", 49), known.find(b"p", 50)) == (UnheldNumber.NEW, 5_000)
    known.save_before(6_000)  # retention in a node that has them keeps them
    again = window(tmp_path)
    assert again.load(7_000, synced=True) == 7_000
    again.delete_before(6_000)
    assert again.find(b"p", 50) == 5_000


def test_the_window_is_that_of_the_client_protocol() -> None:
    assert WINDOW == api.WINDOW


def test_a_number_older_than_the_window_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for start in range(0, 4 * WINDOW, 256):
            payload = b"".join(message(n, size=8, producer="p") for n in range(start, start + 256))
            put(store, payload)
        ((old,),) = store.put_encoded([message(0, size=8, producer="p")])
        assert old.status is Status.MESSAGE_ILLEGAL
        assert "older than the last 1024" in (old.reason or "")
        assert put(store, message(4 * WINDOW - 1, size=8, producer="p"))[0].duplicate
        assert len(store._window) == 1


@pytest.mark.parametrize(
    "pairs",
    [
        [("HS_PID", "p"), ("HS_SEQ", "-1")],
        [("HS_PID", "p"), ("HS_SEQ", "9" * 19)],
        [("HS_PID", "p")],
        [("HS_PID", "p" * 65), ("HS_SEQ", "1")],
        [("HS_PID", ""), ("HS_SEQ", "1")],
    ],
)
def test_broken_ids_are_illegal(tmp_path: Path, pairs: list[tuple[str, str]]) -> None:
    with opened(tmp_path) as store:
        ((result,),) = store.put_encoded([message(0, properties=pairs)])
        assert result.status is Status.MESSAGE_ILLEGAL
        assert "HS_" in (result.reason or "")


def test_replay_and_put_feed_the_same_window_once(tmp_path: Path) -> None:
    found = window(tmp_path)
    found.load(0, True)
    batch = [record("p", number, 100 * number) for number in range(10)]
    found.dispatch(batch[:6])
    found.dispatch(batch)  # the same records again, and more
    assert found.end_offset == 1000
    assert found.find(b"p", 5) == 500
    assert found.find(b"p", 10) is UnheldNumber.NEW
    assert found.find(b"q", 5) is UnheldNumber.NEW
    found.truncate(700)
    assert found.find(b"p", 7) is UnheldNumber.NEW
    assert found.find(b"p", 6) == 600
    assert found.end_offset == 700


def test_the_snapshot_holds_everything_and_is_cut_with_the_log(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    found = window(tmp_path)
    assert found.load(0, True) == 0
    added: dict[tuple[bytes, int], int] = {}
    offset = 0
    for _ in range(6000):
        producer, top = chance.choice("abc"), chance.randrange(5000)
        if (producer.encode(), top) in added:
            continue
        added[producer.encode(), top] = offset
        found.dispatch([record(producer, top, offset)])
        offset += 100
    found.save()
    again = window(tmp_path)
    assert again.load(offset, False) == offset
    for key, place in added.items():
        assert again.find(*key) == found.find(*key)
        assert found.find(*key) in (place, UnheldNumber.FORGOTTEN)
    cut = offset - 1000
    third = window(tmp_path)
    assert third.load(cut, True) == cut
    assert all(third.find(*key) is not place for key, place in added.items() if place >= cut)
    fourth = window(tmp_path)
    assert fourth.load(offset, True) == cut  # the cut is durable


@pytest.mark.parametrize("damage", [0, 10, -1])
def test_a_damaged_snapshot_is_ignored(tmp_path: Path, damage: int) -> None:
    found = window(tmp_path)
    found.load(0, True)
    found.dispatch([record("p", 1, 0)])
    found.save()
    path = tmp_path / "hastore" / "idempotence"
    raw = bytearray(path.read_bytes())
    raw[damage] ^= 1
    path.write_bytes(raw)
    again = window(tmp_path)
    assert again.load(100, True) == 0
    assert again.find(b"p", 1) is UnheldNumber.NEW


class SmallFileSystem(RealFileSystem):
    """Who reads a file gets a thousandth of what it asks for at most."""

    def read_bytes(self, path: str, max_bytes: int = 1 << 26) -> bytes:
        return super().read_bytes(path, max_bytes // 1000)


def test_the_largest_snapshot_is_read_whole(tmp_path: Path) -> None:
    """As a part it would look damaged, and the log may not have its records any more."""
    REAL.make_dirs(f"{tmp_path}/hastore")
    known = DedupWindow(SmallFileSystem(), str(tmp_path))
    for number in range(0, 9 * WINDOW, WINDOW):  # the bound is two thousand times as many numbers
        numbers = range(number, number + WINDOW)
        known.add_runs([(b"p%d" % number, range(WINDOW), numbers)], numbers.stop)
    known.save()
    again = DedupWindow(SmallFileSystem(), str(tmp_path))
    assert again.load(9 * WINDOW, True) == 9 * WINDOW
    assert again.find(b"p0", 7) == 7
    numbers_max = 2 * dedup_window._MAX_PRODUCERS * WINDOW + dedup_window._MAX_IDLE_NUMBERS
    assert 4 * 16 * numbers_max <= FILE_BYTES_MAX  # the rest is for the producers' names


def test_producers_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_PRODUCERS", 3)
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_IDLE", 1)
    found = window(tmp_path)
    found.load(0, True)
    for number, producer in enumerate("abcade"):
        found.dispatch([record(producer, number, 100 * number)])
    assert len(found) == 4
    assert found.find(b"b", 1) is UnheldNumber.NEW  # wrote least recently
    assert found.find(b"c", 2) == 200  # idle
    assert found.find(b"a", 0) == 0


def test_an_idle_producer_keeps_what_a_repeated_writer_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_PRODUCERS", 1)
    whole = [*range(3_000)]
    gap = [*range(2_500), *range(2_501, 3_000)]
    found = window(tmp_path)
    found.add_runs([(b"whole", whole, [10 * n for n in whole])], 30_000)
    found.add_runs([(b"gap", gap, [30_000 + 10 * n for n in gap])], 60_000)
    found.add_runs([(b"jump", [1 << 32, (1 << 32) + 1], [60_000, 60_010])], 60_020)
    found.add_runs([(b"last", [0], [60_020])], 60_030)
    found.save()
    restored = window(tmp_path)
    assert restored.load(60_030, True) == 60_030
    for each in (found, restored):
        assert len(each) == 4
        assert each.progress(b"whole") == (2_999, 2_998)
        assert each.find(b"whole", 2_999) == 29_990
        assert each.find(b"whole", 5) is each.find(b"whole", 2_998) is UnheldNumber.FORGOTTEN
        assert each.progress(b"gap") == (2_999, 2_499)
        assert each.find(b"gap", 2_500) is UnheldNumber.NEW  # it is missing, and can still be put
        assert each.find(b"gap", 2_501) == 30_000 + 25_010
        assert each.progress(b"jump") == ((1 << 32) + 1, None)
        assert each.progress(b"never") == (None, None)
        each.add_runs([(b"gap", [2_500, 3_000], [60_030, 60_040])], 60_050)
        each.add_runs([(b"whole", [3_000], [60_050])], 60_060)  # it rests again
        assert each.find(b"gap", 2_500) == 60_030
        assert each.progress(b"gap") == (3_000, 2_499)
        assert each.progress(b"whole") == (3_000, 2_998)


def test_numbers_of_idle_producers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_PRODUCERS", 1)
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_IDLE_NUMBERS", 10)
    found = window(tmp_path)
    for number in range(20):
        numbers = [1 << 32, (1 << 32) + 1, (1 << 32) + 2]
        at = 30 * number
        found.add_runs([(b"%d" % number, numbers, [at, at + 10, at + 20])], at + 30)
    assert len(found) == 1 + 3  # nine numbers of idle producers
    found.truncate(0)
    assert len(found) == 0


def own(identity: str, number: int) -> bytes:
    return f"{api.own_prefix(identity)}-{number}".encode()


@pytest.mark.parametrize("flood", [lambda n: own("scratcher", n), b"anybodys-%d".__mod__])
def test_no_owner_of_many_producers_makes_the_node_forget_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flood: Callable[[int], bytes]
) -> None:
    """A put of `payer` that is repeated would be stored twice, or refused."""
    monkeypatch.setattr(dedup_window, "_MAX_PRODUCERS", 8)
    monkeypatch.setattr(dedup_window, "_MAX_IDLE", 16)
    first = window(tmp_path)

    def write(found: DedupWindow, producer: bytes, *numbers: int) -> None:
        end = found.end_offset
        places = range(end, end + 10 * len(numbers), 10)
        found.add_runs([(producer, numbers, places)], places.stop)

    for number in range(6):
        write(first, own("payer", number), *range(20))
    at = [first.find(own("payer", number), 5) for number in range(6)]
    for number in range(100):
        write(first, flood(number), 0)
    first.save()
    restored = window(tmp_path)
    assert restored.load(first.end_offset, True) == first.end_offset
    for found in (first, restored):
        for number in range(100, 200):
            assert len(found) == 24
            # Of six busy ones four share the room with as many others, and two are idle.
            held = [found.find(own("payer", number), 5) for number in range(6)]
            assert held == [*[UnheldNumber.FORGOTTEN] * 2, *at[2:]]
            assert all(found.progress(own("payer", number)).last == 19 for number in range(6))
            write(found, flood(number), 0)
        found.truncate(found.end_offset - 15)
        for number in range(200, 300):
            write(found, flood(number), 0)
        assert found.find(own("payer", 5), 5) == at[5]


def test_producers_that_have_ended_take_no_room_from_those_that_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start of a process has a new id: the other owners come to have many, one by one."""
    monkeypatch.setattr(dedup_window, "_MAX_PRODUCERS", 8)
    clock = Clock()
    REAL.make_dirs(f"{tmp_path}/hastore")
    found = DedupWindow(REAL, str(tmp_path), clock=clock)
    for turn in range(20):
        busy = [own("payer", number) for number in range(5)]
        for producer in [own(f"job{turn % 4}", turn), *busy]:
            end, number = found.end_offset, 2 * turn
            found.add_runs([(producer, [number, number + 1], [end, end + 10])], end + 20)
        found.save()
        restored = DedupWindow(REAL, str(tmp_path), clock=clock)
        assert restored.load(found.end_offset, True) == found.end_offset
        for each in (found, restored):
            assert all(each.find(one, 2 * turn) != UnheldNumber.FORGOTTEN for one in busy)
        clock.now_ms += 1_800_000


def test_no_owner_of_many_numbers_makes_the_node_forget_an_idle_producer_of_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup_window, "_MAX_PRODUCERS", 1)
    monkeypatch.setattr(dedup_window, "_MAX_IDLE_NUMBERS", 40)
    found = window(tmp_path)
    for number in range(20):
        found.add_runs([(own("payer", number), [0], [10 * number])], 10 * number + 10)
    for number in range(20):
        numbers = range(1 << 32, (1 << 32) + 10)  # there is a gap before them
        at = 1_000 * (number + 1)
        places = range(at, at + 100, 10)
        found.add_runs([(own("scratcher", number), numbers, places)], places.stop)
    for number in range(20):
        assert found.find(own("payer", number), 0) == 10 * number


@pytest.mark.parametrize("seed", range(4))
def test_the_owner_with_most_is_found(seed: int) -> None:
    print(f"seed {seed}")
    chance, sizes, true = random.Random(seed), dedup_window._Sizes(), dict[bytes, int]()
    for _ in range(3_000):
        owner = b"%d" % chance.randrange(30)
        change = chance.randrange(-true.get(owner, 0), 10)
        sizes.grow(owner, change)
        true[owner] = true.get(owner, 0) + change
        if max(true.values()) and chance.random() < 0.3:
            found, size = sizes.largest()
            assert size == true[found] == max(true.values())
    assert len(sizes._heap) <= 2 * 30 + 65


def test_progress_after_a_cut_is_exact_or_says_that_it_is_not(tmp_path: Path) -> None:
    found = window(tmp_path)
    numbers = [*range(5_000)]
    found.add_runs([(b"p", numbers, [10 * n for n in numbers])], 50_000)
    last, forgotten = found.progress(b"p")
    assert last == 4_999 and forgotten is not None and forgotten <= 4_999 - WINDOW
    found.truncate(49_000)
    assert found.progress(b"p") == (4_899, forgotten)
    found.truncate(10_000)  # deeper than the window: numbers up to `forgotten` may be cut
    assert found.progress(b"p") == (None, forgotten)
    later = range(1_000, forgotten + WINDOW)
    found.add_runs([(b"p", later, [10 * n for n in later])], 10 * later.stop)
    found.save()
    restored = window(tmp_path)
    restored.load(10 * later.stop, True)
    for each in (found, restored):  # the numbers between may still be missing
        assert each.progress(b"p") == (None, forgotten)
    found.add_runs([(b"p", [later.stop], [10 * later.stop])], 10 * later.stop + 10)
    assert found.progress(b"p") == (later.stop, forgotten)


def test_a_node_that_knows_no_doubt_still_refuses_the_numbers_in_doubt(tmp_path: Path) -> None:
    """After a downgrade the floor is the greatest forgotten number, in doubt or not."""
    found = window(tmp_path)
    numbers = [*range(5_000)]
    found.add_runs([(b"p", numbers, [10 * n for n in numbers])], 50_000)
    _, forgotten = found.progress(b"p")
    found.truncate(10_000)
    found.add_runs([(b"q", [0], [10_000])], 10_010)
    found.save()
    raw = (tmp_path / "hastore" / "idempotence").read_bytes()
    assert raw[:8] == b"HSIW" + (1).to_bytes(4)
    end, count, length, name, floor, held = struct.unpack_from(">qIH1sqI", raw, 8)
    assert (end, count, length, name, floor, held) == (10_010, 2, 1, b"p", forgotten, 0)
    # What that node writes has no list of doubt.
    old = raw[:-8]
    (tmp_path / "hastore" / "idempotence").write_bytes(old + struct.pack(">I", zlib.crc32(old)))
    upgraded = window(tmp_path)
    assert upgraded.load(10_010, True) == 10_010
    assert forgotten is not None and upgraded.progress(b"p") == (None, forgotten)
    upgraded.add_runs([(b"p", [forgotten + 1], [10_010])], 10_020)
    assert upgraded.progress(b"p") == (None, forgotten)
    assert upgraded.progress(b"q") == (0, None)


@pytest.mark.parametrize("seed", range(4))
def test_snapshots_of_idle_producers_are_as_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is kept ready for the snapshot, a restored window says what the window says."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_PRODUCERS", 3)
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_IDLE", 20)
    found = window(tmp_path)
    names = [b"p%d" % number for number in range(20)]
    for _ in range(300):
        name, end = chance.choice(names), found.end_offset
        if chance.random() < 0.05:
            found.truncate(max(0, end - chance.randrange(400)))
            continue
        first = found.top(name) + 1 + (chance.random() < 0.2)  # a gap at times
        count = chance.choice((1, 2, 30))
        places = range(end, end + 10 * count, 10)
        found.add_runs([(name, range(first, first + count), places)], end + 10 * count)
        if chance.random() < 0.1:
            found.save()
            restored = window(tmp_path)
            assert restored.load(found.end_offset, True) == found.end_offset
            for each in names:
                assert restored.progress(each) == found.progress(each)
                assert restored.top(each) == found.top(each)
                for number in range(found.top(each) + 2):
                    assert restored.find(each, number) == found.find(each, number)


@pytest.mark.parametrize("seed", range(4))
def test_puts_go_on_while_a_snapshot_is_made_which_does_not_have_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """With 4,096 producers the swap and the checksum of a snapshot take longer than many puts."""
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.setattr(dedup_window, "_MAX_PRODUCERS", 6)
    monkeypatch.setattr(dedup_window, "_MAX_IDLE", 6)
    monkeypatch.setattr(dedup_window, "_DUMP_STEP", 2, raising=False)
    found = window(tmp_path)
    names = [b"p%d" % number for number in range(20)]
    path = tmp_path / "hastore" / "idempotence"

    def write() -> None:
        name, end = chance.choice(names), found.end_offset
        first = found.top(name) + 1 + (chance.random() < 0.2)  # a gap at times
        count = chance.choice((1, 2, 30, 1_500))
        found.add_runs(
            [(name, range(first, first + count), range(end, end + 10 * count, 10))],
            end + 10 * count,
        )

    real, puts, put_during = dedup_window.ProducerWindow.parts, 0, False

    def meet(known: dedup_window.ProducerWindow, producer: bytes) -> tuple[bytes, ...]:
        nonlocal puts
        if put_during and not found._guard.locked():  # else it is a producer that becomes idle
            for _ in range(chance.randrange(8)):
                puts += 1
                write()
        return real(known, producer)

    monkeypatch.setattr(dedup_window.ProducerWindow, "parts", meet)
    for _ in range(40):
        for _ in range(chance.randrange(20)):
            write()
        if chance.random() < 0.3:
            found.truncate(max(0, found.end_offset - chance.randrange(30_000)))
        found.save()
        quiet, put_during = path.read_bytes(), True
        found.save()
        assert path.read_bytes() == quiet
        put_during = False
    assert puts > 100


def test_a_producer_does_not_become_idle_before_its_records_are_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hastore.store.append.dedup_window._MAX_PRODUCERS", 4)
    confirmed = [0]
    REAL.make_dirs(f"{tmp_path}/hastore")
    found = DedupWindow(REAL, str(tmp_path), lambda: confirmed[0])

    def write(name: str) -> None:
        end = found.end_offset
        found.add_runs([(name.encode(), [0, 1, 2], [end, end + 10, end + 20])], end + 30)

    for name in "abcdef":
        write(name)
    assert found.progress(b"a") == (2, None)
    found.truncate(20)
    assert found.progress(b"a") == (1, None)  # exact after the cut
    for name in "bcdefgh":
        write(name)
    assert found.progress(b"a") == (1, None) and found.progress(b"b") == (2, None)
    write("i")  # too many: the first becomes idle all the same
    assert found.progress(b"a") == (1, 0) and found.progress(b"b") == (2, None)
    found.truncate(10)
    assert found.progress(b"a") == (None, 0)  # in doubt, and it says so


def test_the_second_of_an_owner_does_not_end_the_window_of_its_unconfirmed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup_window, "_MAX_PRODUCERS", 2)
    found = DedupWindow(REAL, str(tmp_path), lambda: 30)
    for producer in (own("b", 0), own("a", 0), own("a", 1)):
        end = found.end_offset
        found.add_runs([(producer, [0, 1, 2], [end, end + 10, end + 20])], end + 30)
    found.truncate(50)
    assert found.progress(own("a", 0)) == (1, None)  # exact after the cut


def test_records_that_replay_added_are_not_added_by_their_put(tmp_path: Path) -> None:
    known = window(tmp_path)
    known.add_runs([(b"p", range(0, 600), range(0, 6000, 10))], 6000)  # replay was faster
    known.add_runs([(b"p", range(0, 600), range(0, 6000, 10))], 6000)
    known.add_runs([(b"p", range(500, 1000), range(5000, 10000, 10))], 10000)
    assert known.find(b"p", 0) == 0  # all of the last 1024 are known
    result = PutResult(Status.PUT_OK, 9990)
    known.add_all({(b"p", 999): result}, 10000)
    known.add_all({(b"p", 1000): PutResult(Status.PUT_OK, 10000)}, 10010)
    assert known.find(b"p", 0) == 0
    assert known.find(b"p", 1000) == 10000
    assert known.end_offset == 10010


@pytest.mark.parametrize("other", ["save", "truncate"])
def test_a_snapshot_is_written_by_one_thread_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Housekeeping, retention and cuts write the snapshot by way of one temporary file."""
    fs = FaultyFileSystem()
    REAL.make_dirs(f"{tmp_path}/hastore")
    known = DedupWindow(fs, str(tmp_path))
    known.dispatch([record("p", number, 100 * number) for number in range(5)])
    second_is_there = threading.Event()
    monkeypatch.setattr(known, "_saving", NoticedLock(second_is_there), raising=False)
    go_on = threading.Event()
    work = known.save if other == "save" else lambda: known.truncate(200)
    second = threading.Thread(target=work, daemon=True)

    def meet(call: str, path: str) -> None:
        if not path.endswith("idempotence.tmp"):
            return
        if threading.current_thread() is second:
            if call == "write":  # the file is empty now
                second_is_there.set()
                assert go_on.wait(60)
        elif call == "sync":
            second.start()
            if other == "truncate":  # without the lock it would end: the snapshot is not stale yet
                threading.Thread(target=lambda: (second.join(), second_is_there.set())).start()
            assert second_is_there.wait(60)

    fs.hook = meet
    known.save()
    if other == "save":
        found = DedupWindow(REAL, str(tmp_path))
        assert found.load(1000, synced=True) == 500  # after a kill here the snapshot is whole
        assert len(found) == 1
    go_on.set()
    second.join(60)
    assert not second.is_alive()
    found = DedupWindow(REAL, str(tmp_path))
    assert found.load(1000, synced=True) == (500 if other == "save" else 200)


def test_a_store_says_how_far_a_producer_came_once_its_window_has_the_log(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        for number in range(700):  # several files, of which each but the last ends with a blank
            put(store, message(number, producer="p"))
            assert store.producer_progress(b"p") == (number, None)
        crash_copy(store, tmp_path / "b")
        end = store.max_offset
    with opened(tmp_path / "b") as store:
        store.replay.wait_dispatched(end, 60)
        assert store.producer_progress(b"p") == (699, None)
        assert store.producer_progress(b"q") == (None, None)
        store.truncate(end // 2)
        store.replay.wait_dispatched(store.max_offset, 60)
        cut = store.producer_progress(b"p")
        assert cut is not None and cut.last is not None and cut.last < 699
        put(store, message(cut.last + 1, producer="p"))
        assert store.producer_progress(b"p") == (cut.last + 1, None)
