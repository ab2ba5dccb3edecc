"""Each node removes its oldest files by itself: what one has removed is read from another."""

import contextlib
import time

import pytest

from hastore.client.connections.requester import Requester
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import RetentionConfig
from hastore.errors import PositionLostError
from hastore.pipeline.read_positions import ReadPosition, positions_as_state, unread
from hastore.spark.options.offsets import TopicPartition
from hastore.spark.options.source_options import parse_options, parse_stream_options
from hastore.spark.read import servers
from hastore.spark.read.planning import open_backend, open_head, plan
from hastore.spark.read.servers import ServerHead
from hastore.spark.stream_driver import StreamDriver
from hastore.spark.stream_offsets import StreamOffset
from tests.api_fakes import FakeBackend
from tests.spark.direct import rows
from tests.spark.read.test_server_reader import serving
from tests.store.append.test_topic_table import delete
from tests.store.kit import FILE_SIZE, message, opened, put

TOPIC = "TopicA"
T0, T1 = TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1)
COUNT = 400
EARLY = 20  # are older by a moment
RETENTION = RetentionConfig(max_age_ms=None, max_size_bytes=2 * FILE_SIZE)


def show(store):
    assert store.wait_dispatched(store.max_offset, 60)
    store.set_limits(confirmed=store.max_offset, readable=store.max_offset)


def fill(store):
    records = [message(n, queue_id=n % 2, size=1_000) for n in range(COUNT)]
    put(store, *records[:EARLY])
    stored_ms = SYSTEM_CLOCK.wall_ms()
    while SYSTEM_CLOCK.wall_ms() < stored_ms + 2.0:
        time.sleep(0.001)
    put(store, *records[EARLY:])
    show(store)


def remove_old(store):
    store.flush()
    assert store.retention.delete_expired(None) > 0


@pytest.fixture
def pair(tmp_path):
    """A master that has removed its first files, and a slave that has not; the same records."""
    with contextlib.ExitStack() as stack:
        backends = []
        for number in (2, 1):  # what the slave alone has kept is not younger than the rest
            store = stack.enter_context(opened(tmp_path / str(number), retention=RETENTION))
            store.set_limits(confirmed=0, readable=0)
            setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
            backends.insert(0, FakeBackend(number, writable=number == 1))
            backends[0].store = store
            fill(store)
        backends[1].master = 1
        remove_old(backends[0].store)
        assert backends[0].store.min_offset > 0
        yield (*backends, stack.enter_context(serving(*backends)))


def where(addresses):
    return {"hastore.bootstrap.servers": ",".join(addresses), "subscribe": TOPIC}


def first_of(master):
    return master.store.queues.queue_range(TOPIC, 0)[0]


def offsets(found):
    return sorted((row["partition"], row["offset"]) for row in found)


ALL = [(queue, offset) for queue in (0, 1) for offset in range(COUNT // 2)]


def test_a_batch_read_begins_where_the_replica_begins_that_has_kept_the_most(pair):
    master, _, addresses = pair
    assert first_of(master) > 10
    assert offsets(rows(**where(addresses))) == ALL
    given = {"startingOffsets": f'{{"{TOPIC}":{{"0":5,"1":-2}}}}'}
    assert offsets(rows(**given, **where(addresses))) == ALL[5:]


def test_a_read_by_time_has_what_only_another_replica_has_kept(pair):
    master, slave, addresses = pair
    times = [row["timestamp"] for row in rows(**where(addresses)) if row["partition"] == 0]
    since = next(one for one in times if one > times[0])
    first = times.index(since)
    assert 0 < first < first_of(master)
    ms = int(since.timestamp() * 1_000)
    with open_backend(parse_options(where(addresses))) as backend:
        assert backend.offset_by_time(T0, 1) == 0
        assert backend.offset_by_time(T0, ms) == first
        assert backend.offset_by_time(T0, 2**42) is None
        slave.store.reader.queue_offset_by_time = lambda *_: pytest.fail("it is not asked")
        late = int(times[-1].timestamp() * 1_000) + 1_000_000
        assert backend.offset_by_time(T0, late) is None


@pytest.mark.parametrize("loss", ["true", "false"])
def test_a_stream_reads_on_from_the_replica_that_has_kept_its_position(pair, loss):
    _, _, addresses = pair
    options = parse_stream_options(
        where(addresses)
        | {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "60", "failOnDataLoss": loss}
    )
    found, batches = [], 0
    with contextlib.closing(StreamDriver(open_head(options.source), options)) as driver:
        start = driver.initial_offset()
        while (end := driver.latest_offset(start, limited=True)) != start:
            read = [(t.partition, t.start, t.end) for t in driver.tasks(start, end)]
            assert sum(stop - begin for _, begin, stop in read) <= 62
            found += [(queue, n) for queue, begin, stop in read for n in range(begin, stop)]
            start, batches = StreamOffset(end.places), batches + 1
    assert sorted(found) == ALL
    assert batches >= COUNT // 60


def test_to_an_export_it_is_no_loss(pair):
    _, _, addresses = pair
    source = parse_options(where(addresses))
    done = positions_as_state({T0: ReadPosition(3, None), T1: ReadPosition(0, None)}, [TOPIC])
    with open_backend(source) as backend:
        found = unread(backend, source.strategy, done, fail_on_data_loss=True)
    assert not found.lost
    assert found.ranges == {T0: (3, COUNT // 2), T1: (0, COUNT // 2)}


def test_planning_waits_for_the_node_that_alone_has_kept_the_position(pair, monkeypatch, caplog):
    """A batch read from an offset, and an export that goes on; not one that begins anew."""
    _, slave, addresses = pair
    given = {"startingOffsets": f'{{"{TOPIC}":{{"0":5,"1":-2}}}}', "retryTimeout": "200ms"}
    done = positions_as_state({T0: ReadPosition(3, None), T1: ReadPosition(0, None)}, [TOPIC])
    survey = Requester.survey
    hidden = [slave.node]

    def survey_of_others(self, timeout_s, **how):
        """Hear nothing of the slave, as if it were down."""
        answered = set((yield from survey(self, timeout_s, **how)))
        for address in [one for one, i in self.cluster.maps.items() if i.node in hidden]:
            del self.cluster.maps[address]
            answered.discard(address)
        return answered

    monkeypatch.setattr(Requester, "survey", survey_of_others)
    silent = f"{addresses[1]} did not answer within 0.2 s, and may have them"
    with open_backend(parse_options(where(addresses) | given)) as backend:
        options = parse_options(where(addresses) | given)
        with pytest.raises(PositionLostError, match=f"offset 5 of {T0} .*{silent}; set failOn"):
            plan(backend, options)
        for fails in (True, False):
            how = {"fail_on_data_loss": fails, "patience": options.patience}
            with pytest.raises(PositionLostError) if fails else contextlib.nullcontext() as failed:
                assert unread(backend, options.strategy, done, **how).lost
            text = str(failed.value) if fails else caplog.records[0].getMessage()
            assert f"the messages [3, {first_of(pair[0])}) of {T0}" in text
            assert silent in text

        def come_back(self, timeout_s, **how):
            asked.append(timeout_s)
            if len(asked) == 3:
                hidden.clear()
            return (yield from survey_of_others(self, timeout_s, **how))

        asked = []
        monkeypatch.setattr(Requester, "survey", come_back)
        waits = parse_options(where(addresses) | given | {"retryTimeout": "1h"})
        assert [task.start for task in plan(backend, waits)] == [5, 0]
        hidden.append(slave.node)
        asked.clear()
        found = unread(
            backend, waits.strategy, done, fail_on_data_loss=True, patience=waits.patience
        )
        assert not found.lost and found.ranges[T0] == (3, COUNT // 2)


def test_what_a_deletion_has_hidden_stays_hidden_if_the_replica_lags(pair):
    master, _, addresses = pair
    delete(master.store, TOPIC)
    put(master.store, message(1, queue_id=0))
    show(master.store)
    with contextlib.closing(ServerHead(tuple(addresses))) as head:
        end = COUNT // 2
        assert head.available()[T0] == head.available([TOPIC])[T0] == (end, end + 1)


def test_a_replica_of_another_epoch_or_one_that_is_gone_does_not_count(pair, monkeypatch):
    master, slave, addresses = pair
    own = first_of(master)
    with contextlib.closing(ServerHead(tuple(addresses))) as head:
        assert head.available([TOPIC])[T0].start == 0
        assert head.listed([TOPIC])[T0].start == own
        monkeypatch.setattr(servers, "ANSWER_S", 0.5)
        slave.entries = [(slave.entries[-1][0] - 1, 0)]
        head._looked = None
        assert head.available([TOPIC])[T0].start == own
    slave.entries = list(master.entries)
    with contextlib.closing(ServerHead((addresses[0],))) as head:
        assert head.available([TOPIC])[T0].start == 0
        head._oldest = "tcp://127.0.0.1:9"
        assert head.available([TOPIC])[T0].start == own
        assert head.available([TOPIC])[T0].start == 0


def test_a_replica_that_has_nothing_of_the_present_log_hides_no_other(pair, tmp_path):
    """One that was down for long is there with its old log, before it begins anew."""
    master, slave, _ = pair
    with opened(tmp_path / "3", retention=RETENTION) as store:
        store.set_limits(confirmed=0, readable=0)
        setattr(store, "default_queues", 4)  # noqa: B010 (for the fake node)
        put(store, *(message(n, queue_id=n % 2, size=1_000) for n in range(EARLY)))
        show(store)
        late = FakeBackend(3, writable=False)
        late.store, late.master = store, 1
        assert store.readable_offset < master.store.min_offset
        slave.store.flush()
        assert slave.store.retention.delete_expired(FILE_SIZE) == 1
        start = first_of(slave)
        with serving(late, master, slave) as addresses:
            with contextlib.closing(ServerHead(tuple(addresses))) as head:
                assert 0 < head.available([TOPIC])[T0].start == start < first_of(master)
