"""A batch of a hastore stream that is written again after messages of it are gone."""

from dataclasses import replace

import pyarrow as pa
import pytest

from hastore.client.producer.repeatable_sender import RepeatableSender
from hastore.config.model import ApiConfig
from hastore.errors import ClientError, UnreachableError, UsageError
from hastore.protocol.api import ProducerKnown
from hastore.server.api.server import ApiServer
from hastore.service import raise_failure
from hastore.spark.options.source_options import Patience
from hastore.spark.sink.options import SinkColumns, parse_sink_options
from hastore.spark.sink.records import stream_task
from hastore.spark.sink.task import _Task, check_nodes, write_task
from hastore.spark.stream_offsets import from_json
from tests.api_fakes import FakeBackend
from tests.spark.stream.test_driver import T0, T1, FakeLog, Query

VALUE = SinkColumns(0, None, None, None, None, None)


class Copy:
    """A stream from a simulated log to a fake node, run task by task."""

    def __init__(self, endpoint):
        self.raw = {"hastore.bootstrap.servers": endpoint, "topic": "copy"}
        self.log = FakeLog()
        self.log.put(T0, 6)
        self.log.put(T1, 4)
        self.query = Query(self.log, startingOffsets="earliest", failOnDataLoss="false")
        self.query.plan()

    def write(self, *tasks, rows=None, **options):
        """Begin a run of the query and write some tasks of its batch, or their first rows."""
        self.query.start_run()
        first = self.query.driver.initial_offset()
        spans = self.query.driver.tasks(first, from_json(self.query.offsets[0]))
        for place in tasks:
            names = [b"%d" % name for name in self.log.read(spans[place])][:rows]
            write_task(
                parse_sink_options({**self.raw, **options}, streaming=True), VALUE,
                stream_task("query", 0, place), place,
                iter([pa.record_batch([pa.array(names, pa.binary())], ["value"])]),
            )  # fmt: skip


@pytest.fixture
def node():
    backend = FakeBackend()
    server = ApiServer("tcp://127.0.0.1:0", backend, ApiConfig(), on_failure=raise_failure)
    server.start()
    backend.endpoint = server.endpoint
    yield backend
    server.stop()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_write_waits_for_a_first_answer_and_the_error_names_the_option(is_new):
    given = {"hastore.bootstrap.servers": "tcp://127.0.0.1:9", "topic": "t"}
    row = pa.record_batch([pa.array([b"x"])], ["value"])
    if is_new:
        options = replace(parse_sink_options(given, streaming=True), patience=Patience(0.1, 1e6))
        with pytest.raises(UnreachableError, match="0.1 s, which the option retryTimeout changes"):
            check_nodes(options)
    else:
        options = parse_sink_options({**given, "deliveryTimeout": "100ms"}, streaming=True)
    with pytest.raises(ClientError, match="Timeout.*127.0.0.1:9|127.0.0.1:9.*Timeout"):
        task = stream_task("query", 0, 0)
        write_task(options, VALUE, task, 0, iter([row]), is_new=is_new)


def stored(node):
    return sorted(int(record.body) for record in node.store._records())


def test_rows_are_not_taken_for_those_of_a_task_whose_messages_are_gone(node):
    copy = Copy(node.endpoint)
    copy.write(1)  # the query ends before the first task has stored a row
    copy.log.trim(6)
    copy.write(0, 1)
    assert stored(node) == [6, 7, 8, 9]


def test_rows_that_are_stored_in_part_and_then_gone_end_the_query_with_the_remedy(node):
    copy = Copy(node.endpoint)
    copy.write(0, rows=3)
    copy.log.trim(2)
    cause = "row 0 of partition 0 is not the row.*failOnDataLoss=false.*idempotent to false until"
    with pytest.raises(UsageError, match=cause):
        copy.write(0, 1)
    copy.log.trim(5)
    with pytest.raises(UsageError, match="is not the row that an earlier attempt has stored"):
        copy.write(0, 1)
    assert stored(node) == [0, 1, 2]
    copy.write(0, 1, idempotent="false")
    assert stored(node) == [0, 1, 2, 5, 6, 7, 8, 9]


def test_fewer_rows_than_are_stored_end_the_query_with_the_remedy(node):
    copy = Copy(node.endpoint)
    copy.write(0)
    copy.log.cut(7)  # t-0 keeps three messages
    cause = "has 3 rows, but an earlier attempt has stored 6.*failOnDataLoss=false.*idempotent to"
    with pytest.raises(UsageError, match=cause):
        copy.write(0)
    assert stored(node) == list(range(6))


def write_batch(node, topic, batch, rows, **options):
    raw = {"hastore.bootstrap.servers": node.endpoint, "topic": topic, **options}
    values = pa.record_batch([pa.array(rows, pa.binary())], ["value"])
    task = stream_task("the-query", batch, 0)
    return write_task(parse_sink_options(raw, streaming=True), VALUE, task, 0, iter([values]))


def test_a_copied_checkpoint_does_not_drop_the_rows_of_its_batches(node):
    """Its query has the id of the first one, whose batches the node knows."""
    for batch in range(3):
        write_batch(node, "old", batch, [b"%d" % batch])
    for batch in range(2):
        cause = (
            f"batch {batch} of query the-query is not written.*rows of its batch 2.*checkpoint was "
            "copied, or set back.*new checkpoint.*idempotent to false"
        )
        with pytest.raises(UsageError, match=f"^partition 0 of {cause}") as failed:
            write_batch(node, "new", batch, [b"1%d" % batch])
        assert "a repeated task goes on" not in str(failed.value)
    assert stored(node) == [0, 1, 2]
    write_batch(node, "old", 2, [b"2"])  # the last batch is repeated as ever
    write_batch(node, "new", 1, [b"11"], idempotent="false")
    write_batch(node, "old", 3, [b"3"])
    assert stored(node) == [0, 1, 2, 3, 11]


def test_an_attempt_that_a_later_batch_overtakes_meanwhile_does_not_report_its_rows(node):
    """It is told so when the node refuses its numbers, and then drops its rows (`_overtaken`)."""
    identity = stream_task("the-query", 0, 0)
    options = parse_sink_options(
        {"hastore.bootstrap.servers": node.endpoint, "topic": "new"}, streaming=True
    )
    sender = RepeatableSender((node.endpoint,), identity.producer_id)

    def rows():
        yield pa.record_batch([pa.array([b"0"], pa.binary())], ["value"])
        sender._resume(ProducerKnown(0, 1, (1 << 32) + 1_999, None), 0)
        yield pa.record_batch([pa.array([b"1"], pa.binary())], ["value"])

    try:
        with pytest.raises(UsageError, match="batch 0 of query the-query is not.*its batch 1"):
            _Task(sender, identity, 0).run(options, VALUE, rows())
    finally:
        sender.close()
    assert 1 not in stored(node)
