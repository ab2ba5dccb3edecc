"""A slave that reports 0 to a RocketMQ master is sent its last file, wherever that begins."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from hastore.ha.node.member import Member
from hastore.protocol.ha_link import HEADER
from hastore.record.codec import check_record
from tests.ha.nodes import wait_for
from tests.ha.slave.test_unreadable_records import following, record


class Master:
    """A RocketMQ master's HA port: a heartbeat, then its log, for one slave after the other."""

    def __init__(self, begin: int, log: bytes, *, insists: bool = False) -> None:
        self.begin, self.log, self.insists = begin, log, insists
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._links: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            link, _ = self._listener.accept()
            self._links.append(link)
            first = link.recv(8)
            if len(first) < 8:  # the end of the test
                return
            at = self.begin if self.insists else int.from_bytes(first, "big") or self.begin
            left = self.log[at - self.begin :]
            link.sendall(HEADER.pack(at, 0) + (HEADER.pack(at, len(left)) + left if left else b""))

    def close(self) -> None:
        socket.create_connection(self._listener.getsockname()).close()
        self._thread.join(60)
        for link in self._links:
            link.close()
        self._listener.close()


@contextlib.contextmanager
def master_at(begin: int, log: bytes = b"", *, insists: bool = False) -> Iterator[Master]:
    made = Master(begin, log, insists=insists)
    try:
        yield made
    finally:
        made.close()


def starts(member: Member) -> list[tuple[int, int]]:
    return [(entry.epoch, entry.start) for entry in member.state.history]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_slave_that_met_an_empty_master_follows_when_that_has_several_files(
    make_group, restarts
) -> None:
    group = make_group(1)
    node = group.start(1)
    with master_at(0) as master, following(node, master.address):
        wait_for(lambda: starts(node.member) == [(0, 0)], "the first heartbeat")
    if restarts:
        node.stop()
        node = group.start(1)
    begin = 2 * node.store.file_size
    raw = bytes(record(begin))
    assert check_record(raw, 0, len(raw), begin)
    with master_at(begin, raw) as master, following(node, master.address):
        wait_for(lambda: node.store.whole_offset == begin + len(raw), "the last file")
        assert starts(node.member) == [(0, begin)]
    node.stop()
    node = group.start(1)
    assert node.store.max_offset == begin + len(raw)


def test_a_slave_that_has_begun_elsewhere_stays_there(make_group) -> None:
    """It does not report 0: a master that sends another offset than that has another log."""
    node = make_group(1).start(1)
    begin = node.store.file_size
    with master_at(begin) as master, following(node, master.address):
        wait_for(lambda: starts(node.member) == [(0, begin)], "the first heartbeat")
    with (
        master_at(2 * begin, bytes(record(2 * begin)), insists=True) as master,
        following(node, master.address) as client,
    ):
        wait_for(lambda: "but this log ends at" in str(client.problem), "the refusal")
    assert node.store.max_offset == begin
