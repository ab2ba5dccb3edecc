"""Hostile bytes on every port of a node: it survives, uses little memory, and keeps working."""

import contextlib
import json
import os
import pickle
import random
import socket
import struct
import threading
import time

import pytest
import zmq

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from hastore.clock import SYSTEM_CLOCK
from hastore.ha.hello.peer import call
from hastore.protocol import api
from hastore.protocol.ha_link import REPORT
from hastore.protocol.hello import CALL_MAGIC, Hello, Purpose, StreamFrom, WireEpoch
from hastore.record.codec import Host, build_record
from tests.process.harness import Group, wait_until
from tests.process.stores import read_log

GROWTH_BYTES_MAX = 64 * 1024 * 1024
LENGTHS = (-1, -(2**31), 0, 1, 64 * 1024, 64 * 1024 + 1, 4 * 1024 * 1024 + 1, 2**31 - 1)
HOST = Host(b"\x7f\0\0\1", 0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A pair for cases that do not look at the whole log; they leave it in sync."""
    with Group(tmp_path_factory.mktemp("untrusted")) as group:
        yield group.start()


def exchange(address, data, *, hold_s=0.3):
    """Send bytes; return the answer until the peer closes or is silent for `hold_s`."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    received = b""
    with socket.create_connection((host, int(port)), timeout=60) as sock:
        with contextlib.suppress(OSError):
            for at in range(0, len(data), 65536):
                sock.sendall(data[at : at + 65536])
        sock.settimeout(hold_s)
        with contextlib.suppress(OSError):
            while piece := sock.recv(65536):
                received += piece
    return received


@contextlib.contextmanager
def unharmed(group):
    """Check after the block that both nodes run, have not grown, and still confirm puts."""
    # Warm up first, so that the memory of first uses does not count.
    with Producer(group.bootstrap) as producer:
        producer.send_sync("W", b"warm")
    group.wait_equal()
    before = {node.number: node.resident_bytes() for node in group}
    peak = dict(before)
    stop = threading.Event()

    def watch():
        while not stop.wait(0.05):
            for node in group:
                peak[node.number] = max(peak[node.number], node.resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    with Producer(group.bootstrap, delivery_timeout_s=60) as producer:
        assert producer.send_sync("W", b"after").level == "SYNC_MEM(1)"
    group.wait_equal()
    for node in group:
        assert peak[node.number] - before[node.number] < GROWTH_BYTES_MAX
        assert "died" not in node.log and "Traceback" not in node.log, node.last_lines(30)


def on_all(work, count=8):
    """Run `work(number)` in some threads."""
    threads = [threading.Thread(target=work, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_random_bytes_on_every_port(shared):
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")

    def work(number):
        rng = random.Random(seed + number)
        for node in shared:
            for address in (node.ha, node.api, node.http):
                for size in (1, 8, 64, 1000, 300_000):
                    exchange(address, rng.randbytes(size), hold_s=0.05)

    with unharmed(shared):
        on_all(work, 4)


def test_lengths_on_the_ha_port(pair):
    own_magic = CALL_MAGIC
    with unharmed(pair):
        for node in pair:
            for length in LENGTHS:
                field = struct.pack(">i", length)
                for junk in (b"", b"\x81" * 1000, b"\xdc\xff\xff" * 40_000):
                    exchange(node.ha, own_magic + field + junk, hold_s=0.02)
                exchange(node.ha, field * 2, hold_s=0.02)
            for report in (0, -1, 2**63 - 1, -(2**63), 12345):
                answer = exchange(node.ha, REPORT.pack(report), hold_s=0.1)
                assert b"warm" not in answer, "an unknown peer got the log"
    for node in pair:
        assert len(read_log(node.store).records) == 2


def hello_of_node_2(pair, **changes):
    """Return the HELLO of node 2, which is not running."""
    state = json.loads((pair[2].store / "hastore" / "node.json").read_text())
    end = pair[1].status()["max_offset"]
    fields = {
        "purpose": Purpose.FOLLOW,
        "cluster": "test",
        "group": "g0",
        "node": 2,
        "store_id": state["store_id"],
        "role": "SLAVE",
        "open_epoch": 0,
        "promised_epoch": state["promised_epoch"],
        "history": tuple(_entry(entry) for entry in state["history"]),
        "min_offset": 0,
        "max_offset": end,
        "confirmed_offset": 0,
        "ack_point": "written",
        "unclean": False,
        "largest_frame": 2**20,
        "file_size": 65536,
        "nonce": os.urandom(32),
    }
    return Hello(**{**fields, **changes})


def _entry(entry):
    values = list(entry.values()) if isinstance(entry, dict) else list(entry)
    return WireEpoch(values[0], values[1], values[2], tuple(values[3]))


@pytest.mark.parametrize("kind", ["beyond", "huge", "negative", "backwards"])
def test_a_false_report_closes_the_link_and_releases_nobody(shared, kind):
    with Producer(shared.bootstrap) as producer:
        producer.send_sync("T", b"before" * 100)
        end = shared.wait_equal()
        shared[2].kill()
        said = len(shared[1].log)
        wait_until(lambda: not shared[1].status()["slaves"], 60, "the slave is still linked")
        link = call(shared[1].ha, hello_of_node_2(shared), None, SYSTEM_CLOCK, 5000)
        try:
            assert link.answer == StreamFrom(end)
            link.sock.sendall(REPORT.pack(end))
            shared[1].wait_in_sync(2)
            waiting = producer.send("T", b"must not be released by a lie")
            time.sleep(0.2)
            assert not waiting.done()
            lie = {"beyond": end + 2**20, "huge": 2**60, "negative": -5, "backwards": end - 1}
            link.sock.sendall(REPORT.pack(lie[kind]))
            link.sock.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while link.sock.recv(65536):
                    continue
        finally:
            link.close()
        time.sleep(0.3)
        assert not waiting.done()
        assert shared[1].status()["confirmed_offset"] == end
        shared[1].wait_log("report", since=said)
        shared[2].start("slave")
        assert waiting.result(60).level == "SYNC_MEM(1)"


class Peer:
    """A client that sends arbitrary bytes to the API port."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.connect(address)

    def __enter__(self):
        return self

    def __exit__(self, *_exc):
        self.context.destroy(linger=0)

    def put(self, payload, rid=1):
        self.socket.send_multipart([api.encode(api.Put(rid, 1)), payload])
        return api.decode_reply(self.socket.recv_multipart()[0])


def test_lengths_and_garbage_on_the_api_port(shared):
    good = api.encode(api.Put(1, 1))
    frames = [
        [b""],
        [b"", b""],
        [b"\xc1"],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 60_000],
        [good],
        [good, b""],
        [good, b"", b""],
        [good] * 50,
        [good[:-1], b"x"],
        [b"\x00" * (64 * 1024 + 1)],
        [pickle.dumps({"put": 1})],
        [good, bytes(91)],
        [good, b"\x7f\xff\xff\xff" + bytes(1000)],
        [good, b"\xff\xff\xff\xff" + bytes(1000)],
    ]
    with unharmed(shared):
        for node in shared:
            for message in frames:
                with Peer(node.api) as peer:
                    peer.socket.send_multipart(message)
                    peer.socket.setsockopt(zmq.RCVTIMEO, 50)
                    with contextlib.suppress(zmq.Again):
                        peer.socket.recv_multipart()
            greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
            ready = b"\x04\x29\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\0\0\0\0"
            for length in (2**63 - 1, 2**64 - 1, 2**31, 4 * 2**20 + 200_000):
                huge = b"\x02" + struct.pack(">Q", length)
                exchange(node.api, greeting + ready + huge + bytes(100_000), hold_s=0.05)

        def flood(_number):
            """Send messages of the largest size, and do not read the answers."""
            with Peer(shared[1].api) as peer:
                peer.socket.setsockopt(zmq.SNDTIMEO, 200)
                with contextlib.suppress(zmq.Again):
                    for _ in range(8):
                        peer.socket.send_multipart([good, bytes(4 * 1024 * 1024)])
                time.sleep(0.5)

        on_all(flood, 2)


def statuses_of(reply):
    """Return the status of each record of a put."""
    return [s.value for s in reply.statuses] if reply.statuses else [reply.status.value]


BAD_TOPICS = {
    "slash": b"a/b/c/d/",
    "climb": b"../../..",
    "root": b"/tmp/xyz",
    "dots": b"........",
    "nul": b"abc\0defg",
    "newline": b"abc\ndefg",
    "no UTF-8": b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe",
}


def test_invalid_topics_and_bodies_are_refused(pair):
    """The client refuses them; the node refuses them too if a client sends them anyway."""
    before = sorted(str(path) for path in pair.folder.rglob("*") if path.is_dir())
    with unharmed(pair), Producer(pair.bootstrap, delivery_timeout_s=60) as producer:
        for name in ("", "a/b", "..", "../x", "a\0b", "x" * 128, "ü", "a b", "x" * 40_000):
            with pytest.raises(Exception, match="topic") as caught:
                producer.send_sync(name, b"x")
            assert type(caught.value).__name__ == "MessageIllegalError"
        with pytest.raises(Exception, match="4194304") as caught:
            producer.send_sync("T", bytes(4 * 1024 * 1024 + 1))
        assert type(caught.value).__name__ == "MessageIllegalError"
        good = build_record("abcdefgh", b"x", queue_id=0, born_timestamp_ms=1, born_host=HOST)
        with Peer(pair[1].api) as peer:
            for what, topic in BAD_TOPICS.items():
                statuses = statuses_of(peer.put(good.replace(b"abcdefgh", topic)))
                assert statuses == ["MESSAGE_ILLEGAL"], what
            reply = peer.put(good.replace(b"\x08abcdefgh", b"\0abcdefgh"))
            assert statuses_of(reply) == ["MESSAGE_ILLEGAL"]
            # One bad record among good ones: the good ones are stored, each has its own status.
            reply = peer.put(good + good.replace(b"abcdefgh", b"../../..") + good)
            assert statuses_of(reply) == ["PUT_OK", "MESSAGE_ILLEGAL", "PUT_OK"]
            for queue in (-1, 4, 2**31 - 1):
                bad = good[:12] + struct.pack(">i", queue) + good[16:]
                assert statuses_of(peer.put(bad)) == ["MESSAGE_ILLEGAL"]
    log = read_log(pair[1].store)
    assert {found.topic for found in log.records} == {"W", "abcdefgh"}
    new = {str(path) for path in pair.folder.rglob("*") if path.is_dir()} - set(before)
    for path in new:
        names = {"consumequeue", "index", "commitlog", "hastore", "W", "abcdefgh"}
        last = path.rpartition("/")[2]
        assert last in names or last.isdigit(), path


def test_a_small_body_limit_is_the_nodes_own(make_group):
    group = make_group(store={"max_message_size": "1KiB"}).start()
    with Producer(group.bootstrap, delivery_timeout_s=60) as producer:
        assert producer.send_sync("T", bytes(1024)).offset == 0
        with pytest.raises(Exception, match="max_message_size") as caught:
            producer.send_sync("T", bytes(1025))
        assert type(caught.value).__name__ == "MessageIllegalError"
        assert producer.send_sync("T", b"still works").level == "SYNC_MEM(1)"


class Bomb:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_pickle_stays_bytes(shared):
    marker = shared.folder / "exploded"
    bombs = [pickle.dumps(Bomb(f"touch {marker}"), protocol) for protocol in range(5)]
    with Producer(shared.bootstrap) as producer:
        for bomb in bombs:
            text = bomb.decode("latin-1").encode("ascii", "replace").decode().replace("\x02", "?")
            properties = {"bomb": text.replace("\x01", "?")}
            producer.send_sync("B", bomb, key="bomb", properties=properties, queue=0)
    with Peer(shared[1].api) as peer:
        peer.socket.send_multipart([bombs[-1], bombs[-1]])
    for address in (shared[1].ha, shared[1].http):
        exchange(address, bombs[-1], hold_s=0.1)
    for node in shared:
        with Consumer("B", [node.api], queues=[0]) as consumer:
            got = []
            while len(got) < len(bombs):
                messages = consumer.poll(timeout_s=60)
                assert messages
                got += messages
        assert [message.body for message in got] == bombs
    assert not marker.exists()
