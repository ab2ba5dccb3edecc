"""Read from nodes that speak TLS and ask who their clients are, by the security file of a query."""

import json

import pytest

from hastore.client.producer.repeatable_sender import RepeatableSender
from hastore.errors import ForbiddenError, NotAuthenticatedError, UsageError
from hastore.record.codec import NO_HOST, build_record
from hastore.spark.arrow.batch import BatchBuilder
from hastore.spark.arrow.schema import project, source_schema
from hastore.spark.options.offsets import TopicPartition
from hastore.spark.options.partitions import QueueRange
from hastore.spark.options.source_options import Assign, Subscribe
from hastore.spark.read.planning import select
from hastore.spark.read.servers import ServerBackend, ServerHead
from tests.server.api.secured import Secured

ALL = project(source_schema(include_headers=False, include_metadata=False))


def record(topic, number, **more):
    return build_record(
        topic, b"%d" % number, queue_id=0, born_timestamp_ms=1, born_host=NO_HOST, **more
    )


def file_of(secured, security):
    path = secured.folder / f"{security.identity}.yaml"
    path.write_text(
        json.dumps({"tls_ca": secured.pki.ca, "identity": security.identity,
                    "key_file": f"{security.identity}.key"})
    )  # fmt: skip
    return str(path)


@pytest.fixture
def secured(tmp_path):
    return Secured(tmp_path)


def test_a_query_reads_what_its_identity_may_read(secured):
    for topic in ("t", "secret"):
        secured.backend.store.put_encoded([record(topic, n) for n in range(50)])
    mine = file_of(secured, secured.identity("spark", consume='["t"]'))
    with secured.server(tls=True) as server:
        where = (server.endpoint,)
        with ServerBackend(where, True, mine) as backend:
            assert backend.available().keys() == {TopicPartition("t", 0)}
            batches = list(backend.read_queue(QueueRange("t", 0, 0, 50), BatchBuilder(ALL)))
            assert sum(batch.num_rows for batch in batches) == 50
            assert backend.offset_by_time(TopicPartition("t", 0), 0) == 0
            with pytest.raises(ForbiddenError, match="'secret'"):
                list(backend.read_queue(QueueRange("secret", 0, 0, 50), BatchBuilder(ALL)))
        head = ServerHead(where, mine)
        assert head.available(["t"])[TopicPartition("t", 0)].end == 50
        with pytest.raises(ForbiddenError, match="'secret'"):
            head.available(["secret"])
        head.close()


def named(topic):
    return [Subscribe((topic,)), Assign(frozenset({TopicPartition(topic, 0)}))]


def test_a_topic_without_a_right_is_forbidden_whether_it_exists_or_not(secured):
    for topic in ("t", "secret"):
        secured.backend.store.put_encoded([record(topic, 0)])
    mine = file_of(secured, secured.identity("spark", consume='["t"]'))
    everything = file_of(secured, secured.identity("all", consume='["*"]'))
    with secured.server(tls=True) as server:
        where = (server.endpoint,)
        for backend in (ServerBackend(where, True, mine), ServerHead(where, mine)):
            told = set()
            for topic in ("secret", "absent"):
                for strategy in named(topic):
                    with pytest.raises(ForbiddenError) as refused:
                        select(strategy, backend)
                    assert f"identity spark has no right to consume {topic!r}" in str(refused.value)
                    told.add(str(refused.value).replace(topic, "TOPIC"))
            assert len(told) == 1  # a stranger to the topic does not learn whether it exists
            if isinstance(backend, ServerHead):
                backend.close()
        with pytest.raises(UsageError, match="there is no topic 'absent'"):
            select(Subscribe(("absent",)), ServerBackend(where, True, everything))


def test_a_query_without_the_key_ends_at_once(secured, monkeypatch):
    monkeypatch.delenv("HASTORE_SECURITY", raising=False)
    secured.identity("spark", consume='["t"]')
    with secured.server() as server:
        with ServerBackend((server.endpoint,), True) as backend:
            with pytest.raises(NotAuthenticatedError, match="asks its clients"):
                backend.available()
            with pytest.raises(NotAuthenticatedError, match="asks its clients"):
                list(backend.read_queue(QueueRange("t", 0, 0, 50), BatchBuilder(ALL)))


def test_a_writer_needs_no_right_to_read(secured):
    """A repeated task cannot compare its rows then, but it writes each once."""
    mine = file_of(secured, secured.identity("writer", produce='["t"]'))
    with secured.server(tls=True) as server:
        for _ in range(2):
            sender = RepeatableSender((server.endpoint,), "task", security=mine)
            first = sender.begin(0)
            for n in range(first, 20):
                row = record("t", n, properties=(("HS_PID", "task"), ("HS_SEQ", str(n))))
                sender.put("t", row, n, 1)
            sender.finish()
            sender.close()
        assert secured.backend.store.queue_range("t", 0) == (0, 20)
        other = RepeatableSender((server.endpoint,), "more", security=mine)
        other.begin(0)
        row = record("secret", 0, properties=(("HS_PID", "more"), ("HS_SEQ", "0")))
        other.put("secret", row, 0, 1)
        with pytest.raises(ForbiddenError, match="no right to produce 'secret'"):
            other.finish()
        other.close()
