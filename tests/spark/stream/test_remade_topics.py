"""Streams, and exports, of a topic that was made again: its queues go on where they ended."""

import contextlib

import pytest

from hastore.config.model import RetentionConfig
from hastore.errors import ClientError, PositionLostError, UsageError
from hastore.pipeline.read_positions import (
    ReadPosition,
    end_positions,
    positions_as_state,
    unread,
)
from hastore.record.topic_records import TopicConfig
from hastore.spark.options.offsets import OffsetRange, TopicPartition
from hastore.spark.options.source_options import parse_options, parse_stream_options
from hastore.spark.read.planning import open_backend, open_head, select
from hastore.spark.stream_driver import StreamDriver
from hastore.spark.stream_offsets import StreamOffset
from tests.server.api.test_filtered_pulls import TOPIC, Node
from tests.store.append.test_topic_table import create, delete
from tests.store.kit import FILE_SIZE, message, opened, put

T0, T1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
BY_ALL = ["subscribe", "subscribePattern"]
RETENTION = RetentionConfig(max_age_ms=None, max_size_bytes=2 * FILE_SIZE)


@pytest.fixture(params=["path", "hastore.bootstrap.servers"])
def begin(request, tmp_path):
    """Return a node of a topic that was deleted, and a function that begins a stream's run."""
    with contextlib.ExitStack() as opened_later:
        store = opened_later.enter_context(opened(tmp_path, retention=RETENTION))
        store.set_limits(confirmed=0, readable=0)
        node = Node(store)
        opened_later.callback(node.server.stop)
        node.put({}, queue=0)
        node.put({}, {}, queue=1)
        delete(store, TOPIC)
        assert store.wait_dispatched(store.max_offset, 60)
        node.show()

        def run(by):
            at = str(tmp_path) if request.param == "path" else node.address
            options = parse_stream_options(
                {request.param: at, by: TOPIC, "startingOffsets": "earliest"}
            )
            driver = StreamDriver(open_head(options.source), options)
            opened_later.callback(driver.close)
            return driver

        yield node, run


def offsets(offset):
    return {key: place.next for key, place in offset.places.items()}


def follow(driver, start):
    """Return the end of the batch from `start`, and its messages by queue."""
    driver._ends.look(now=True)
    end = driver.latest_offset(start, limited=True)
    tasks = driver.tasks(start, end)
    return StreamOffset(end.places), {
        TopicPartition(one.topic, one.partition): (one.start, one.end) for one in tasks
    }


@pytest.mark.parametrize("by", BY_ALL)
def test_a_queue_that_is_empty_at_first_is_read_from_where_it_ended(begin, by):
    node, run = begin
    node.put({}, queue=0)
    driver = run(by)
    first = driver.initial_offset()
    assert offsets(first) == {T0: 1, T1: 2}
    end, read = follow(driver, first)
    assert read == {T0: (1, 2)}
    node.put({}, queue=1)
    end, read = follow(driver, end)
    assert read == {T1: (2, 3)}
    assert offsets(end) == {T0: 2, T1: 3}
    with open_backend(driver._options.source) as backend:
        assert backend.ended([T0, T1, TopicPartition("no", 0)]) == {T0: 1, T1: 2}


def test_to_an_export_what_a_deletion_ended_in_a_new_queue_is_no_loss(begin):
    node, run = begin
    node.put({}, queue=0)
    node.put({}, queue=1)
    done = positions_as_state({T0: ReadPosition(1, None)}, [TOPIC])  # before queue 1 came
    source = run("subscribe")._options.source
    with open_backend(source) as backend:
        found = unread(backend, source.strategy, done, fail_on_data_loss=True)
    assert found.ranges == {T0: (1, 2), T1: (2, 3)}
    assert not found.lost


def test_to_an_export_a_queue_that_is_not_listed_was_cut_unless_a_deletion_ended_it(begin):
    node, run = begin
    node.put({}, queue=0)
    source = run("subscribePattern")._options.source
    with open_backend(source) as backend:
        read = end_positions(backend, {T0: OffsetRange(1, 2)})
        unlisted = {TopicPartition(TOPIC, 7): read[T0]}
        done = positions_as_state(read | unlisted, [TOPIC])
        if source.path is None:  # nodes list the queues without messages, too
            assert not unread(backend, source.strategy, done, fail_on_data_loss=True).lost
        else:
            with pytest.raises(PositionLostError, match="TopicA-7 was read up to 2 before"):
                unread(backend, source.strategy, done, fail_on_data_loss=True)
    delete(node.store, TOPIC)
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.show()
    with open_backend(source) as backend:
        found = unread(
            backend, source.strategy, positions_as_state(read, [TOPIC]), fail_on_data_loss=True
        )
        assert not found.ranges and not found.lost and found.positions == read


def test_a_topic_that_is_made_again_while_a_stream_runs_is_read_from_its_begin(begin):
    node, run = begin
    driver = run("subscribePattern")
    first = driver.initial_offset()
    assert offsets(first) == {}
    node.put({}, queue=1)
    end, read = follow(driver, first)
    assert read == {T1: (2, 3)}
    node.put({}, queue=0)
    assert follow(driver, end)[1] == {T0: (1, 2)}


@pytest.mark.parametrize("by", BY_ALL)
def test_a_topic_that_is_deleted_after_it_was_read_ends_no_stream(begin, by):
    node, run = begin
    node.put({}, queue=0)
    node.put({}, queue=1)
    driver = run(by)
    end, read = follow(driver, driver.initial_offset())
    assert read == {T0: (1, 2), T1: (2, 3)}
    delete(node.store, TOPIC)
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.show()
    for one in (driver, run(by)):  # the query that runs, and one that is started again
        assert follow(one, end) == (end, {})
    node.put({}, queue=1)
    assert follow(driver, end)[1] == {T1: (3, 4)}
    assert follow(run(by), end)[1] == {T1: (3, 4)}


def test_a_topic_that_is_deleted_unread_is_a_loss_over_a_path(begin):
    node, run = begin
    node.put({}, queue=0)
    driver = run("subscribe")
    if driver._options.source.path is None:
        return  # nodes say so when the topic is made again
    end, _ = follow(driver, driver.initial_offset())
    node.put({}, queue=0)
    delete(node.store, TOPIC)
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.show()
    with pytest.raises(PositionLostError, match="TopicA-0 is gone"):
        follow(driver, end)


def fill(store, files):
    while store.max_offset < files * FILE_SIZE:
        put(store, *(message(n, size=1_000, topic="others") for n in range(60)))
    assert store.wait_dispatched(store.max_offset, 60)


def remove_old(node):
    node.show()
    node.store.flush()
    assert node.store.retention.delete_expired(None) > 0


def test_of_a_topic_that_was_made_again_only_what_was_put_since_can_be_lost(begin):
    node, run = begin
    first = run("subscribePattern").initial_offset()
    fill(node.store, 4)
    remove_old(node)  # the deletion, too
    node.put({}, queue=0)
    assert follow(run("subscribePattern"), first)[1] == {T0: (1, 2)}
    node.put({}, queue=1)
    fill(node.store, 8)
    remove_old(node)
    node.put({}, queue=1)
    with pytest.raises(PositionLostError, match=r"TopicA-0 begins at offset 2 instead of 1"):
        follow(run("subscribePattern"), first)


def test_a_path_says_that_a_topic_without_messages_has_none_yet(begin, tmp_path):
    node, _ = begin
    create(node.store, TopicConfig("made", 8, 8))
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.show()
    text = "'made' at .* has 8 queues, and not each has a message in this store yet"
    for by in ({"subscribe": "made"}, {"assign": '{"made":[0]}'}):
        source = parse_options({"path": str(tmp_path), **by})
        with open_backend(source) as backend, pytest.raises(ClientError, match=text):
            select(source.strategy, backend)
    for name in ("no such", TOPIC):
        source = parse_options({"path": str(tmp_path), "subscribe": name})
        with open_backend(source) as backend, pytest.raises(UsageError, match="there is no topic"):
            select(source.strategy, backend)
