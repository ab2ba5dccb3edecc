"""A slave of a RocketMQ master that stops between receiving an unreadable record and cutting it
recovers its log, and then cuts it.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from hastore.errors import StoreBrokenError
from hastore.ha.node.node_state import NodeState
from hastore.ha.rules.epochs import EpochEntry
from hastore.ha.slave import classic_client
from hastore.ha.slave.classic_client import ClassicHAClient
from hastore.protocol.ha_link import HEADER
from hastore.record.codec import build_record, check_record, check_unreadable
from hastore.record.layout import HEADER_SIZE, V1_MAGIC
from hastore.store import log_store
from hastore.store.log_store import StoreHooks
from tests.ha.nodes import HOST, HaNode, wait_for
from tests.store.kit import crash_copy

BROKEN_TOPIC = "日" * 43  # 129 bytes; 100 of them: 300 bytes, whose lower byte is 44
NEVER_MS = 1e12


@pytest.fixture(autouse=True)
def no_wait_for_replay(monkeypatch):
    """A close waits for replay, which can get no further here."""
    monkeypatch.setattr(log_store, "_DRAIN_S", 0.05)


def record(at: int, topic: str = "T", *, queue_offset: int = 0) -> bytearray:
    """A record as RocketMQ stores it at offset `at`: V1, whatever the topic."""
    raw = bytearray(
        build_record(
            "T", b"body", queue_id=0, properties=[("k", "v")], born_timestamp_ms=1, born_host=HOST
        )
    )
    struct.pack_into(">qq", raw, 20, queue_offset, at)
    struct.pack_into(">q", raw, 56, 1)
    name = topic.encode()
    tail = raw.index(b"\x01T\x00", 88)
    raw[tail : tail + 2] = bytes([len(name) & 0xFF]) + name
    struct.pack_into(">iI", raw, 0, len(raw), V1_MAGIC)
    return raw


def log_with(*topics: str) -> tuple[bytes, list[int]]:
    """Return the bytes of a log with one record per topic, and where each starts."""
    log, places = bytearray(), []
    for topic in topics:
        places.append(len(log))
        log += record(len(log), topic, queue_offset=len(places) - 1)
    return bytes(log), places


class Master:
    """A RocketMQ master's HA port: sends its log from the first report on, then only listens."""

    def __init__(self, log: bytes) -> None:
        self.log = log
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                sock, _ = self._listener.accept()
                with sock:
                    if not self._listener.fileno() >= 0 or not self._stream(sock):
                        return
                continue
            return

    def _stream(self, sock: socket.socket) -> bool:
        first = sock.recv(8)
        if len(first) < 8:
            return True
        offset = int.from_bytes(first, "big")
        if offset == 1 << 62:  # the end of the test
            return False
        sock.sendall(HEADER.pack(offset, len(self.log) - offset) + self.log[offset:])
        while sock.recv(4096):
            continue
        return True

    def close(self) -> None:
        with socket.create_connection(self._listener.getsockname()) as last:
            last.sendall((1 << 62).to_bytes(8, "big"))
            self._thread.join(60)
        self._listener.close()


@contextlib.contextmanager
def master_of(log: bytes) -> Iterator[Master]:
    made = Master(log)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def following(node: HaNode, address: str) -> Iterator[ClassicHAClient]:
    client = ClassicHAClient(node.member, address)
    client.start()
    try:
        yield client
    finally:
        assert client.stop(60)


def received(make_group, monkeypatch, log: bytes):
    """A group whose slave has the whole log, and stopped before it checked replay."""
    group = make_group(1)
    with monkeypatch.context() as slow, master_of(log) as master:
        slow.setattr(classic_client, "STUCK_MS", NEVER_MS)
        node = group.start(1)
        with following(node, master.address):
            wait_for(lambda: node.store.whole_offset == len(log), "the log")
            node.store.flush()
        node.stop()
    return group


@pytest.mark.parametrize("topic", [BROKEN_TOPIC, "日" * 100], ids=[129, 300])
def test_the_start_takes_it_up_and_cuts_without_the_master(make_group, monkeypatch, topic):
    log, places = log_with("T", "T", topic, "T")
    group = received(make_group, monkeypatch, log)
    monkeypatch.setattr(classic_client, "STUCK_MS", 50.0)
    node = group.start(1)
    assert node.bytes() == log, "nothing is lost by the start"
    with following(node, "127.0.0.1:9") as client:
        wait_for(lambda: node.store.max_offset == places[2], "the cut")
        wait_for(lambda: "is unreadable" in str(client.problem), "the reason")
    rescued = group.root / "node1" / "rescued" / f"0-{places[2]}"
    kept = next(rescued.iterdir()).read_bytes()
    assert kept[places[2] : len(log)] == log[places[2] :]
    assert node.bytes() == log[: places[2]]
    # After its own restart the master has other records there; they are accepted.
    better, _ = log_with("T", "T", "T", "T")
    with master_of(better) as master, following(node, master.address):
        wait_for(lambda: node.store.dispatched_offset == len(better), "what is new")
    assert node.bytes() == better


@pytest.mark.parametrize("damage", ["body", "crc", "size", "topic", "properties"])
def test_damage_is_still_refused(make_group, monkeypatch, damage):
    log, places = log_with("T", "T", BROKEN_TOPIC, "T")
    group = received(make_group, monkeypatch, log)
    at, end = places[2], places[3]
    place = {
        "body": at + 88, "crc": at + 9, "size": at + 3, "topic": at + 93 + 60,
        "properties": end - 5,
    }[damage]  # fmt: skip
    file = group.root / "node1" / "commitlog" / f"{0:020d}"
    with file.open("r+b") as disk:
        disk.seek(place)
        byte = disk.read(1)[0]
        disk.seek(place)
        disk.write(bytes([byte ^ 0xFF]))
    with pytest.raises(StoreBrokenError):
        group.start(1)


def test_a_log_of_its_own_epochs_has_no_such_records(make_group, monkeypatch):
    log, _ = log_with("T", "T", BROKEN_TOPIC, "T")
    group = received(make_group, monkeypatch, log)
    monkeypatch.setattr(NodeState, "last_epoch", 65537)
    with pytest.raises(StoreBrokenError):
        group.start(1)


@pytest.mark.parametrize("promoted", [False, True])
def test_a_record_that_the_broker_has_with_a_wrong_crc_hinders_no_start(
    make_group, promoted, caplog, monkeypatch
):
    """It is kept as it came, so it is no damage of this node's disk: the start was refused.

    But rot looks like it, so the scrubber is told: it asks other nodes, or makes it a problem.
    """
    met = []
    monkeypatch.setattr(log_store, "StoreHooks", lambda: StoreHooks(on_damage=met.append))
    log, places = log_with("T", "T", "T", "T")
    log = bytearray(log)
    log[places[1] + HEADER_SIZE] ^= 1  # its body
    group = make_group(1)
    node = group.start(1)
    with master_of(bytes(log)) as master, following(node, master.address):
        wait_for(lambda: node.store.dispatched_offset == len(log), "the log")
        node.store.flush()
    if promoted:
        node.state.take_entries([EpochEntry(65537, len(log), 0, (1,))], node.state.history[:1])
    for _ in range(2):
        node.stop()
        caplog.clear()
        met.clear()
        node = group.start(1)
        assert met == [places[1]]
        assert node.bytes() == log and node.store.dispatched_offset == len(log)
        assert f"the record at {places[1]}, of a RocketMQ master, has a wrong CRC" in caplog.text
        assert not node.state.data.unclean
    more, _ = log_with("T", "T", "T", "T", "T")
    if not promoted:
        log += more[len(log) :]
        with master_of(bytes(log)) as master, following(node, master.address):
            wait_for(lambda: node.store.dispatched_offset == len(log), "what is new")


def test_a_record_with_a_wrong_crc_that_was_not_synced_is_fetched_again_after_a_kill(make_group):
    log, places = log_with(*["T"] * 30)
    log = bytearray(log)
    log[places[1] + HEADER_SIZE] ^= 1  # its body
    group = make_group(1, store={"flush_interval_ms": 600_000})
    node = group.start(1)
    with master_of(bytes(log)) as master, following(node, master.address):
        wait_for(lambda: node.store.dispatched_offset == len(log), "the log")
        copy = crash_copy(node.store, group.root / "copy")
        assert node.store.flushed_offset <= places[1]
    node.stop()
    shutil.rmtree(group.root / "node1")
    shutil.move(copy, group.root / "node1")
    node = group.start(1)
    with master_of(bytes(log)) as master, following(node, master.address):
        wait_for(lambda: node.store.dispatched_offset == len(log), "the log again")


@pytest.mark.parametrize("writer", ["this node", "unknown"])
def test_a_wrong_crc_in_bytes_that_are_not_known_to_be_the_brokers_is_damage(make_group, writer):
    log, places = log_with("T", "T", "T", "T")
    group = make_group(1)
    node = group.start(1)
    with master_of(log) as master, following(node, master.address):
        wait_for(lambda: node.store.dispatched_offset == len(log), "the log")
        node.store.flush()
    if writer == "this node":
        node.state.take_entries([EpochEntry(65537, places[1], 0, (1,))], node.state.history[:1])
    node.stop()
    if writer == "unknown":
        (group.root / "node1" / "hastore" / "node.json").unlink()
    with (group.root / "node1" / "commitlog" / f"{0:020d}").open("r+b") as disk:
        disk.seek(places[1] + HEADER_SIZE)
        disk.write(b"X")
    with pytest.raises(StoreBrokenError):
        group.start(1)


def test_only_the_length_of_the_topic_may_be_wrong():
    raw = bytes(record(0, BROKEN_TOPIC))
    assert check_unreadable(raw, 0, len(raw), 0) == len(raw) and not check_record(
        raw, 0, len(raw), 0
    )
    assert not check_unreadable(raw, 0, len(raw), 1)
    assert not check_unreadable(raw, 0, len(raw) - 1, 0)
    good = bytes(record(0, "T"))
    assert check_record(good, 0, len(good), 0) and not check_unreadable(good, 0, len(good), 0)
    # With one wrong byte it is not recognized, or has the same size.
    for at in range(len(raw)):
        for value in (0, 1, 0x7F, 0x80, 0xFF):
            bad = raw[:at] + bytes([value]) + raw[at + 1 :]
            assert check_unreadable(bad, 0, len(bad), 0) in (0, len(raw))
