"""A man in the middle of two nodes with a secret and without TLS, in both modes.

He changes what they say to each other, with checksums that fit, cuts their connections, and speaks
to each as the other.
"""

import socket
import threading
import zlib

import pytest

from hastore.errors import PromotionRefused
from hastore.protocol.dledger import AppendRequest
from hastore.protocol.hello import ANSWER_MAGIC, CALL_MAGIC, SECRET_CALL_MAGIC
from tests.dledger.links.groups import Bytes, LinkGroup
from tests.ha.nodes import wait_for

SECRET = b"sixteen bytes or more"
TRUE, FALSE = b"pay 100 to alice", b"pay 999 to mallo"
CHANGED = "bytes were changed between both nodes"


class Middle:
    """Forwards each connection to `address`; `change(bytes, to the node)` returns what goes on.

    `takes(first)`: whether a connection that begins with these bytes is forwarded at all.
    """

    def __init__(self, address, change=lambda data, _to_node: data, takes=lambda _first: True):
        host, port = address.rsplit(":", 1)
        self.target = host, int(port)
        self.change, self.takes = change, takes
        self.said = b""  # all that the caller has said
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.socks, self.threads = [], [threading.Thread(target=self.accept)]
        self.threads[0].start()

    def accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(self.target)
            except OSError:  # closed
                return
            self.socks += near, far
            for ends in ((near, far, True), (far, near, False)):
                self.threads.append(threading.Thread(target=self.pump, args=ends))
                self.threads[-1].start()

    def pump(self, source, sink, to_node):
        first = True
        try:
            while data := source.recv(65536):
                if to_node:
                    self.said += data
                    if first and not self.takes(data):
                        break
                first = False
                sink.sendall(self.change(data, to_node))
        except OSError:  # the other direction has ended
            pass
        for sock in (source, sink):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for sock in self.socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in list(self.threads):
            thread.join(60)
        for sock in self.socks:
            sock.close()


@pytest.fixture
def between():
    made = []

    def make(*arguments, **options):
        made.append(Middle(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def forge(data, _to_node):
    """Change the body, and the CRC that the record has of it."""
    for good, bad in ((TRUE, FALSE), (crc(TRUE), crc(FALSE))):
        data = data.replace(good, bad)
    return data


def crc(body):
    return (zlib.crc32(body) & 0x7FFFFFFF).to_bytes(4, "big")


def pair(make_group, between, **middle):
    """A master, and a slave whose way to it leads through the middle."""
    group = make_group(2)
    master = group.start(1, secret=SECRET)
    master.promote()
    way = between(master.address, **middle)
    at = group.addresses[1]
    nodes = {**group.addresses, 1: type(at)(api=at.api, ha=f"127.0.0.1:{way.port}", http=at.http)}
    return master, group.start(2, secret=SECRET, nodes=nodes), way


def test_a_changed_body_with_a_fitting_crc_is_not_appended(make_group, between):
    master, slave, way = pair(make_group, between)
    noted = []
    slave.member.on_refused = lambda *fields: noted.append(fields)
    slave.follow()
    assert master.put_confirmed(b"before")[0] == "PUT_OK"
    way.change = forge
    end = master.put(TRUE)
    wait_for(lambda: FALSE in slave.bytes() or CHANGED in (slave.client.problem or ""))
    assert FALSE not in slave.bytes()
    wait_for(lambda: noted, "the line in the audit log")
    assert noted[0][0] == f"127.0.0.1:{way.port}" and CHANGED in noted[0][1]
    way.change = lambda data, _to_node: data
    wait_for(lambda: slave.store.max_offset == end, "the true record")
    assert slave.bytes() == master.bytes()


def test_a_changed_backlog_is_not_appended(make_group, between):
    """Long frames, of which a slave checks no CRC."""
    master, slave, way = pair(make_group, between)
    for number in range(40):
        end = master.put(TRUE + b"%06d" % number + bytes(4_000))
    way.change = lambda data, to_node: data if to_node else data.replace(TRUE, FALSE)
    slave.follow()
    wait_for(lambda: FALSE in slave.bytes() or CHANGED in (slave.client.problem or ""))
    assert FALSE not in slave.bytes()
    way.change = lambda data, _to_node: data
    wait_for(lambda: slave.store.max_offset == end, "the true records")
    assert slave.bytes() == master.bytes()


def test_a_changed_report_confirms_nothing(make_group, between):
    """A report of what the slave does not have would acknowledge a put that only one node has."""
    master, slave, way = pair(make_group, between)
    slave.follow()
    assert master.put_confirmed(b"before")[0] == "PUT_OK"
    assert 0 < slave.store.max_offset == master.store.max_offset
    reports = []

    def hold(data, to_node):
        if not to_node:
            return b""  # the slave does not get the record
        reports.append(data)
        have = master.store.max_offset
        return data[:-8] + have.to_bytes(8, "big")

    way.change = hold
    end = master.put(TRUE)
    wait_for(lambda: reports, "a report that is changed")
    wait_for(lambda: not master.ha.slaves() or master.store.confirmed_offset >= end, "its effect")
    assert master.store.confirmed_offset < end and TRUE not in slave.bytes()
    assert master.put_confirmed(b"more", within_ms=500)[0] != "PUT_OK"


def test_a_changed_append_of_mode_dledger_is_not_taken(tmp_path, between):
    group = LinkGroup(tmp_path, 2)
    data = TRUE + bytes(100)
    try:
        one = group.make(1, source=Bytes(data), secret=SECRET).start()
        way = between(one.address)
        two = group.make(2, ports={**group.ports, 1: way.port}, secret=SECRET).start()
        wait_for(lambda: two.recorder.up and one.recorder.up, "the link")
        way.change = forge
        request = AppendRequest(1, -1, -1, 0, len(data), ((1, 1),), -1)
        one.links.send(2, request)
        wait_for(lambda: two.recorder.got or CHANGED in two.links.problems.get(1, ""), "its end")
        assert two.recorder.got == []
        way.change = lambda said, _to_node: said
        wait_for(lambda: (2, True) in one.recorder.links[1:], "another link")
        one.links.send(2, request)
        wait_for(lambda: two.recorder.got == [(1, request, data)], "the true bytes")
    finally:
        group.stop()


def test_a_changed_copy_of_a_promotion_is_not_taken(make_group, between):
    """The node that is to be master fetches what it lacks from the node that is ahead."""
    master, slave, way = pair(make_group, between)
    slave.follow()
    assert master.put_confirmed(b"before")[0] == "PUT_OK"
    slave.unfollow()
    for number in range(20):
        master.put(TRUE + b"%06d" % number + bytes(4_000))
    noted = []
    slave.member.on_refused = lambda *fields: noted.append(fields)
    way.change = lambda data, to_node: data if to_node else data.replace(TRUE, FALSE)
    with pytest.raises(PromotionRefused, match=CHANGED):
        slave.promote()
    assert FALSE not in slave.bytes() and CHANGED in noted[0][1]
    way.change = lambda data, _to_node: data
    slave.promote(again=True)
    assert slave.bytes() == master.bytes() and TRUE in slave.bytes()


def spoil_hello(data, to_node):
    """Change the last byte of the answerer's HELLO; what it proves the secret with is shorter."""
    return data if to_node or len(data) < 64 else data[:-1] + bytes((data[-1] ^ 1,))


def test_a_changed_hello_is_in_the_audit_log_of_the_caller(make_group, between):
    _, slave, _ = pair(make_group, between, change=spoil_hello)
    noted = []
    slave.member.on_refused = lambda *fields: noted.append(fields)
    slave.follow()
    wait_for(lambda: noted, "the line in the audit log")
    assert CHANGED in noted[0][1] and not slave.linked


def test_a_changed_hello_of_mode_dledger_is_in_the_audit_log_of_the_caller(tmp_path, between):
    group = LinkGroup(tmp_path, 2)
    try:
        one = group.make(1, secret=SECRET).start()
        way = between(one.address, change=spoil_hello)
        two = group.make(2, ports={**group.ports, 1: way.port}, secret=SECRET)
        noted = []
        two.member.on_refused = lambda *fields: noted.append(fields)
        two.start()
        wait_for(lambda: noted, "the line in the audit log")
        assert CHANGED in noted[0][1] and not two.recorder.up
    finally:
        group.stop()


def of_the_version_before(first):
    """Whether a connection begins as the version before begins: others are cut."""
    return first == CALL_MAGIC


def test_nobody_makes_two_nodes_of_this_version_take_an_older_exchange(make_group, between):
    """Both were upgraded, and have not met: each may still meet the version before."""
    master, slave, way = pair(make_group, between, takes=of_the_version_before)
    for node in (master, slave):
        node.state.save(proved_only=False)
    slave.follow()
    wait_for(lambda: way.said.count(CALL_MAGIC) > 3, "some attempts")
    assert not slave.linked and master.ha.slaves() == []
    assert "closed the connection" in slave.client.problem  # before the master says anything
    way.takes = lambda _first: True
    wait_for(lambda: slave.linked, "the link")
    wait_for(lambda: slave.state.data.proved_nodes == (1,), "what it has learned")
    assert master.state.data.proved_nodes == (2,)


def test_a_new_store_says_nothing_to_who_cuts_the_exchange(make_group, between):
    _, slave, way = pair(make_group, between, takes=of_the_version_before)
    slave.follow()
    wait_for(lambda: way.said.count(SECRET_CALL_MAGIC) > 3, "some attempts")
    assert set(way.said) == set(SECRET_CALL_MAGIC) and ANSWER_MAGIC not in way.said
    assert not slave.linked
