"""A RocketMQ slave on the HA port: the exact bytes of its protocol."""

import time

import pytest

from hastore.config.model import Role, SyncFrom
from hastore.ha.hello import peer as peer_module
from hastore.protocol.ha_link import CLASSIC_BODY_BYTES
from tests.ha.nodes import FILE_SIZE, peer, wait_for


@pytest.fixture
def master(make_group):
    """A master without slaves; its records fill three files."""

    def make(**ha):
        group = make_group(
            1, acks=0, role=Role.ASYNC_MASTER, ha={"allow_classic_peers": True, **ha}
        )
        node = group.start(1)
        node.promote()
        while node.store.max_offset < 2 * FILE_SIZE + 20_000:
            node.put(*[b"x" * 900] * 5)
        return node

    return make


def check_stream(node, frames, start):
    at = start
    for offset, body in frames:
        assert offset == at and 0 < len(body) <= CLASSIC_BODY_BYTES
        assert offset // FILE_SIZE == (offset + len(body) - 1) // FILE_SIZE, "crosses a file"
        at += len(body)
    assert b"".join(body for _, body in frames) == node.bytes(start, at)


def test_nothing_is_sent_before_the_first_report(master):
    node = master()
    with peer(node) as slave:
        slave.sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            slave.sock.recv(1)


@pytest.mark.parametrize("where", [1, FILE_SIZE - 1, FILE_SIZE, FILE_SIZE + 17, "end"])
def test_a_report_inside_the_log_starts_exactly_there(master, where):
    node = master()
    end = node.store.max_offset
    start = end if where == "end" else where
    with peer(node) as slave:
        slave.report(start)
        if start == end:
            assert slave.frame() == (end, b"")  # a heartbeat, on time
            return
        check_stream(node, slave.frames_until(end), start)


def test_a_report_of_0_starts_at_the_first_file(master):
    node = master()
    with peer(node) as slave:
        slave.report(0)
        check_stream(node, slave.frames_until(node.store.max_offset), 0)


def test_a_report_of_0_starts_at_the_last_file_where_asked(master):
    node = master(sync_from=SyncFrom.LAST)
    with peer(node) as slave:
        slave.report(0)
        check_stream(node, slave.frames_until(node.store.max_offset), 2 * FILE_SIZE)


@pytest.mark.parametrize("beyond", [1, FILE_SIZE, 2**62])
def test_a_report_outside_the_log_is_closed_not_fed_heartbeats(master, beyond):
    node = master()
    with peer(node) as slave:
        slave.report(node.store.max_offset + beyond)
        assert slave.closed
    assert node.ha.slaves() == []


@pytest.mark.parametrize("report", [-1, -(2**63), -2])
def test_a_negative_first_report_is_closed(master, report):
    node = master()
    with peer(node) as slave:
        slave.report(report)
        assert slave.closed


def test_a_classic_peer_is_refused_unless_allowed(master):
    node = master(allow_classic_peers=False)
    with peer(node) as slave:
        slave.report(0)
        assert slave.closed


def test_a_classic_peer_beyond_loopback_is_named_as_not_tamper_proof(master, caplog, monkeypatch):
    node = master()
    with peer(node) as slave:
        slave.report(0)
        slave.frame()
    assert "tamper" not in caplog.text  # who is on this machine is not between both
    monkeypatch.setattr(peer_module, "is_loopback", lambda _host: False)
    with peer(node) as slave:
        slave.report(0)
        slave.frame()
    assert "the link with a RocketMQ slave at 127.0.0.1" in caplog.text
    assert "is not tamper-proof (its protocol knows no secret)" in caplog.text


def test_live_data_follows_and_heartbeats_name_the_next_offset(master):
    node = master()
    start = node.store.max_offset
    with peer(node) as slave:
        slave.report(start)
        assert slave.frame() == (start, b"")
        began = time.monotonic()
        end = node.put(b"live")
        assert slave.frames_until(end) == [(start, node.bytes(start, end))]
        slave.report(end)
        assert slave.frame() == (end, b"")
        assert time.monotonic() - began > 0.15  # its interval is 0.2 s
        wait_for(lambda: [one.ack_offset for one in node.ha.slaves()] == [end])
        seen = node.ha.slaves()[0]
        assert (seen.node, seen.classic, seen.lag_bytes) == (None, True, 0)


def test_a_slave_that_is_stuck_is_the_same_one_on_each_link(master):
    """Else its hold on the log's files would begin anew with each link, and never lapse."""
    node = master()
    names = []
    for _ in range(2):
        with peer(node) as slave:
            slave.report(17)
            wait_for(lambda: list(node.ha.slave_offsets().values()) == [17])
            names += node.ha.slave_offsets()
            assert [one.name for one in node.ha.slaves()] == names[-1:]
        wait_for(lambda: not node.ha.slaves())
    assert names[0] == names[1]
    with peer(node) as slave, peer(node) as other:
        slave.report(17)
        other.report(FILE_SIZE)
        wait_for(lambda: len(node.ha.slaves()) == 2)
        assert node.ha.slave_offsets() == {names[0]: 17}


def test_a_silent_slave_is_closed(master):
    node = master(housekeeping_interval_ms=600)
    began = time.monotonic()
    with peer(node) as slave:
        slave.report(node.store.max_offset)
        assert slave.closed
        assert time.monotonic() - began > 0.4
    wait_for(lambda: node.ha.slaves() == [])


def stays_while_it_reports(node):
    with peer(node) as slave:
        try:
            for _ in range(10):
                slave.report(node.store.max_offset)
                time.sleep(0.15)
        except ConnectionError:
            return False
        return len(node.ha.slaves()) == 1


def test_a_slave_that_reports_stays(master):
    node = master(housekeeping_interval_ms=600)
    # Without reports it would never stay. A stalled machine ends the link too, hence ten tries.
    assert any(stays_while_it_reports(node) for _ in range(10))


@pytest.mark.parametrize("bad", ["beyond", "backwards", "negative", "far"])
def test_a_wrong_report_closes_the_link_and_counts_nothing(master, bad):
    node = master()
    end = node.store.max_offset
    with peer(node) as slave:
        slave.report(end - 100)
        slave.frames_until(end)
        slave.report(end - 50)
        wait_for(lambda: [one.ack_offset for one in node.ha.slaves()] == [end - 50])
        slave.report({"beyond": end + 1, "backwards": end - 51, "negative": -1, "far": 2**62}[bad])
        assert slave.closed
    assert node.ha.push2_slave_max_offset == end - 50
    assert node.store.confirmed_offset == end  # the master's own end: classic peers do not count


def test_a_report_comes_in_pieces(master):
    node = master()
    end = node.store.max_offset
    with peer(node) as slave:
        slave.report(end)
        data = end.to_bytes(8, "big")
        for byte in data * 2:
            slave.send(bytes([byte]))
            time.sleep(0.005)
        wait_for(lambda: [one.ack_offset for one in node.ha.slaves()] == [end])
        slave.send(data + data[:3])
        time.sleep(0.1)
        slave.send(data[3:])
        time.sleep(0.1)
        assert len(node.ha.slaves()) == 1


def test_a_big_backlog_flows_while_puts_go_on(master):
    node = master()
    with peer(node) as slave:
        slave.report(1)
        for _ in range(40):
            node.put(*[b"y" * 1000] * 10)
        check_stream(node, slave.frames_until(node.store.max_offset), 1)
