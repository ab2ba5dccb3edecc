"""The options `tags` and `sql`: what they give is what a read of all gives, and its own filter."""

import random

import pytest

from hastore.client.consumer import range_reader
from hastore.errors import PositionLostError, UsageError
from hastore.record.message_filter import make_filter
from hastore.server.api import filtered_pulls
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import project, source_schema
from hastore.spark.options.partitions import QueueRange
from hastore.spark.read import stores
from hastore.spark.read.stores import PathBackend
from hastore.store.derived import consume_queue
from tests.record.sql_expressions import Expressions
from tests.server.api.test_filtered_pulls import TOPIC, TWINS, Node
from tests.spark.direct import batches, rows
from tests.spark.read.test_inner_batches import COUNTS, batch, pack, write
from tests.store.kit import message, opened, put

ALL = project(source_schema(include_headers=True, include_metadata=True))


@pytest.fixture
def node(tmp_path):
    with opened(tmp_path / "store") as store:
        store.set_limits(confirmed=0, readable=0)
        node = Node(store)
        yield node
        node.server.stop()
        assert node.server.failure is None


def both(node, tmp_path):
    """The options of a read in place, and of one from the node."""
    return (
        {"path": str(tmp_path / "store")},
        {"hastore.bootstrap.servers": node.address, "minPartitions": "5"},
    )


def places(found):
    return sorted((row["partition"], row["offset"], row["value"]) for row in found)


def of_all(found):
    """Return each row with its properties, as a look at all messages has them."""
    for row in found:
        pairs = {one["key"]: one["value"].decode() for one in row["headers"] or ()}
        pairs |= {} if row["tags"] is None else {"TAGS": row["tags"]}
        pairs |= {} if row["key"] is None else {"KEYS": row["key"].decode()}
        yield row, pairs


@pytest.mark.parametrize("seed", range(2))
def test_tags_give_what_a_look_at_all_gives(node, tmp_path, monkeypatch, seed):
    print(f"seed {seed}")
    chance = random.Random(seed)
    monkeypatch.setattr(consume_queue, "TAGGED_UNITS_MAX", chance.choice((3, 50)))
    monkeypatch.setattr(filtered_pulls, "MAX_RECORDS", chance.choice((1, 9, 2_048)))
    monkeypatch.setattr(range_reader, "PULL_BYTES", chance.choice((1, 2_000, 2**21)))
    monkeypatch.setattr(stores, "UNITS_AT_ONCE", chance.choice((11, 65_536)))
    kinds = ("", "red", "rot", *TWINS, "größer")
    for _ in range(5):
        weights = [chance.random() ** 3 for _ in kinds]
        node.tags(*chance.choices(kinds, weights, k=60), queue=chance.randrange(4))
    for options in both(node, tmp_path):
        options |= {"subscribe": TOPIC, "includeMetadata": "true"}
        found = rows(**options)
        assert len(found) == 300
        for expression in ("red", "Aa", "BB||red", " größer || none", "none", "*"):
            names = {tag.strip() for tag in expression.split("||")}
            wanted = [row for row in found if expression == "*" or row["tags"] in names]
            assert places(rows(tags=expression, **options)) == places(wanted), expression
        assert batches(tags="none", **options) == [], "no batch without rows"


def test_a_key_is_a_messages_own_and_sql_finds_it_among_those_of_javas_batch(node, tmp_path):
    """`autoBatch` puts the keys of all messages behind those of each, and RocketMQ reads these."""
    alone = [("KEYS", "ab"), ("UNIQ_KEY", "u")]
    pairs = ([("KEYS", key), ("KEYS", "a b"), ("WAIT", "true")] for key in ("a", "b"))
    put(node.store, *(message(n, properties=one) for n, one in enumerate((alone, *pairs))))
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.show()
    for options in both(node, tmp_path):
        options |= {"subscribe": TOPIC}
        assert [row["key"] for row in rows(**options)] == [b"ab", b"a", b"b"]
        assert rows(sql="KEYS = 'a'", **options) == []
        found = rows(sql="KEYS CONTAINS 'a'", **options)
        assert [row["key"] for row in found if row["key"] == b"a"] == [b"a"]


@pytest.mark.parametrize("seed", range(3))
def test_sql_gives_what_a_look_at_all_gives(node, tmp_path, monkeypatch, seed):
    print(f"seed {seed}")
    made = Expressions(random.Random(seed))
    monkeypatch.setattr(filtered_pulls, "MAX_EVALUATED", random.Random(seed).choice((1, 90, 900)))
    marks = str.maketrans("", "", "\x01\x02")
    node.put(*(
        {name: value.translate(marks) for name, value in dict(made.record()).items()}
        for _ in range(120)
    ))  # fmt: skip
    ranges = {
        "startingOffsets": f'{{"{TOPIC}":{{"0":13}}}}',
        "endingOffsets": f'{{"{TOPIC}":{{"0":110}}}}',
    }
    for options in both(node, tmp_path):
        options |= {"subscribe": TOPIC, "includeMetadata": "true", "includeHeaders": "true"}
        options |= ranges
        found = list(of_all(rows(**options)))
        assert len(found) == 97
        tried = 0
        while tried < 8:
            text = made.text()
            try:
                sql = make_filter(sql=text).sql
            except UsageError:
                continue
            wanted = [row for row, properties in found if sql.matches(properties)]
            assert places(rows(sql=text, **options)) == places(wanted), text
            tried += 1


def test_the_messages_of_an_inner_batch_are_filtered_one_by_one(tmp_path):
    raws, first, offset = [], 0, 0
    for count in COUNTS:
        body = b"".join(
            pack(b"%d" % n, b"TAGS\x01%s\x02n\x01%d\x02" % (b"odd" if n % 2 else b"even", n))
            for n in range(first, first + count)
        )
        raws.append(batch(first, count, offset, body=body))
        first += count
        offset += len(raws[-1])
    write(tmp_path, raws)
    for wanted, right in (
        (make_filter(tags="odd"), lambda n: n % 2),
        (make_filter(sql="n BETWEEN 5 AND 20"), lambda n: 5 <= n <= 20),
        (make_filter(sql="n > 1000"), lambda n: False),
    ):
        with PathBackend(str(tmp_path), True) as backend:
            span = QueueRange("inner", 3, 3, first, backend.limit_offset())
            found = list(backend.read_queue(span, BatchBuilder(ALL, wanted=wanted)))
        numbers = [int(row["value"]) for each in found for row in each.to_pylist()]
        assert numbers == [n for n in range(3, first) if right(n)]


@pytest.mark.parametrize("given", [{"tags": "blue"}, {"sql": "TAGS = 'blue'"}])
def test_a_cut_of_what_matches_during_the_read_is_a_loss(node, tmp_path, monkeypatch, given):
    node.tags(*["red", "blue"] * 20)
    options = {"path": str(tmp_path / "store"), "subscribe": TOPIC, **given}
    real = BatchBuilder.build

    def build(self, *given):
        monkeypatch.setattr(BatchBuilder, "build", real)
        found = real(self, *given)
        common = node.store.queues.read(TOPIC, 0, 21, 1)[0].offset  # 10 of blue are below it
        node.store.set_limits(confirmed=common, readable=common)
        node.store.truncate(common)
        return found

    monkeypatch.setattr(BatchBuilder, "build", build)
    with pytest.raises(PositionLostError, match="failOnDataLoss"):
        rows(**options)
    monkeypatch.setattr(BatchBuilder, "build", real)
    node.tags(*["red", "blue"] * 9)
    monkeypatch.setattr(BatchBuilder, "build", build)
    found = rows(failOnDataLoss="false", **options)
    assert [row["offset"] for row in found] == list(range(1, 21, 2))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tags": "a", "sql": "b = 1"}, "tags and sql: give one of them"),
        ({"tags": " || "}, "tags: .* names no tag"),
        ({"sql": ""}, "sql: SQL filter: it is empty. Write RocketMQ's SQL92"),
        ({"sql": "price >"}, "sql: SQL filter: it ends too early"),
        ({"tags": "x" * 8_193}, "tags: an expression of 8,193 characters; at most 8,192"),
        ({"tags": "a", "mode": "log"}, "option 'tags' has no meaning in mode=log"),
        ({"tag": "a"}, "did you mean 'tags'"),
    ],
)
def test_wrong_filters_are_refused_at_once(tmp_path, given, why):
    given = given if given.get("mode") else {"subscribe": TOPIC, **given}
    with pytest.raises(UsageError, match=why):
        batches(path=str(tmp_path), **given)
