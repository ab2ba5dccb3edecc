"""Clients with a real libzmq: a DEALER is served; other sockets are refused and do no harm."""

import contextlib

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from hastore.client.producer.producer import Producer
from hastore.protocol import api
from hastore.record.codec import NO_HOST, build_record, decode_record
from tests.process.harness import Group, wait_until
from tests.process.relay import Relay
from tests.process.wire import COMMAND, Wire, command, frame, greeting, ready

WAIT_S = 60.0
HEARTBEAT_MS = 100
HEARTBEATS = 12
ENDS = (
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A pair that all cases of this module leave as it was."""
    with Group(tmp_path_factory.mktemp("zeromq")) as group:
        yield group.start()


def record(body, queue=0, topic="T"):
    return build_record(topic, body, queue_id=queue, born_timestamp_ms=1, born_host=NO_HOST)


class Client:
    """A socket with a context of its own, and the events of its monitor."""

    def __init__(self, address, kind=zmq.DEALER, **options):
        self.context = zmq.Context()
        self.socket = self.context.socket(kind)
        self.socket.linger = 0
        for name, value in options.items():
            self.socket.set(getattr(zmq, name), value)
        self.events = []
        self._monitor = self.socket.get_monitor_socket()
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.close()

    def close(self):
        self.socket.disable_monitor()
        self._monitor.close()
        self.context.destroy(linger=0)

    def listen(self):
        """Collect the monitor's new events; return all of them."""
        while self._monitor.poll(0):
            self.events.append(recv_monitor_message(self._monitor)["event"])
        return self.events

    def wait_event(self, *wanted):
        """Wait for the next event of these kinds; remove it and all earlier events."""

        def look():
            found = [place for place, event in enumerate(self.listen()) if event in wanted]
            return found[0] + 1 if found else 0

        taken = wait_until(look, WAIT_S, lambda: f"none of {wanted}, but {self.events}")
        self.events = self.events[taken:]

    def send(self, message, payload=None):
        frames = [api.encode(message)] + ([] if payload is None else [payload])
        self.socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self):
        assert self.socket.poll(WAIT_S * 1000), f"no reply; {self.listen()}"
        header, *payload = self.socket.recv_multipart()
        return api.decode_reply(header), *payload

    def ask(self, message, payload=None):
        """Return the reply, and its payload if there is one."""
        self.send(message, payload)
        reply, *rest = self.receive()
        assert reply.rid == message.rid
        return (reply, *rest) if rest else reply


@contextlib.contextmanager
def unharmed(group):
    """Check that the nodes run, another client's connection stays open, and puts still work."""
    with Client(group[1].api) as other:
        other.ask(api.AskMap(1))
        before = {node.number: node.pid for node in group}
        yield
        assert other.ask(api.AskMap(2)).map.writable
        assert other.ask(api.Put(3, -1), record(b"still served")).level == "SYNC_MEM(1)"
        assert not set(ENDS) & set(other.listen())
    with Producer(group.bootstrap, delivery_timeout_s=WAIT_S) as producer:
        assert producer.send_sync("T", b"after").level == "SYNC_MEM(1)"
    for node in group:
        assert node.running and node.pid == before[node.number]
        assert "died" not in node.log and "Traceback" not in node.log, node.last_lines(30)


# -- accepted clients


def test_a_dealer_keeps_its_connection_by_heartbeats(pair):
    """A PING every 100 ms is answered; the client never reconnects."""
    options = {
        "HEARTBEAT_IVL": HEARTBEAT_MS,
        "HEARTBEAT_TIMEOUT": 10_000,  # long enough for a busy machine
        "HEARTBEAT_TTL": 10_000,
    }
    with unharmed(pair), Relay(pair[1].api) as relay, Client(relay.address, **options) as client:
        client.wait_event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert client.ask(api.AskMap(1)).map.node == 1
        node = relay.connections[0].node
        wait_until(
            lambda: len(node.commands("PONG")) >= HEARTBEATS,
            WAIT_S,
            lambda: f"{len(node.commands('PONG'))} PONGs; {client.listen()}",
        )
        pings = relay.connections[0].client.commands("PING")
        assert {ping[:2] for ping in pings} == {(100).to_bytes(2)}  # tenths of a second
        assert client.ask(api.AskMap(2)).map.node == 1
        assert not set(ENDS) & set(client.listen())
        assert len(relay.connections) == 1


@pytest.mark.full
def test_heartbeats_beside_the_largest_messages(make_group):
    """Heartbeats continue while the largest records are put and pulled, one after the other."""
    pair = make_group(store={"commitlog_file_size": "16MiB"}).start()
    body = bytes(range(256)) * (api.MAX_MESSAGE_BYTES // 256)
    count = 6
    with (
        unharmed(pair),
        Relay(pair[1].api) as relay,
        Client(relay.address, HEARTBEAT_IVL=1, HEARTBEAT_TIMEOUT=10_000) as client,
    ):
        for rid in range(count):
            client.send(api.Put(rid, -1, timeout_ms=api.MAX_WAIT_MS), record(body))
        replies = [client.receive()[0] for _ in range(count)]
        assert {reply.status for reply in replies} == {api.Status.PUT_OK}
        for rid, reply in enumerate(replies, count):
            pull = api.Pull(rid, "T", 0, api.Position(reply.queue_offsets[0]), 1, wait_ms=10_000)
            found, payload = client.ask(pull)
            assert found.count == 1 and decode_record(payload).body == body
        [said] = relay.connections
        assert said.client.commands("PING") and said.node.commands("PONG")


def test_requests_do_not_wait_for_a_connection(make_group):
    """With ZMQ_IMMEDIATE libzmq refuses requests while the node is down, and sends them after."""
    pair = make_group().start()
    with Client(pair[2].api, IMMEDIATE=1, RECONNECT_IVL=20) as client:
        client.wait_event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert client.ask(api.AskMap(1)).map.node == 2
        pair[2].kill()
        client.wait_event(zmq.EVENT_DISCONNECTED)

        def refused():
            try:
                client.send(api.AskMap(2))
            except zmq.Again:
                return True
            return False

        wait_until(refused, WAIT_S, "a request still waits for a connection")
        pair[2].start("slave")
        client.wait_event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert client.ask(api.AskMap(3)).map.node == 2
        assert pair[1].running


def test_a_thousand_requests_under_way(pair):
    count = 1_000
    with Client(pair[1].api) as client:
        for rid in range(count):
            if rid % 2:
                client.send(api.AskMap(rid))
            else:
                client.send(api.Put(rid, -1, run=1, at=rid // 2), record(b"%d" % rid, topic="many"))
        replies = {reply.rid: reply for reply, *_ in (client.receive() for _ in range(count))}
    assert sorted(replies) == list(range(count))
    puts = [replies[rid] for rid in range(0, count, 2)]
    assert {put.status for put in puts} == {api.Status.PUT_OK}
    assert [put.queue_offsets for put in puts] == [[place] for place in range(count // 2)]


def test_many_sockets_of_one_context_and_one_that_names_itself(pair):
    with unharmed(pair), Client(pair[1].api, ROUTING_ID=b"its own name") as client:
        assert client.ask(api.AskMap(1)).rid == 1
        others = [client.context.socket(zmq.DEALER) for _ in range(20)]
        for number, other in enumerate(others):
            other.linger = 0
            other.connect(pair[1 + number % 2].api)
            other.send(api.encode(api.AskMap(number)))
        for number, other in enumerate(others):
            assert other.poll(WAIT_S * 1000)
            reply = api.decode_reply(other.recv())
            assert (reply.rid, reply.map.node) == (number, 1 + number % 2)
        assert client.ask(api.AskMap(2)).rid == 2


# -- refused clients


def plain():
    return {"PLAIN_USERNAME": b"somebody", "PLAIN_PASSWORD": b"secret"}


def curve():
    server, _ = zmq.curve_keypair()
    public, secret = zmq.curve_keypair()
    return {"CURVE_SERVERKEY": server, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret}


@pytest.mark.parametrize("options", [plain, curve])
def test_another_mechanism_is_refused(pair, options):
    with unharmed(pair), Client(pair[1].api, **options()) as client:
        with contextlib.suppress(zmq.Again):  # libzmq has given the connection up already
            client.send(api.AskMap(1))  # waits for a connection that never comes
        client.wait_event(*ENDS)
        assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in client.listen()
        assert not client.socket.poll(0)


@pytest.mark.parametrize("kind", ["SUB", "XSUB", "PUB", "PUSH", "PULL", "PAIR", "REP", "REQ"])
def test_another_socket_than_a_dealer_is_refused(pair, kind):
    with unharmed(pair), Client(pair[1].api, getattr(zmq, kind)) as client:
        if kind == "SUB":
            client.socket.subscribe(b"")
        if kind == "REQ":  # a ROUTER could accept it, but its envelope would not be a valid request
            client.send(api.AskMap(1))
        client.wait_event(*ENDS)
        if kind not in ("PUB", "PUSH"):
            assert not client.socket.poll(0)


REFUSED = {  # name -> (bytes of the client, a word that the node's reason must contain)
    "PLAIN": (greeting(b"PLAIN") + command(b"HELLO", b"\x01u\x01p"), b"PLAIN"),
    "CURVE": (greeting(b"CURVE") + command(b"HELLO", bytes(194)), b"CURVE"),
    "GSSAPI": (greeting(b"GSSAPI"), b"GSSAPI"),
    "no mechanism": (greeting(b""), b"NULL"),
    "NULL and more": (greeting(b"NULLABLE") + ready(), b"NULLABLE"),
    "SUB": (greeting() + ready(b"SUB"), b"SUB"),
    "REQ": (greeting() + ready(b"REQ"), b"DEALER"),
    "ROUTER": (greeting() + ready(b"ROUTER"), b"DEALER"),
    "no socket": (greeting() + ready(b"NOTHING"), b"DEALER"),
    "no socket type": (greeting() + ready(name=b"Socket"), b"DEALER"),
    "a message for READY": (greeting() + frame(api.encode(api.AskMap(1))), b"READY"),
    "PING for READY": (greeting() + command(b"PING", b"\0\0"), b"READY"),
    "an ERROR": (greeting() + command(b"ERROR", b"\x04fail"), b"fail"),
}


def test_a_handshake_that_is_refused_ends_with_a_reason(pair):
    """The node itself refuses, without relying on the checks of a library."""
    with unharmed(pair):
        for name, (said, reason) in REFUSED.items():
            with Wire(pair[1].api) as wire:
                wire.send(said)
                *before, error = wire.until_closed()
                assert all(each.body.startswith(b"\x05READY") for each in before), name
                assert error.flags & COMMAND and error.body.startswith(b"\x05ERROR"), name
                assert error.body[6] == len(error.body) - 7 and reason in error.body, name
