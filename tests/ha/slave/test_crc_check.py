"""A slave that is caught up acknowledges no pushed record whose body's CRC is wrong."""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import random
import struct
import threading
from typing import Any

import pytest

from hastore.config.model import AckPoint
from hastore.errors import StoreBrokenError, StoreFullError
from hastore.ha.slave import crc_check
from hastore.ha.slave.crc_check import CHECKED_BYTES_MAX, CrcCheck, DamagedRecordError
from hastore.ha.slave.ha_client import HAClient
from hastore.ha.slave.slave_stream import SlaveStream
from hastore.record.codec import check_blank, check_record, pack_blank
from hastore.record.layout import BLANK_SIZE
from tests.ha.nodes import FILE_SIZE, wait_for
from tests.ha.slave.test_unreadable_records import (
    BROKEN_TOPIC,
    following,
    log_with,
    master_of,
    record,
)
from tests.store.kit import log_file, scribble

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "golden"
FOREVER = 10**9


class Bytes:
    """A log whose views end at a file's end, as those of a ReplicaLog."""

    def __init__(self, data: bytes, file_size: int, start: int = 0) -> None:
        self.data, self.file_size, self.start = data, file_size, start

    def view(self, offset: int, size: int) -> Any:
        left = self.file_size - offset % self.file_size
        at = offset - self.start
        return contextlib.nullcontext(memoryview(self.data)[at : at + min(size, left)])


def check_all(data: bytes, file_size: int, ends: list[int], start: int = 0) -> CrcCheck:
    """Check a log that arrives in frames that end at `ends`."""
    check = CrcCheck(Bytes(data, file_size, start))  # type: ignore[arg-type]
    at = start
    for end in ends:
        check.begin(at, end - at)
        check.check_appended(end)
        at = end
    return check


def golden_logs() -> list[tuple[int, int, bytes]]:
    """Return (start, file size, bytes of all files up to the last record) of RocketMQ's stores."""
    logs = []
    for folder in sorted(GOLDEN.rglob("commitlog")):
        files = sorted(each for each in folder.iterdir() if each.name.isdigit())
        data = b"".join(each.read_bytes() for each in files)
        start, size = int(files[0].name), files[0].stat().st_size
        at = 0
        while at < len(data):
            left = size - at % size
            step = check_record(data, at, at + left, start + at)
            step = step or check_blank(data, at, at + left)
            if not step:
                break
            at += step
        logs.append((start, size, data[:at]))
    assert logs, f"no logs below {GOLDEN}"
    return logs


@pytest.mark.parametrize("log", golden_logs(), ids=lambda log: f"{log[0]}-{len(log[2])}")
def test_all_that_a_rocketmq_wrote_passes_in_frames_of_any_size(log):
    start, file_size, data = log
    assert data
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    for longest in (1, 50, 300, 5000, FOREVER):
        ends, at = [], start
        while at < start + len(data):
            left = min(file_size - at % file_size, start + len(data) - at, CHECKED_BYTES_MAX)
            at += min(left, chance.randint(1, longest))
            ends.append(at)
        check = check_all(data, file_size, ends, start)
        if longest < 300:
            assert check._next is not None or data.endswith(b"\0"), "it lost its place"


def test_every_damaged_byte_of_a_body_is_seen_in_frames_of_any_size():
    log, places = log_with("T", "T", "T")
    body_at = places[1] + 88
    for bit in range(4 * 8):
        bad = bytearray(log)
        bad[body_at + bit // 8] ^= 1 << bit % 8
        for piece in (7, len(log)):
            ends = [*range(piece, len(log), piece), len(log)]
            with pytest.raises(DamagedRecordError, match=f"record at {places[1]} ") as found:
                check_all(bytes(bad), FOREVER, ends)
            accepted = {(found.value.offset, found.value.crc)}
            check = CrcCheck(Bytes(bytes(bad), FOREVER), accepted)  # type: ignore[arg-type]
            check.begin(0, len(log))
            check.check_appended(len(log))


@pytest.mark.parametrize("field", ["size", "magic", "crc", "place", "flags", "body length"])
def test_a_damaged_head_is_seen_once_the_place_is_known(field):
    log, places = log_with("T", "T", "T", "T")
    at = {"size": 3, "magic": 5, "crc": 9, "place": 30, "flags": 39, "body length": 87}[field]
    bad = bytearray(log)
    bad[places[2] + at] ^= 0x30
    with pytest.raises(DamagedRecordError):
        check_all(bytes(bad), FOREVER, [len(log)])


@pytest.mark.parametrize("bit", range(32))
def test_a_wrong_size_is_seen_before_the_record_is_reported(bit):
    log, places = log_with("T", "T", BROKEN_TOPIC, "T")
    places = [*places, len(log)]
    for number in range(1, 4):
        bad = bytearray(log)
        bad[places[number] + bit // 8] ^= 0x80 >> bit % 8
        whole = places[number + 1]
        for ends in ([places[number], whole], [whole], [places[number] + 5, whole], [len(log)]):
            with pytest.raises(DamagedRecordError, match=f"record at {places[number]} ") as found:
                check_all(bytes(bad), FOREVER, ends)
            accepted = {(found.value.offset, found.value.crc)}
            check = CrcCheck(Bytes(bytes(bad), FOREVER), accepted)  # type: ignore[arg-type]
            for begin, end in itertools.pairwise([0, *ends, len(log)]):
                check.begin(begin, end - begin)
                check.check_appended(end)


@pytest.mark.parametrize("left", [BLANK_SIZE, 40, 87, 88, 200])
def test_checking_continues_after_a_blank_of_any_size(left):
    first = bytes(record(0))
    file_size = len(first) + left
    second = bytearray(record(file_size))
    data = first + pack_blank(left) + bytes(left - BLANK_SIZE)
    check_all(data + bytes(second), file_size, [file_size, file_size + len(second)])
    second[88] ^= 1
    for ends in ([len(first), file_size], [file_size], [len(first) + 3, file_size - 2, file_size]):
        with pytest.raises(DamagedRecordError):
            check_all(data + bytes(second), file_size, [*ends, file_size + len(second)])


def test_a_stream_that_begins_inside_a_record_is_looked_at_from_the_next_frame_on():
    log, places = log_with("T", "T", "T")
    bad = bytearray(log)
    bad[places[2] + 88] ^= 1
    inside = places[1] + 20
    check = CrcCheck(Bytes(bytes(bad), FOREVER))  # type: ignore[arg-type]
    check.begin(inside, places[2] - inside)
    check.check_appended(places[2])
    check.begin(places[2], len(log) - places[2])
    with pytest.raises(DamagedRecordError):
        check.check_appended(len(log))


def test_a_record_of_the_broken_topic_is_not_the_links_business():
    log, _ = log_with("T", BROKEN_TOPIC, "T")
    check_all(log, FOREVER, [len(log)])


# ---- on a link


@pytest.fixture
def pair(make_group):
    def make(ack_point: AckPoint):
        group = make_group(2, ha={"ack_point": ack_point})
        master, slave = group.start(1), group.start(2)
        master.promote()
        slave.follow()
        wait_for(lambda: slave.linked and master.ha.linked_nodes(), "a link")
        assert master.put_confirmed(b"first")[0] == "PUT_OK"
        return master, slave

    return make


def damage(monkeypatch: pytest.MonkeyPatch, times: float) -> list[int]:
    """Damage received bytes so many times, as faulty memory or a network card would."""
    real = SlaveStream._receive_bytes
    done: list[int] = []

    def take(self: SlaveStream, data: memoryview, *given: Any) -> None:
        at = bytes(data).find(b"precious")
        if at >= 0 and len(done) < times:
            done.append(at)
            data[at : at + 8] = b"precioUs"
        real(self, data, *given)

    monkeypatch.setattr(SlaveStream, "_receive_bytes", take)
    return done


def damage_in(
    monkeypatch: pytest.MonkeyPatch, where: dict[bytes, int], times: float = FOREVER
) -> list[bytes]:
    """Damage received records with these bodies, so many bytes from their start."""
    real = SlaveStream._receive_bytes
    done: list[bytes] = []

    def take(self: SlaveStream, data: memoryview, *given: Any) -> None:
        for body, place in where.items():
            at = bytes(data).find(body)
            if at >= 0 and len(done) < times:
                done.append(body)
                data[at - 88 + place] ^= 0x10
        real(self, data, *given)

    monkeypatch.setattr(SlaveStream, "_receive_bytes", take)
    return done


@pytest.mark.parametrize("ack_point", list(AckPoint))
def test_a_damaged_record_is_fetched_again_before_it_is_acknowledged(pair, monkeypatch, ack_point):
    master, slave = pair(ack_point)
    done = damage(monkeypatch, 1)
    reports: list[int] = []
    real = type(master.ha).on_report

    def on_report(self: Any, connection: Any, offset: int) -> None:
        if b"precioUs" in slave.bytes(end=min(offset, slave.store.max_offset)):
            reports.append(offset)
        real(self, connection, offset)

    monkeypatch.setattr(type(master.ha), "on_report", on_report)
    assert master.put_confirmed(b"a precious body")[0] == "PUT_OK"
    assert done and not reports, "a damaged record was reported"
    assert slave.bytes() == master.bytes() and slave.client.notice is None
    assert master.put_confirmed(b"and on")[0] == "PUT_OK"


def test_a_record_damaged_in_the_masters_log_is_accepted_with_a_notice(pair, monkeypatch, caplog):
    master, slave = pair(AckPoint.WRITTEN)
    at = master.store.max_offset
    done = damage(monkeypatch, FOREVER)
    assert master.put_confirmed(b"a precious body")[0] == "PUT_OK"
    assert len(done) == 3, "twice refused, then taken"
    wait_for(lambda: slave.client.notice, "the notice")
    assert f"record at {at} is damaged in the master's log" in slave.client.notice
    assert any(f"record at {at} is damaged" in each.message for each in caplog.records)
    assert master.put_confirmed(b"and on")[0] == "PUT_OK"
    assert len(done) == 3


def test_a_master_with_several_damaged_records_is_followed_all_the_same(pair, monkeypatch):
    """A cut stops before an unreadable header: a record accepted before comes once more."""
    master, slave = pair(AckPoint.WRITTEN)
    heads = {b"precious 1": 31, b"precious 2": 88, b"precious 3": 3, b"precious 4": 89}
    done = damage_in(monkeypatch, heads)
    for body in heads:
        assert master.put_confirmed(body)[0] == "PUT_OK"
    assert set(done) == set(heads) and slave.store.max_offset == master.store.max_offset
    wait_for(lambda: slave.client.notice, "the notice")


def test_the_first_head_of_a_link_is_looked_at(pair, monkeypatch):
    master, slave = pair(AckPoint.WRITTEN)
    assert slave.store.wait_dispatched(slave.store.max_offset, 10.0)
    slave.unfollow()
    damage_in(monkeypatch, {b"precious": 31}, times=1)
    slave.follow()
    wait_for(lambda: slave.linked and master.ha.linked_nodes(), "a link")
    assert master.put_confirmed(b"precious")[0] == "PUT_OK"
    assert slave.bytes() == master.bytes()


@pytest.mark.parametrize("event", ["a promise", "the disk is full", "the node stops"])
def test_a_damaged_record_never_stays_where_it_would_pass_for_a_good_one(pair, monkeypatch, event):
    master, slave = pair(AckPoint.WRITTEN)
    client = slave.client
    damage(monkeypatch, 1)
    met_it = threading.Event()
    real = SlaveStream._met_damage

    def met(self: SlaveStream, damaged: DamagedRecordError) -> None:
        if event == "a promise":
            slave.member.state.promise(slave.member.state.data.promised_epoch + (1 << 16))
        elif event == "the node stops":
            client.stopping.set()
        else:
            monkeypatch.setattr(slave.store, "archive", full)
        met_it.set()
        real(self, damaged)

    def full(*_: Any) -> int:
        raise StoreFullError("no room")

    monkeypatch.setattr(SlaveStream, "_met_damage", met)
    master.put(b"a precious body")
    assert met_it.wait(30.0)
    wait_for(lambda: b"precioUs" not in slave.bytes(), "the damaged record is gone")
    assert not pathlib.Path(slave.config.store.root, "rescued").exists()


def test_a_record_that_comes_damaged_costs_no_confirmed_one_though_another_has_rotted(
    pair, monkeypatch
):
    """The master is lost in the moment of the cut, so that it sends nothing again."""
    master, slave = pair(AckPoint.WRITTEN)
    bodies = [b"confirmed %d" % number for number in range(20)]
    places = [slave.store.max_offset]
    for body in bodies:
        assert master.put_confirmed(body)[0] == "PUT_OK"
        places.append(master.store.max_offset)
    assert slave.store.wait_dispatched(places[-1], 30.0)
    scribble(log_file(slave.config.store.root), places[3] + 4, b"????")
    damage(monkeypatch, 1)
    real = HAClient._cut_damaged

    def cut(self: HAClient, *given: Any) -> None:
        real(self, *given)
        self.stopping.set()

    monkeypatch.setattr(HAClient, "_cut_damaged", cut)
    master.put(b"precious")
    wait_for(lambda: not slave.client.alive, "the cut")
    master.stop()
    slave.promote()
    assert slave.store.max_offset == places[-1]
    log = slave.bytes()
    assert [body for body in bodies if body not in log] == []


def test_records_of_a_rocketmq_are_taken_as_they_are(make_group, caplog):
    log, places = log_with("T", "T")
    log = bytearray(log)
    struct.pack_into(">I", log, places[1] + 8, 0)  # a CRC of 0
    group = make_group(1)
    node = group.start(1)
    with master_of(bytes(log)) as master, following(node, master.address):
        wait_for(lambda: node.store.whole_offset == len(log), "the log")
        wait_for(lambda: any("wrong CRC" in each.message for each in caplog.records), "the warning")
    assert node.bytes() == log


def test_a_long_frame_is_let_through_as_documented(pair, monkeypatch):
    master, slave = pair(AckPoint.WRITTEN)
    monkeypatch.setattr(crc_check, "CHECKED_BYTES_MAX", 64)
    damage(monkeypatch, FOREVER)
    assert master.put_confirmed(b"a precious body")[0] == "PUT_OK"
    assert b"precioUs" in slave.bytes() and FILE_SIZE > CHECKED_BYTES_MAX // 4


@pytest.mark.parametrize("ack_point", list(AckPoint))
def test_what_is_confirmed_behind_such_a_record_is_not_cut_by_a_restart(
    make_group, monkeypatch, ack_point
):
    group = make_group(2, ha={"ack_point": ack_point})
    master, slave = group.start(1), group.start(2)
    master.promote()
    at = master.put(b"first")
    master.put(b"precious")
    with monkeypatch.context() as patch:
        patch.setattr(crc_check, "CHECKED_BYTES_MAX", 64)
        damage_in(patch, {b"precious": 4})
        slave.follow()
        wait_for(lambda: slave.store.max_offset == master.store.max_offset, "the copy")
    assert master.put_confirmed(b"confirmed")[0] == "PUT_OK"
    wait_for(lambda: slave.store.replay_problem, "replay's end")
    slave.stop()
    master.stop()
    with pytest.raises(StoreBrokenError, match=f"record at {at} is damaged"):
        group.start(2)
