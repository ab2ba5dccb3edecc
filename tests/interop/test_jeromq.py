"""JeroMQ, the implementation of ZeroMQ in Java, as a client of the API.

About one in fifty of its connections (0.6.0; more on a busy machine) is opened and then never sends
a greeting: its poller loses the handle, see its pull request 1022. A node can do nothing about
that. So every connection goes through a relay, and one on which JeroMQ sends nothing is replaced. A
request that JeroMQ sends and a node does not answer still fails the test.
"""

import contextlib
import random
import time

import pytest

from hastore.client.producer.producer import Producer
from hastore.protocol import api
from hastore.record.codec import NO_HOST, build_record, decode_record
from tests.process.harness import POLL_S, wait_until
from tests.process.relay import Relay

pytestmark = pytest.mark.full
TIMEOUT_MS = 120_000
SILENT_S = 1.5  # before a silent connection is replaced; a node waits 5 s for a greeting
HEARTBEAT_MS = 100
HEARTBEATS = 12
LARGE_BYTES = 1024 * 1024


def record(body, queue=0):
    return build_record("T", body, queue_id=queue, born_timestamp_ms=1, born_host=NO_HOST)


class Dealer:
    """A DEALER of JeroMQ; frames are passed to and from the JVM as hexadecimal digits."""

    def __init__(self, peer, relay, *, context="first", socket="first", heartbeat_ms=0):
        self._peer, self._socket = peer, socket
        before, deadline = len(relay.connections), time.monotonic() + TIMEOUT_MS / 1000
        while time.monotonic() < deadline:
            assert peer.call(
                "connect", context=context, socket=socket, address=relay.address,
                heartbeat_ms=heartbeat_ms, timeout_ms=TIMEOUT_MS,
            )  # fmt: skip
            greeted_by = time.monotonic() + SILENT_S
            while time.monotonic() < greeted_by:
                for self.said in relay.connections[before:]:
                    if self.said.client.raw:
                        return
                time.sleep(POLL_S)
        pytest.fail("JeroMQ sent nothing on any of its connections")

    def ask_all(self, requests):
        """Send all (message, payload or None), then receive as many replies."""
        messages = [
            [api.encode(message).hex(), *([] if payload is None else [payload.hex()])]
            for message, payload in requests
        ]
        answers = self._peer.call("ask", socket=self._socket, messages=messages)
        assert len(answers) == len(messages), (
            f"{len(answers)} replies to {len(messages)} requests; JeroMQ's last bytes"
            f" {self.said.client.raw[-200:]!r}, the node's {self.said.node.raw[-200:]!r}"
        )
        return [
            (api.decode_reply(bytes.fromhex(header)), *map(bytes.fromhex, payload))
            for header, *payload in answers
        ]

    def ask(self, message, payload=None):
        [(reply, *rest)] = self.ask_all([(message, payload)])
        assert reply.rid == message.rid
        return (reply, *rest) if rest else reply


@pytest.fixture
def relays(pair):
    """A relay to each node, by its number."""
    with contextlib.ExitStack() as stack:
        yield {node.number: stack.enter_context(Relay(node.api)) for node in pair}


@pytest.fixture
def pair(make_group):
    """A running pair; after the test both nodes must still run and serve other clients."""
    group = make_group(store={"commitlog_file_size": "8MiB"}).start()
    pids = [node.pid for node in group]
    yield group
    with Producer(group.bootstrap) as producer:
        assert producer.send_sync("T", b"after").level == "SYNC_MEM(1)"
    assert all(node.running for node in group) and [node.pid for node in group] == pids
    for node in group:
        # JeroMQ's silent connections end in this way.
        log = node.log.replace("ended: the handshake was not finished", "")
        assert "Traceback" not in log and "ended:" not in log, node.last_lines(20)


# May take long because JeroMQ leaves some connections silent; these are replaced.
def test_the_map_a_put_and_a_pull(pair, relays, jeromq):
    dealer = Dealer(jeromq, relays[1])
    found = dealer.ask(api.AskMap(1)).map
    assert (found.node, found.writable) == (1, True)
    assert found.nodes == {node.number: node.api for node in pair}
    large = random.Random(1).randbytes(LARGE_BYTES)
    bodies = [b"small", b"", large]
    done = dealer.ask(api.Put(2, -1), b"".join(record(body) for body in bodies))
    assert (done.status, done.level, done.statuses) == (api.Status.PUT_OK, "SYNC_MEM(1)", None)
    assert done.queue_offsets == [0, 1, 2]
    payload, rid = b"", 3
    position = api.Position(0)
    while position.queue_offset < len(bodies):  # replay may dispatch them one by one
        pull = api.Pull(rid, "T", 0, position, 10, 2 * LARGE_BYTES, 10_000)
        pulled, records = dealer.ask(pull)
        assert pulled.status is api.PullStatus.FOUND
        position = api.Position(pulled.next_queue_offset, done.epoch, pulled.last_offset)
        payload, rid = payload + records, rid + 1
    at = 0
    for body, offset in zip(bodies, done.offsets, strict=True):
        one = decode_record(payload, at)
        assert (one.body, one.physical_offset) == (body, offset)
        at += one.size
    assert at == len(payload)
    assert dealer.ask(api.AskMap(rid)).rid == rid


def test_a_thousand_requests_under_way(pair, relays, jeromq):
    count = 1_000
    requests = [
        (api.AskMap(rid), None) if rid % 2
        else (api.Put(rid, -1, run=1, at=rid // 2), record(b"%d" % rid))
        for rid in range(count)
    ]  # fmt: skip
    answers = Dealer(jeromq, relays[1]).ask_all(requests)
    replies = {reply.rid: reply for reply, *_ in answers}
    assert sorted(replies) == list(range(count))
    puts = [replies[rid] for rid in range(0, count, 2)]
    assert {put.status for put in puts} == {api.Status.PUT_OK}
    assert [put.queue_offsets for put in puts] == [[place] for place in range(count // 2)]


def test_heartbeats_keep_a_connection(pair, relays, jeromq):
    """JeroMQ greets as ZMTP 3.0, but sends the PINGs of 3.1: the node answers them."""
    dealer = Dealer(jeromq, relays[1], heartbeat_ms=HEARTBEAT_MS)
    assert dealer.ask(api.AskMap(1)).rid == 1
    connections = relays[1].connections

    def kept():
        """Return the connection that has enough PONGs; JeroMQ may have opened others before it."""
        return next((s for s in connections if len(s.node.commands("PONG")) >= HEARTBEATS), None)

    said = wait_until(kept, TIMEOUT_MS / 1000, lambda: f"{connections}")
    count = len(connections)
    assert dealer.ask(api.AskMap(2)).rid == 2
    assert len(connections) == count and not (said.client.ended or said.node.ended)
    jeromq.call("close", context="first")


def test_a_second_context(pair, relays, jeromq):
    """A second context works beside the first, and after the first is closed."""
    first = Dealer(jeromq, relays[1])
    second = Dealer(jeromq, relays[1], context="second", socket="second")
    slave = Dealer(jeromq, relays[2], context="second", socket="slave")
    assert first.ask(api.Put(1, -1), record(b"one")).queue_offsets == [0]
    two = second.ask(api.Put(1, -1), record(b"two"))
    assert two.queue_offsets == [1]
    jeromq.call("close", context="first")
    assert second.ask(api.Put(2, -1), record(b"three")).queue_offsets == [2]
    found = slave.ask(api.AskMap(3)).map
    assert (found.node, found.writable, found.master_api) == (2, False, pair[1].api)
    # The position has an epoch, so a slave that does not have that record yet waits for it.
    behind_two = api.Position(2, two.epoch, two.offsets[-1])
    pulled, payload = slave.ask(api.Pull(4, "T", 0, behind_two, wait_ms=api.MAX_WAIT_MS))
    assert pulled.count == 1 and decode_record(payload).body == b"three"
    jeromq.call("close", context="second")
