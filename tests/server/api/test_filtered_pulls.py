"""Filters at the node: what a filtered pull and a Consumer give is what a look at all would.

A real store behind a real server; random messages of tags with equal hashes, of properties, holes
between matches longer than one look, and readers that meet new messages while they wait.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hastore.aio
from hastore import Consumer, Position
from hastore.client.messages import Message
from hastore.config.model import ApiConfig
from hastore.errors import PositionLostError, UsageError
from hastore.protocol import api
from hastore.record.hashes import java_hash_code
from hastore.record.message_filter import compile_filter, make_filter
from hastore.server.api import filtered_pulls
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.store.derived import consume_queue
from hastore.store.message_store import MessageStore
from tests.api_fakes import FakeBackend
from tests.record.sql_expressions import Expressions
from tests.server.api.kit import Client, until
from tests.store.kit import inner_batch, message, opened, put

TOPIC = "TopicA"
TWINS = ("Aa", "BB")  # one hash
EPOCH = 65537


class Node:
    """A store and its API; `put` makes its messages readable."""

    def __init__(self, store: MessageStore) -> None:
        setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
        self.store = store
        self.backend = FakeBackend()
        self.backend.store = store  # type: ignore[assignment]
        self.backend.entries = [(EPOCH, 0)]
        self.server = ApiServer(
            "tcp://127.0.0.1:0", self.backend, ApiConfig(), on_failure=raise_failure
        )
        self.server.start()
        self.address = self.server.endpoint
        self.count = 0

    def put(self, *properties: dict[str, str], queue: int = 0, show: bool = True) -> list[int]:
        records = [
            message(self.count + n, queue_id=queue, properties=list(each.items()))
            for n, each in enumerate(properties)
        ]
        self.count += len(records)
        results = put(self.store, *records)
        assert self.store.wait_dispatched(self.store.max_offset, 60)
        if show:
            self.show()
        return [result.offset or 0 for result in results]

    def show(self) -> None:
        end = self.store.max_offset
        self.store.set_limits(confirmed=end, readable=end)
        self.backend.moved()

    def tags(self, *tags: str, **more: Any) -> list[int]:
        return self.put(*({"TAGS": tag} if tag else {} for tag in tags), **more)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with opened(tmp_path) as store:
        store.set_limits(confirmed=0, readable=0)
        node = Node(store)
        yield node
        node.server.stop()
        assert node.server.failure is None


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    found = Client(node.address)
    yield found
    found.close()


def pull(client: Client, at: int | Position, kind: str, text: str, **more: Any) -> Any:
    place = at if isinstance(at, Position) else Position(at)
    client.rid += 1
    wanted = api.Filter(kind, text)
    return client.ask(api.Pull(client.rid, TOPIC, 0, place, filter=wanted, **more))


def everything(node: Node, **more: Any) -> list[Message]:
    """Read all messages that are there now."""
    found: list[Message] = []
    with Consumer(TOPIC, [node.address], **more) as consumer:
        ends = {
            queue: (node.store.queues.queue_range(TOPIC, queue) or (0, 0))[1]
            for queue in consumer.positions()
        }
        until = time.monotonic() + 60
        while any(consumer.position(queue).queue_offset < end for queue, end in ends.items()):
            found += consumer.poll(max_messages=37, timeout_s=0.05)
            assert time.monotonic() < until, (ends, consumer.positions())
    return found


def places(messages: list[Message]) -> list[tuple[int, int]]:
    return sorted((one.queue_id, one.queue_offset) for one in messages)


# ---- differences


@pytest.mark.parametrize("seed", range(4))
def test_by_tags_a_node_gives_what_a_look_at_all_messages_gives(
    node: Node, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.setattr(consume_queue, "TAGGED_UNITS_MAX", chance.choice((1, 7, 50)))
    monkeypatch.setattr(filtered_pulls, "MAX_RECORDS", chance.choice((1, 5, 2_048)))
    kinds = ("", "red", "rot", *TWINS, "größer", "x y")
    for _ in range(6):
        weights = [chance.random() ** 3 for _ in kinds]
        tags = chance.choices(kinds, weights, k=60)
        node.tags(*tags, queue=chance.randrange(4))
    all_of_them = everything(node)
    assert len(all_of_them) == 360
    for expression in ("red", "Aa", "BB || red", " größer||x y ", "none", "Aa||BB", "*"):
        names = {tag.strip() for tag in expression.split("||")}
        expected = [one for one in all_of_them if expression == "*" or one.tags in names]
        options = {"max_bytes": chance.choice((1, 500, 2**20)), "prefetch_bytes": 4_096}
        found = everything(node, tags=expression, **options)
        assert places(found) == places(expected), (expression, options)


@pytest.mark.parametrize("seed", range(4))
def test_by_sql_a_node_gives_what_a_look_at_all_messages_gives(
    node: Node, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"seed {seed}")
    made = Expressions(random.Random(seed))
    monkeypatch.setattr(filtered_pulls, "MAX_EVALUATED", random.Random(seed).choice((1, 90, 900)))
    node.put(*(_stored(made.record()) for _ in range(120)))
    all_of_them = everything(node, queues=[0])
    tried = 0
    while tried < 12:
        text = made.text()
        try:
            wanted = make_filter(sql=text)
        except UsageError:
            continue
        assert wanted is not None and wanted.sql is not None
        expected = [one for one in all_of_them if wanted.sql.matches(one.properties)]
        found = everything(node, queues=[0], sql=text, max_bytes=4_000)
        assert places(found) == places(expected), text
        tried += 1


def _stored(properties: Any) -> dict[str, str]:
    return {
        name: value.replace("\x01", "").replace("\x02", "")
        for name, value in dict(properties).items()
        if name not in ("HS_PID", "HS_SEQ", "HS_DELAYED")
    }


def test_asyncio_filters_too(node: Node) -> None:
    node.tags("red", "green", "red")

    async def read() -> list[Message]:
        async with hastore.aio.Consumer(TOPIC, [node.address], sql="TAGS = 'green'") as consumer:
            return await consumer.poll(timeout_s=30)

    assert [one.queue_offset for one in asyncio.run(read())] == [1]


# ---- one pull


def test_a_pull_says_how_far_it_has_looked(node: Node, client: Client) -> None:
    offsets = node.tags("red", "Aa", "BB", "red", "Aa", "green")
    found = pull(client, 0, "tags", "Aa")
    assert (found.status, found.count, found.next_queue_offset) == (api.PullStatus.FOUND, 2, 6)
    assert (found.last_offset, found.epochs) == (offsets[5], [(EPOCH, offsets[1])])
    one = pull(client, 0, "tags", "Aa", max_messages=1)
    assert (one.count, one.next_queue_offset, one.last_offset) == (1, 2, offsets[1])
    twin = pull(client, 2, "tags", "Aa", max_messages=1)
    assert (twin.status, twin.next_queue_offset) == (api.PullStatus.NO_MATCH, 3), "it has its hash"
    assert pull(client, 3, "tags", "Aa", max_messages=1).next_queue_offset == 6
    for kind, text in (("tags", "blue"), ("sql", "TAGS = 'blue'")):
        none = pull(client, 1, kind, text)
        assert (none.status, none.count) == (api.PullStatus.NO_MATCH, 0)
        assert (none.next_queue_offset, none.last_offset) == (6, offsets[5])
        assert none.epochs == [(EPOCH, offsets[5])] and client.payload == b""
        end = pull(client, 6, kind, text)
        assert (end.status, end.next_queue_offset) == (api.PullStatus.NO_NEW, 6)
    bulk = pull(client, 0, "sql", "TAGS IN ('Aa', 'green')", bulk=True)
    assert bulk.count == 3 and len(bulk.sizes) == 12
    assert sum(int.from_bytes(bulk.sizes[n : n + 4]) for n in (0, 4, 8)) == len(client.payload)
    twins = pull(client, 1, "tags", "BB")
    assert (twins.count, twins.next_queue_offset) == (1, 6), "the others have the hash of BB only"
    assert pull(client, 0, "tags", "*").count == 6


def test_one_look_is_bounded(node: Node, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    node.tags(*["red"] * 100, "blue")
    monkeypatch.setattr(filtered_pulls, "MAX_EVALUATED", 90)
    sql = "TAGS = 'blue' OR TAGS = 'green'"
    terms = compile_filter("sql", sql).terms  # type: ignore[union-attr]
    looked = pull(client, 0, "sql", sql)
    assert (looked.status, looked.next_queue_offset) == (api.PullStatus.NO_MATCH, 90 // terms)
    monkeypatch.setattr(consume_queue, "TAGGED_UNITS_MAX", 40)
    looked = pull(client, 0, "tags", "blue")
    assert (looked.status, looked.next_queue_offset) == (api.PullStatus.NO_MATCH, 40)
    assert pull(client, 80, "tags", "blue").count == 1


def test_a_look_ends_behind_all_messages_of_an_inner_batch(node: Node, client: Client) -> None:
    """A position within the batch had led the consumer to the same batch for ever."""
    for base, count in ((0, 5), (5, 3), (8, 1)):
        end = node.store.max_offset
        node.store.append_replica(end, inner_batch(base, count, end))
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.show()
    for kind, text in (("sql", "a IS NULL"), ("tags", "red")):
        wanted, at, seen = api.Filter(kind, text), 0, []
        while at < 9 and len(seen) < 9:
            client.rid += 1
            asked = api.Pull(client.rid, "Batches", 0, Position(at), max_messages=1, filter=wanted)
            at = client.ask(asked).next_queue_offset
            seen.append(at)
        assert seen == [5, 8, 9], kind


def test_one_look_reads_so_many_properties_only(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 records with 5,000 small properties each took the API's thread 0.4 s."""
    many = {f"{number:x}": "" for number in range(50)}
    offsets = node.put(*[many] * 20, many | {"TAGS": "blue"}, many)
    monkeypatch.setattr(filtered_pulls, "MAX_PROPERTIES", 490)
    looked = pull(client, 0, "sql", "TAGS = 'blue'")
    assert (looked.status, looked.next_queue_offset) == (api.PullStatus.NO_MATCH, 10)
    assert looked.last_offset == offsets[9]
    looked = pull(client, looked.after, "sql", "TAGS = 'blue'")
    assert (looked.status, looked.next_queue_offset) == (api.PullStatus.NO_MATCH, 20)
    looked = pull(client, looked.after, "sql", "TAGS = 'blue'")
    assert (looked.status, looked.count) == (api.PullStatus.FOUND, 1)
    assert (looked.next_queue_offset, looked.last_offset) == (22, offsets[21])


@pytest.mark.parametrize("kind, text", [("tags", "blue"), ("sql", "TAGS = 'blue'")])
def test_a_waiting_pull_passes_what_does_not_match(
    node: Node, client: Client, kind: str, text: str
) -> None:
    node.tags("red")
    wanted = api.Filter(kind, text)
    client.send(api.Pull(1, TOPIC, 0, Position(1), wait_ms=60_000, filter=wanted))
    pulls = node.server._pulls
    until(lambda: pulls.parked == 1)
    for _ in range(5):
        node.tags("red", "red")
    assert client.silent()
    [offset] = node.tags("blue")
    reply, records = client.receive()
    assert (reply.status, reply.count, reply.next_queue_offset) == (api.PullStatus.FOUND, 1, 12)
    assert reply.last_offset == offset and len(records) > 100
    client.send(api.Pull(2, TOPIC, 0, Position(12), wait_ms=1_500, filter=wanted))
    until(lambda: pulls.parked == 1)
    [offset] = node.tags("red")
    reply, _ = client.receive()
    assert (reply.status, reply.next_queue_offset) == (api.PullStatus.NO_MATCH, 13)
    assert reply.last_offset == offset
    client.send(api.Pull(3, TOPIC, 0, Position(13), wait_ms=200, filter=wanted))
    reply, _ = client.receive()
    assert (reply.status, reply.next_queue_offset) == (api.PullStatus.NO_NEW, 13)


def test_what_is_not_readable_yet_waits(node: Node, client: Client) -> None:
    node.tags("red", "red")
    node.tags("blue", show=False)
    for kind, text in (("tags", "blue"), ("sql", "TAGS = 'blue'")):
        looked = pull(client, 0, kind, text)
        assert (looked.status, looked.next_queue_offset) == (api.PullStatus.NO_MATCH, 2)
        assert pull(client, 2, kind, text).status is api.PullStatus.NO_NEW
    client.send(
        api.Pull(90, TOPIC, 0, Position(2), wait_ms=60_000, filter=api.Filter("tags", "blue"))
    )
    until(lambda: node.server._pulls.parked == 1)
    node.show()
    assert client.receive()[0].count == 1


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("sql", "price >", "it ends too early"),
        ("sql", "a = 1 b = 2", "unexpected 'b = 2' at character 7"),
        ("sql", "a BETWEEN 5 AND 1", "holds nothing"),
        ("tags", "||", "names no tag"),
        ("tags", "  ", "names no tag"),
        ("class", "Filter", "no kind of filter"),
    ],
)
def test_a_wrong_filter_is_refused(
    node: Node, client: Client, kind: str, text: str, why: str
) -> None:
    node.tags("red")
    refused = pull(client, 0, kind, text)
    assert isinstance(refused, api.Failed) and refused.status == "UsageError"
    assert why in refused.reason
    if kind in ("sql", "tags"):
        with pytest.raises(UsageError, match=f"{kind}: ") as caught:
            Consumer(TOPIC, [node.address], **{kind: text})  # type: ignore[arg-type]
        assert why in str(caught.value)


def test_both_filters_are_refused_with_the_remedy(node: Node) -> None:
    with pytest.raises(UsageError, match="tags and sql: give one of them; TAGS is a property"):
        Consumer(TOPIC, [node.address], tags="red", sql="a = 1")


# ---- positions


def test_the_position_moves_past_what_does_not_match(node: Node) -> None:
    node.tags("red", "blue", "red", "red")
    offsets = node.tags("red")
    with Consumer(TOPIC, [node.address], queues=[0], tags="blue") as consumer:
        [found] = consumer.poll(timeout_s=30)
        assert found.queue_offset == 1
        assert consumer.position(0) == Position(5, EPOCH, offsets[0])
        [offset] = node.tags("red")
        while consumer.position(0).queue_offset < 6:  # once the pull's wait is over
            assert consumer.poll(timeout_s=0.2) == []
        assert consumer.position(0) == Position(6, EPOCH, offset)
        node.tags("blue")
        assert [one.queue_offset for one in consumer.poll(timeout_s=30)] == [6]
        consumer.seek(0, 0)
        taken = []
        for one in consumer:
            taken.append((one.queue_offset, consumer.position(0).queue_offset))
            if one.queue_offset == 6:
                break
        assert taken == [(1, 2), (6, 7)]


def test_a_position_is_not_ahead_of_messages_that_wait_for_the_reader(node: Node) -> None:
    node.tags("blue", "blue", "red", "red")
    with Consumer(TOPIC, [node.address], queues=[0], tags="blue") as consumer:
        [first] = consumer.poll(max_messages=1, timeout_s=30)
        end = time.monotonic() + 1.5  # the next pulls have looked at the rest meanwhile
        while time.monotonic() < end:
            assert consumer.position(0).queue_offset == 1
            node.tags("red")
            time.sleep(0.1)
        [second] = consumer.poll(max_messages=1, timeout_s=30)
        assert (first.queue_offset, second.queue_offset) == (0, 1)
        while consumer.position(0).queue_offset < node.count:
            assert consumer.poll(timeout_s=0.2) == []


def test_a_cut_behind_the_last_match_is_noticed(node: Node) -> None:
    """The records that a filtered reader passed are cut; others come at their queue offsets."""
    node.tags("blue", "red", "red", "red")
    with Consumer(TOPIC, [node.address], queues=[0], tags="blue") as consumer:
        assert len(consumer.poll(timeout_s=30)) == 1
        assert consumer.position(0).queue_offset == 4
        common = node.store.queues.read(TOPIC, 0, 2, 1)[0].offset
        node.store.set_limits(confirmed=common, readable=common)
        node.store.truncate(common)
        node.backend.entries = [(EPOCH, 0), (131074, common)]
        node.tags("blue", "blue", "blue")
        with pytest.raises(PositionLostError) as lost:
            for _ in range(100):
                assert consumer.poll(timeout_s=0.5) == [], "0 and 1 are known, 2 and 3 are new"
        assert lost.value.common is not None and lost.value.common.queue_offset == 2
        consumer.seek(0, lost.value.common)
        assert [one.queue_offset for one in consumer.poll(timeout_s=30)] == [2, 3, 4]


def test_a_waiting_pull_looks_again_when_what_it_has_passed_is_cut(
    node: Node, client: Client
) -> None:
    offsets = node.tags("blue")
    place = Position(1, EPOCH, offsets[0])
    wanted = api.Filter("tags", "blue")
    client.send(api.Pull(1, TOPIC, 0, place, wait_ms=2_000, filter=wanted))
    until(lambda: node.server._pulls.parked == 1)
    begins = node.tags("red", "red", "red")
    assert client.silent()
    node.store.set_limits(confirmed=begins[0], readable=begins[0])
    node.store.truncate(begins[0])
    node.backend.entries = [(EPOCH, 0), (131074, begins[0])]
    node.tags("blue")
    reply, _ = client.receive()
    assert (reply.status, reply.count, reply.next_queue_offset) == (api.PullStatus.FOUND, 1, 2)


def test_readers_beside_a_writer_get_each_match_once(node: Node) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    ended = threading.Event()

    def write() -> None:
        for _ in range(150):
            node.tags(*chance.choices(("blue", "red", "Aa"), (1, 9, 1), k=chance.randint(1, 20)),
                      queue=0)  # fmt: skip
        ended.set()

    found: dict[str, list[int]] = {"blue": [], "sql": []}

    def read(kind: str, **options: Any) -> None:
        with Consumer(TOPIC, [node.address], queues=[0], group=kind, **options) as consumer:
            while not ended.is_set() or consumer.position(0).queue_offset < node.count:
                found[kind] += [one.queue_offset for one in consumer.poll(timeout_s=0.05)]

    threads = [
        threading.Thread(target=write),
        threading.Thread(target=read, args=("blue",), kwargs={"tags": "blue"}),
        threading.Thread(target=read, args=("sql",), kwargs={"sql": "TAGS IS NOT NULL"}),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    messages = everything(node, queues=[0])
    assert found["blue"] == [one.queue_offset for one in messages if one.tags == "blue"]
    assert found["sql"] == list(range(node.count))


def test_the_twins_have_one_hash() -> None:
    assert len({java_hash_code(tag) for tag in TWINS}) == 1
