"""A slave of a RocketMQ master compares the end of its log with the master's before it goes on."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator

import pytest

from hastore.ha.slave import classic_client
from hastore.ha.slave.classic_client import compared_from
from hastore.protocol.ha_link import HEADER
from hastore.record.layout import BLANK_MAGIC
from tests.ha.nodes import HaNode, wait_for
from tests.ha.slave import test_unreadable_records
from tests.ha.slave.test_unreadable_records import following, log_with

PIECE = 1000  # of a body: frames split records


class Master(test_unreadable_records.Master):
    """Sends its log from the first report on, then heartbeats; `removed`: retention took it."""

    late = 0  # heartbeats before the data

    def __init__(self, log: bytes, *, begin: int = 0, removed: int = 0) -> None:
        self.begin, self.removed = begin, removed
        self.first_reports: list[int] = []
        super().__init__(log)

    def _stream(self, sock: socket.socket) -> bool:
        first = sock.recv(8)
        if len(first) < 8:
            return True
        at = int.from_bytes(first, "big")
        if at == 1 << 62:
            return False
        self.first_reports.append(at)
        end = self.begin + len(self.log)
        at = at or self.begin  # 0: from the last file on
        sock.sendall(self.late * HEADER.pack(at, 0))
        while self.removed <= at < end:
            piece = self.log[at - self.begin :][:PIECE]
            sock.sendall(HEADER.pack(at, len(piece)) + piece)
            at += len(piece)
        sock.sendall(2 * HEADER.pack(at, 0))
        while sock.recv(4096):
            continue
        return True


@contextlib.contextmanager
def master_of(log: bytes, *, begin: int = 0, removed: int = 0) -> Iterator[Master]:
    made = Master(log, begin=begin, removed=removed)
    try:
        yield made
    finally:
        made.close()


def rewritten(log: bytes, places: list[int], since: int) -> bytes:
    """Return the log with other records of the same sizes: their store times differ."""
    other = bytearray(log)
    for place in places[since:]:
        struct.pack_into(">q", other, place + 56, 2)
    return bytes(other)


def holding(make_group, log: bytes, *, begin: int = 0) -> HaNode:
    """A slave that has followed a master with this log."""
    node: HaNode = make_group(1).start(1)
    with master_of(log, begin=begin) as master, following(node, master.address):
        wait_for(lambda: node.store.max_offset == begin + len(log), "the log")
    return node


def refused(node: HaNode, master: Master) -> str:
    """Return the problem that the operator is shown; the log must stay as it is."""
    before = node.bytes()
    with following(node, master.address) as client:
        wait_for(lambda: client.notice is not None, "the problem")
        assert client.notice == client.problem and not client.linked
        assert node.bytes() == before
        return str(client.notice)


def goes_on(node: HaNode, log: bytes, *, begin: int = 0) -> list[int]:
    """Follow a master with that longer log; return the first reports."""
    with master_of(log, begin=begin) as master, following(node, master.address) as client:
        wait_for(lambda: node.store.max_offset == begin + len(log), "what is new")
        wait_for(lambda: client.linked and client.notice is None, "the link")
        assert node.bytes() == log
        return master.first_reports


def test_the_end_is_compared_and_what_comes_behind_it_is_taken(make_group) -> None:
    log, places = log_with(*"T" * 40)
    node = holding(make_group, log[: places[20]])
    assert goes_on(node, log[: places[30]]) == [1], "0 would mean the last file"
    assert goes_on(node, log) == [1]


def test_a_heartbeat_before_the_data_proves_nothing(make_group, monkeypatch) -> None:
    """A RocketMQ master that was busy for 5 s sends one first."""
    monkeypatch.setattr(Master, "late", 1)
    log, places = log_with(*"T" * 20)
    node = holding(make_group, log[: places[10]])
    assert goes_on(node, log) == [1]


def test_only_the_end_of_a_long_log_is_compared(make_group, monkeypatch) -> None:
    monkeypatch.setattr(classic_client, "COMPARED_BYTES", 1000)
    log, places = log_with(*"T" * 100)
    node = holding(make_group, log[: places[90]])
    assert goes_on(node, log) == [places[90] - 1000]


def test_a_log_that_ends_within_a_record_is_compared_from_that_record_on(make_group) -> None:
    log, places = log_with(*"T" * 8)
    node = holding(make_group, log[: places[5] + 60])
    assert node.store.whole_offset == places[5]
    assert goes_on(node, log) == [1]


@pytest.mark.parametrize("more", [0, 10], ids=["as long", "longer"])
@pytest.mark.parametrize("cut", [15, 0], ids=["the end", "all"])
def test_a_master_that_lost_its_end_and_wrote_on_is_not_followed(make_group, cut, more) -> None:
    log, places = log_with(*"T" * 30)
    end = places[20]
    node = holding(make_group, log[:end])
    with master_of(rewritten(log, places, cut)[: places[20 + more - 1]]) as master:
        problem = refused(node, master)
    place = places[cut] + 63  # the last byte of the store time
    assert f"its bytes at {place} are not those of this log, which ends at {end}" in problem
    assert goes_on(node, log) == [1], "the right master is followed again, without a restart"


@pytest.mark.parametrize("left", [15, 0])
def test_a_master_that_is_shorter_is_not_followed(make_group, left) -> None:
    log, places = log_with(*"T" * 20)
    node = holding(make_group, log)
    with master_of(log[: places[left]]) as master:
        problem = refused(node, master)
    lacks = f"it sends nothing from {places[left] or 1} on, but this log ends at {len(log)}"
    assert lacks in problem


def test_a_master_that_has_removed_the_place_is_not_followed(make_group) -> None:
    log, places = log_with(*"T" * 20)
    node = holding(make_group, log[: places[10]])
    with master_of(log, removed=places[15]) as master:
        assert "it sends nothing from 1 on" in refused(node, master)


def test_the_filler_behind_a_files_last_record_proves_nothing(make_group, monkeypatch) -> None:
    """It is the same in all logs: the records before it are compared."""
    monkeypatch.setattr(classic_client, "COMPARED_BYTES", 1000)
    node = make_group(1).start(1)
    size = node.store.file_size
    log, places = log_with(*"T" * 20)
    filler = struct.pack(">iI", size - len(log), BLANK_MAGIC).ljust(size - len(log), b"\0")
    with master_of(log + filler) as master, following(node, master.address):
        wait_for(lambda: node.store.max_offset == size, "a whole file")
    assert len(filler) > 1000 and compared_from(node.store) == len(log) + 8 - 1000
    with master_of(rewritten(log, places, 19) + filler + log) as master:
        assert f"its bytes at {places[19] + 63} are not" in refused(node, master)


def test_a_log_that_begins_in_a_later_file_is_compared_there(make_group) -> None:
    node = make_group(1).start(1)
    begin = 2 * node.store.file_size
    log, places = log_with(*"T" * 20)
    for end in (10, 15, 19):
        with (
            master_of(log[: places[end]], begin=begin) as master,
            following(node, master.address) as client,
        ):
            wait_for(lambda end=end: node.store.max_offset == begin + places[end], "the log")
            wait_for(lambda client=client: client.linked, "the link")
    assert master.first_reports == [begin]


def test_a_node_stops_although_the_master_is_silent(make_group) -> None:
    log, _ = log_with(*"T" * 3)
    group = make_group(1, ha={"housekeeping_interval_ms": 3_600_000})
    node = group.start(1)
    with master_of(log) as master, following(node, master.address):
        wait_for(lambda: node.store.max_offset == len(log), "the log")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with following(node, address) as client:
            wait_for(lambda: client._comparing is not None, "the link")
