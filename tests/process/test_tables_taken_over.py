"""A node that begins with a broker's log and files: its groups go on where they were."""

import pytest

from hastore.client.consumer.admin import Admin
from hastore.client.consumer.positions_client import Positions
from hastore.client.producer.producer import Producer
from hastore.errors import ClientError
from tests.process.harness import Group, wait_until


@pytest.fixture
def taken(tmp_path):
    """A node that has not started yet, with the log of another one as a broker's."""
    (tmp_path / "before").mkdir()
    with Group(tmp_path / "before", 1, master_role="ASYNC_MASTER") as before:
        before.start()
        with Producer(before.bootstrap) as producer:
            for number in range(20):
                producer.send_sync("Orders", b"%d" % number, queue=number % 2)
        assert before[1].stop() == 0
        log = (before[1].store / "commitlog").rename(tmp_path / "log")
    (tmp_path / "after").mkdir()
    with Group(tmp_path / "after", 1, master_role="ASYNC_MASTER") as after:
        (after[1].store / "config").mkdir(parents=True)
        log.rename(after[1].store / "commitlog")
        (after[1].store / "abort").touch()
        yield after


def write(node, name, text):
    (node.store / "config" / name).write_text(text)


def committed(group, name="readers", topic="Orders", timeout_s=60.0):
    with Positions(group.bootstrap, timeout_s=timeout_s) as positions:
        found = positions.committed(name, topic)
    return {queue: place.queue_offset for queue, place in sorted(found.items())}


def test_its_files_are_taken_over_once(taken):
    node = taken[1]
    write(node, "consumerOffset.json", '{"offsetTable":{"Orders@readers":{0:4,1:99}}}')
    write(node, "topics.json", '{"topicConfigTable":{"Orders":{"readQueueNums":7,"perm":6}}}')
    node.start("master").wait_writable()
    assert committed(taken) == {0: 4, 1: 10}
    with Admin(taken.bootstrap) as admin:
        assert admin.topic_configs()["Orders"].read_queues == 7
    with Positions(taken.bootstrap) as positions:
        positions.commit("readers", "Orders", {0: 9})
        wanted = {("readers", "Orders"): {0: 9, 1: 10}}  # without the mark
        wait_until(lambda: positions.all() == wanted, 60, lambda: str(positions.all()))
        with pytest.raises(ClientError, match="the node's own"):
            positions.commit("HASTORE_TAKEN_OVER", "Orders", {0: 9})
    assert node.stop() == 0
    node.start("master").wait_writable()
    assert committed(taken) == {0: 9, 1: 10}
    assert not node.status()["problems"]


def test_a_damaged_file_stops_positions_and_nothing_else(taken):
    node = taken[1]
    write(node, "consumerOffset.json", '{"offsetTable":{"Orders@readers":{0:')
    node.start("master").wait_writable()
    with Producer(taken.bootstrap) as producer:
        producer.send_sync("Orders", b"goes on", queue=0)
    with pytest.raises(ClientError):
        committed(taken, timeout_s=1.0)
    node.wait_status(lambda s: "consumerOffset.json" in str(s["problems"]), "it is said")
    write(node, "consumerOffset.json", '{"offsetTable":{"Orders@readers":{0:4}}}')
    assert committed(taken) == {0: 4}
    assert not node.status()["problems"]
