"""Filtered readers and compressed bodies through kills of the master, in both modes."""

import random
import threading
import time

import pytest

from hastore.client.consumer.consumer import Consumer
from hastore.client.producer.producer import Producer
from tests.process.dledger_group import DLedgerGroup

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow("its nodes are killed, and its readers wait for the next master"),
]
TOPIC, LIMIT_S = "chosen", 180
COUNT = 1_500


class Reader(threading.Thread):
    """Read with a filter until `ends` is set to the ends of the queues and they are reached."""

    def __init__(self, bootstrap, name="all", **chosen):
        super().__init__(name=name, daemon=True)
        self.bootstrap, self.chosen = bootstrap, chosen
        self.found = []
        self.ends = None

    def run(self):
        options = {"group": self.name, "on_lost": "common", **self.chosen}
        with Consumer(TOPIC, self.bootstrap, **options) as consumer:
            until = time.monotonic() + LIMIT_S
            while time.monotonic() < until:
                for one in consumer.poll(timeout_s=0.2):
                    self.found.append((one.queue_id, one.queue_offset, one.body))
                places = consumer.positions()
                if self.ends is not None and all(
                    places[queue].queue_offset >= end for queue, end in self.ends.items()
                ):
                    consumer.commit()
                    kept = consumer.committed()
                    assert all(kept[q].queue_offset == places[q].queue_offset for q in self.ends)
                    return
        raise AssertionError(f"{self.chosen} did not come to the end: {self.ends}")


def kill_classic(group, old, new):
    group[old].kill()
    group[new].edit_role("SYNC_MASTER")
    group[new].wait_writable()
    group[old].edit_role("SLAVE")
    group[old].start("slave")
    group[new].wait_in_sync(old)


@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_filtered_readers_get_each_match_once_through_kills(request, mode, tmp_path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    if mode == "classic":
        group = request.getfixturevalue("pair")
    else:
        group = DLedgerGroup(tmp_path).start()
        request.addfinalizer(group.close)
    readers = [
        Reader(group.bootstrap),
        Reader(group.bootstrap, "tags", tags="red || blue"),
        Reader(group.bootstrap, "sql", sql="price BETWEEN 100 AND 199 OR TAGS = 'blue'"),
    ]
    sent = {}
    with Producer(
        group.bootstrap, compression="zstd", compression_threshold=100, delivery_timeout_s=LIMIT_S
    ) as producer:
        for reader in readers:
            reader.start()
        futures = []
        for number in range(COUNT):
            tag = chance.choices((None, "red", "green", "blue"), (6, 1, 8, 1))[0]
            price = chance.randrange(1_000)
            body = b"%d " % number * chance.choice((1, 100))
            sent[body] = (tag, price)
            futures.append(producer.send(TOPIC, body, tags=tag, properties={"price": str(price)}))
            if number == COUNT // 3:
                futures[-1].result(LIMIT_S)
                if mode == "classic":
                    kill_classic(group, 1, 2)
                else:
                    leader = group.wait_leader()
                    leader.kill()
                    leader.start(wait=False)
            time.sleep(0.002)
        results = [future.result(LIMIT_S) for future in futures]
    ends = {}
    for result in results:
        ends[result.queue_id] = max(ends.get(result.queue_id, 0), result.queue_offset + 1)
    for reader in readers:
        reader.ends = ends
    for reader in readers:
        reader.join(LIMIT_S)
        assert not reader.is_alive()
    everything, by_tags, by_sql = ({one[2]: one for one in each.found} for each in readers)
    assert everything.keys() == sent.keys()
    assert [len(each.found) for each in readers] == [len(everything), len(by_tags), len(by_sql)]
    assert by_tags == {
        body: one for body, one in everything.items() if sent[body][0] in ("red", "blue")
    }
    assert by_sql == {
        body: one
        for body, one in everything.items()
        if 100 <= sent[body][1] <= 199 or sent[body][0] == "blue"
    }
