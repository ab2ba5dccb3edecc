"""RocketMQ with `enableDLegerCommitLog` on logs with entries that are no messages.

RocketMQ 5.3.3 builds its consume queues from the log. At an entry whose body is no record it gives
up all that it can read from there: the messages behind it are in no queue, and their queue offsets
are given away again. It steps over the record of a rolled back transaction.
"""

import pathlib

import pytest

from hastore.record.codec import Host, patch_for_store
from hastore.record.queue_ends import build_queue_ends
from tests.interop.compare import rocketmq_sizes
from tests.interop.dledger_files import DATA_BYTES, HEAD, ROCKETMQ_INDEX_BYTES, write_ledger
from tests.interop.dledger_records import ROLLED_BACK, record
from tests.process.harness import wait_until

pytestmark = pytest.mark.full
OWN_TOPIC = "HASTORE_DLEDGER"


def ends_of_queues(pos):
    """Return a statement of the ends of quiet queues for an entry at `pos`."""
    queues = [("T", 0, 1000), *((f"topic{number}", 7, 5) for number in range(600))]
    raw = bytearray(build_queue_ends(queues, since=0, ident=1, now_ms=1_700_000_000_000)[0])
    patch_for_store(
        raw, 0,
        queue_offset=0, physical_offset=pos + HEAD.size, store_timestamp_ms=1_700_000_000_000,
        store_host=Host.parse("127.0.0.1:10911"),
    )  # fmt: skip
    return bytes(raw)


def open_ledger(peer, ports, root, **more):
    """Open a store of RocketMQ on DLedger, a group of one; queues that lack messages are built."""
    settings = {
        **rocketmq_sizes(root, DATA_BYTES),
        "enableDLegerCommitLog": True,
        "dLegerGroup": "g0",
        "dLegerSelfId": "n0",
        "dLegerPeers": f"n0-127.0.0.1:{ports.take()}",
        "recheckReputOffsetFromCq": True,
        **more,
    }
    return peer.call("store.open", store=settings)


def put(peer, topic="T"):
    """Put a message as soon as the store leads; return the queue offset that it got."""
    message = {"topic": topic, "queue": 0, "size": 10, "seed": 1}

    def done():
        status, _, _, queue_offset = peer.call("store.put", messages=[message])[0]
        return (queue_offset,) if status == "PUT_OK" else None

    (queue_offset,) = wait_until(done, 60, "RocketMQ's store does not lead")
    return queue_offset


def queue_offsets(peer, file: pathlib.Path):
    """Return the queue offsets of all messages that a consumer can pull, after the replay."""
    wait_until(lambda: peer.call("store.status")["dispatched"], 60, "queues are built")
    count = peer.call("store.dump", file=str(file))
    found = [line.split("\t") for line in file.read_text().splitlines()]
    assert len(found) == count
    return [(topic, int(number)) for topic, _, number, *_ in found]


def ledger_with(root, own):
    """Write four messages, and what `own` makes of a place, before, between and behind them."""
    bodies, pos = [], 0
    for number in (None, 0, 1, None, 2, 3, None):
        body = own(pos) if number is None else record(pos, number)
        bodies.append((1, body))
        pos += HEAD.size + len(body)
    write_ledger(root / "dledger-n0", bodies, index_bytes=ROCKETMQ_INDEX_BYTES)


@pytest.fixture
def readable(make_peer, ports, tmp_path):
    """Return a function: what RocketMQ reads of a log with such entries, and a put's place."""
    peer = make_peer()

    def read(name, own):
        root = tmp_path / name
        ledger_with(root, own)
        open_ledger(peer, ports, root)
        before = queue_offsets(peer, tmp_path / "lines")
        return before, put(peer)

    return read


@pytest.mark.slow("a JVM starts, and opens five logs one after the other")
def test_entries_that_are_no_messages(readable):
    nothing = ([], 0)
    assert readable("empty", lambda _: b"") == nothing, "all four messages are hidden"
    assert readable("list", lambda _: b"\x93\x01\x02\x03") == nothing
    assert readable("long", lambda _: bytes(200)) == nothing
    whole = ([("T", number) for number in range(4)], 4)
    assert whole == readable(
        "rolled-back",
        lambda pos: record(pos, 0, b"\x93\x01\x02\x03", topic=OWN_TOPIC, sys_flag=ROLLED_BACK),
    )
    assert whole == readable("queues", ends_of_queues)
