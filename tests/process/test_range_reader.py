"""A range is read in bulk from real nodes that die or stall in mid-range."""

import struct

import pytest

from hastore.client.consumer import range_reader
from hastore.client.consumer.range_reader import RangeReader
from hastore.client.messages import decode_messages
from hastore.client.producer.producer import Producer
from hastore.errors import UnreachableError
from tests.process.harness import Group

COUNT = 4_000


@pytest.fixture
def group(tmp_path):
    with Group(tmp_path, 3) as group:
        group.start()
        with Producer(group.bootstrap) as producer:
            for number in range(COUNT):
                producer.send("T", b"%d" % number, queue=number % 2)
            producer.flush()
        group.wait_equal()
        yield group


@pytest.fixture(autouse=True)
def many_pulls(monkeypatch):
    monkeypatch.setattr(range_reader, "PULL_BYTES", 10_000)


def read(group, queue, hit):
    """Read a queue; call `hit(number of the node that is read, how many it was)` at times."""
    numbers = {node.api: node.number for node in group}
    reader = RangeReader(tuple(group.bootstrap), "T", queue, 0, COUNT // 2)
    found, hits = [], 0
    for count, chunk in enumerate(reader.chunks()):
        messages, damage = decode_messages(bytes(chunk.payload), [])
        assert damage is None
        assert struct.unpack(f">{len(messages)}i", chunk.sizes)
        found += [int(message.body) for message in messages]
        if count % 5 == 4 and hits < 2:
            hits += 1
            hit(numbers[reader.source], hits)
    assert hits == 2
    return found


def test_replicas_that_are_killed_one_after_the_other(group):
    """First both slaves, then the master is read alone."""
    killed = []

    def kill(number, hits):
        group[number].kill()
        killed.append(number)

    assert read(group, 0, kill) == list(range(0, COUNT, 2))
    assert sorted(killed) == [2, 3]
    group[1].kill()
    reader = RangeReader(tuple(group.bootstrap), "T", 0, 0, COUNT // 2, give_up_s=1.0)
    with pytest.raises(UnreachableError, match=f"no node of {group[1].api}, {group[2].api}"):
        list(reader.chunks())


@pytest.mark.full
def test_replicas_that_stall_are_left(group, monkeypatch):
    """They would be left after GIVE_UP_S too, which is out of reach here."""
    monkeypatch.setattr(range_reader, "GIVE_UP_S", 1e6)
    stopped = []

    def pause(number, hits):
        group[number].pause()
        stopped.append(number)

    assert read(group, 1, pause) == list(range(1, COUNT, 2))
    assert sorted(stopped) == [2, 3]
