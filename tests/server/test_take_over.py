"""What a RocketMQ broker had beside its log becomes records once, and nothing newer moves back."""

import logging
import os
import random
from itertools import pairwise

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.errors import NotStoredError, Status
from hastore.fs.filesystem import REAL
from hastore.ha.rules.epochs import classic_end
from hastore.protocol.api import POSITIONS_TOPIC
from hastore.protocol.committed_positions import CommitBody, PositionMap
from hastore.record.delays import SCHEDULE_TOPIC
from hastore.record.topic_records import TOPICS_TOPIC, TopicChange, TopicConfig, build_change
from hastore.server.api.commit_records import commit_record, read_commits
from hastore.server.broker_tables import GROUPS, POSITIONS, TOPICS
from hastore.server.schedule_service import ScheduleMessageService
from hastore.server.take_over import AGAIN_MS, DELAYS_FILE, MARK, TOPICS_MS, TakeOver, read_offsets
from hastore.store.append.results import own_records
from tests.server.test_delays_taken import delivered_by_broker
from tests.server.test_schedule_service import (
    Clock,
    Master,
    Transfer,
    put_waiting,
    records_of,
    settle,
    waiting,
)
from tests.store.kit import message, opened, put

EPOCH = 1 << 16 | 1
NEXT = 2 << 16 | 2


class Node:
    """A node's part that takes over, on a store whose log up to `floor` is a broker's."""

    def __init__(self, store, root, floor, *, kept=None, clock=None):
        self.store, self.root = store, root
        self.master = Master(store, EPOCH)
        self.master.starts = [(0, 0), (EPOCH, floor)]
        self.open_epoch = EPOCH
        self.kept = kept or PositionMap()
        self.clock = clock or Clock()
        self.take_over = TakeOver(
            REAL, str(root), store, self.clock,
            open_epoch=lambda: self.open_epoch, kept=self.kept.find,
        )  # fmt: skip

    @property
    def waits(self):
        return self.take_over.waits(self.master.history)

    def promote(self, epoch=EPOCH):
        """Let the node be the master of an epoch, and do what is due."""
        self.open_epoch = self.master.number = epoch
        if epoch != self.master.starts[-1][0]:
            self.master.starts = [*self.master.starts, (epoch, self.store.max_offset)]
        assert self.store.wait_dispatched(self.store.max_offset, 60)
        if self.take_over.is_due(epoch):
            self.take_over.turn(self.master, epoch)
        assert self.store.wait_dispatched(self.store.max_offset, 60)
        self.store.set_limits(readable=self.store.max_offset)
        return self

    def positions(self):
        """Return what the log says: the positions by group, topic and queue."""
        assert self.store.wait_dispatched(self.store.max_offset, 60)
        found = PositionMap()
        for record in records_of(self.store):
            if record.topic == POSITIONS_TOPIC:
                raw = self.store.reader.record_bytes(record.physical_offset)
                for offset, body in read_commits(raw):
                    found.apply_commit(body, offset)
        return {
            f"{topic}@{group}": {q: one.queue_offset for q, one in sorted(places.items())}
            for (group, topic), places in found.entries.items()
            if group != MARK
        }

    def commit(self, group, topic, **queues):
        places = {int(q[1:]): (at, None, None) for q, at in queues.items()}
        own(self.store, commit_record(CommitBody(group, topic, places), 1))

    def write(self, table, text):
        write(self.root, table, text)


def own(store, *records):
    results = store.put_encoded(records, [own_records] * len(records))
    assert all(one.status is Status.PUT_OK for each in results for one in each), results


def write(root, table, text):
    path = root / getattr(table, "file", table)
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def offsets(text):
    return '{"offsetTable":{' + text + "}}"


@pytest.fixture
def store(tmp_path):
    with opened(tmp_path) as found:
        for number in range(12):
            put(found, message(number, topic="T", queue_id=number % 2))
        assert found.wait_dispatched(found.max_offset, 60)
        yield found


@pytest.fixture
def node(store, tmp_path):
    return Node(store, tmp_path, store.max_offset)


def test_topics_are_waited_for_from_the_begin_until_they_are_records(node):
    """In between a producer began a topic anew, or wrote to one that the broker had closed."""
    history = node.master.history
    node.write(TOPICS, '{"topicConfigTable":{"E":{"readQueueNums":8,"writeQueueNums":8,"perm":4}}}')
    node.open_epoch = 0
    assert not node.take_over.topics_wait(history)
    node.take_over.begin_queues([(0, 0)])
    assert not node.take_over.topics_wait(history)  # it is no master yet
    node.open_epoch = EPOCH
    assert node.take_over.topics_wait(history)
    node.promote()
    assert not node.take_over.topics_wait(history)
    assert node.store.topic_table.recorded("E") == TopicConfig("E", 8, 8, 4)


def test_topics_are_not_waited_for_longer_than_a_moment(node, caplog):
    """Puts are taken also if a file is damaged, or nobody confirms a record."""
    node.write(TOPICS, '{"topicConfigTable":{"E":{}}}')
    node.take_over.begin_queues([(0, 0)])
    assert node.take_over.topics_wait(node.master.history)
    node.clock.monotonic += TOPICS_MS
    assert not node.take_over.topics_wait(node.master.history)
    node.take_over.begin_queues([(0, 0)])
    node.write(TOPICS, '{"topicConfigTable":{')
    node.promote()
    assert node.take_over.problem is not None
    assert not node.take_over.topics_wait(node.master.history)


def test_a_slave_waits_with_routes_until_it_has_the_mark(node):
    """Not for longer than a moment; a commit that came before the mark is none."""
    slave = Node(node.store, node.root, node.master.starts[1][1])
    starts, slave.open_epoch = slave.master.starts, 0
    take_over, history = slave.take_over, slave.master.history

    def waits(*, knows_master=True):
        return take_over.routes_wait(history, knows_master=knows_master)

    assert not waits() and not take_over.copies_broker(history)  # nobody has files of a broker
    node.write(TOPICS, '{"topicConfigTable":{"E":{"readQueueNums":8,"writeQueueNums":8,"perm":4}}}')
    assert waits() and waits(knows_master=False) and not take_over.copies_broker(history)
    slave.master.starts = starts[:1]
    assert take_over.copies_broker(history)
    assert waits() and not waits(knows_master=False), "the master's epoch is to come"
    slave.master.starts = starts
    node.commit("g", "T", q0=1)
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    take_over.look(slave.master)
    assert waits()
    slave.clock.monotonic += TOPICS_MS
    assert not waits()
    slave.clock.monotonic -= TOPICS_MS
    node.promote()
    assert waits()
    take_over.look(slave.master)
    assert not waits() and node.store.topic_table.recorded("E") == TopicConfig("E", 8, 8, 4)


def test_everything_becomes_a_record_once(node):
    node.write(POSITIONS, offsets('"T@g":{0:3,1:6},"%RETRY%g@g":{0:0},"E@g":{5:0}'))
    node.write(TOPICS, '{"topicConfigTable":{"E":{"readQueueNums":8,"writeQueueNums":8,"perm":4}}}')
    node.write(GROUPS, '{"subscriptionGroupTable":{"g":{"retryMaxTimes":3}}}')
    assert node.waits
    node.promote()
    assert not node.waits
    assert node.positions() == {"T@g": {0: 3, 1: 6}, "%RETRY%g@g": {0: 0}, "E@g": {5: 0}}
    table = node.store.topic_table
    assert table.recorded("E") == TopicConfig("E", 8, 8, 4)
    assert '"retryMaxTimes":3' in table.recorded("%RETRY%g").attributes["hastore.group"]
    end = node.store.max_offset
    for epoch in (EPOCH, NEXT):
        again = Node(node.store, node.root, node.master.starts[1][1])  # a restart, another node
        again.write(POSITIONS, offsets('"T@g":{0:1,1:1},"T@new":{0:1}'))  # its file is another one
        assert again.waits
        again.promote(epoch)
        assert node.store.max_offset == end and not again.waits


def test_a_new_master_reads_the_log_up_to_the_mark_only(node, monkeypatch):
    """However many positions the log has before the broker's end, and behind the mark."""
    monkeypatch.setattr("hastore.server.take_over._CHUNK_BYTES", 300)
    node.write(POSITIONS, offsets('"T@g":{0:3,1:6}'))
    for number in range(50):
        node.commit("before", "T", q0=number)
    later = Node(node.store, node.root, node.store.max_offset).promote()
    for number in range(50):
        later.commit("g", "T", q0=number)
    again = Node(node.store, node.root, later.master.starts[1][1])
    reads, pull = [], node.store.reader.pull

    def counted(*args, **limits):
        reads.append(args)
        return pull(*args, **limits)

    monkeypatch.setattr(node.store.reader, "pull", counted)
    assert again.waits
    again.promote(NEXT)
    assert not again.waits and 0 < len(reads) < 10, len(reads)


def test_without_files_or_without_a_broker_nothing_waits(node, store, tmp_path):
    assert not node.waits
    node.promote()
    assert store.max_offset == node.master.starts[1][1]
    node.write(POSITIONS, offsets('"T@g":{0:1}'))
    alone = Node(store, tmp_path, 0)
    assert not alone.waits and classic_end(alone.master.starts) is None
    follower = Node(store, tmp_path, store.max_offset)
    follower.open_epoch = 0
    assert not follower.waits


def test_what_hastore_has_written_since_is_newer(node):
    """Whoever took over before may have ended in the middle, and clients have gone on."""
    node.write(POSITIONS, offsets('"T@g":{0:1,1:2},"T@h":{0:1}'))
    node.write(TOPICS, '{"topicConfigTable":{"E":{"perm":4},"F":{"perm":4},"G":{"perm":4}}}')
    node.commit("g", "T", q0=5)
    own(node.store, build_change(TopicChange(TopicConfig("E", 2, 2)), 1))
    own(node.store, build_change(TopicChange(deleted="F"), 1))
    node.promote()
    assert node.positions() == {"T@g": {0: 5, 1: 2}, "T@h": {0: 1}}
    table = node.store.topic_table
    assert table.recorded("E") == TopicConfig("E", 2, 2) and table.recorded("F") is None
    assert table.recorded("G").perm == 4


def test_a_position_that_retention_has_kept_is_newer_too(store, tmp_path):
    floor = store.max_offset
    kept = PositionMap()
    put(store, message(99, topic="T"))
    kept.apply_commit(CommitBody("g", "T", {0: (5, None, None)}), floor)
    node = Node(store, tmp_path, floor, kept=kept)
    node.write(POSITIONS, offsets('"T@g":{0:1,1:2}'))
    # The log begins behind that commit.
    node.take_over._store = _Beginning(store, store.max_offset)
    node.promote()
    assert node.positions() == {"T@g": {1: 2}}


class _Beginning:
    def __init__(self, store, first):
        self._of, self.min_offset = store, first

    def __getattr__(self, name):
        return getattr(self._of, name)


def test_what_hastore_wrote_before_the_broker_is_older(store, tmp_path):
    """The log was hastore's, then went back to a broker, which has delivered more since."""
    first = Node(store, tmp_path, store.max_offset)
    first.write(POSITIONS, offsets('"T@g":{0:1},"T@gone":{0:2}'))
    first.promote()
    first.commit("g", "T", q0=2, q1=2)
    own(store, build_change(TopicChange(TopicConfig("E", 2, 2)), 1))
    put(store, message(50, topic="T"))
    store.wait_dispatched(store.max_offset, 60)
    later = Node(store, tmp_path, store.max_offset)  # all of it is a broker's, as it says
    later.write(POSITIONS, offsets('"T@g":{0:6}'))
    later.write(TOPICS, '{"topicConfigTable":{"E":{"readQueueNums":3,"writeQueueNums":3}}}')
    assert later.waits
    later.promote()
    assert later.positions() == {"T@g": {0: 6, 1: 2}, "T@gone": {0: 2}}
    assert store.topic_table.recorded("E") == TopicConfig("E", 3, 3)


def test_positions_beyond_the_brokers_log_get_what_comes_next(node, caplog):
    """The broker is gone before this slave had its last messages: their numbers come again."""
    node.write(POSITIONS, offsets('"T@g":{0:900,1:6,7:4},"none@g":{0:1}'))
    for number in range(5):
        put(node.store, message(100 + number, topic="T", queue_id=0))  # hastore's, meanwhile
    with caplog.at_level(logging.WARNING):
        node.promote()
    assert node.positions() == {"T@g": {0: 6, 1: 6, 7: 4}}
    assert node.store.queues.queue_range("T", 7) == (4, 4)  # what comes next comes there
    said = [one.getMessage() for one in caplog.records if "took over" in one.getMessage()]
    assert len(said) == 1 and "there is no topic 'none'" in said[0]


def test_queues_whose_messages_retention_has_removed_go_on_where_the_broker_was(node, caplog):
    """At 0 the broker, once it has the log back, would take new messages for old ones."""
    node.write(POSITIONS, offsets('"Quiet@g":{0:7,3:2},"Quiet@h":{0:5},"gone@g":{0:9},"T@g":{0:9}'))
    node.write(TOPICS, '{"topicConfigTable":{"Quiet":{"perm":6}}}')
    node.write(DELAYS_FILE, '{"offsetTable":{3:6,4:0}}')
    store = node.store
    node.take_over.begin_queues([(0, 0)])  # before the epoch is opened, and before any put
    assert put(store, message(50, topic="Quiet", queue_id=3))[0].queue_offset == 2
    node.promote()
    assert node.positions() == {"Quiet@g": {0: 7, 3: 2}, "Quiet@h": {0: 7}, "T@g": {0: 6}}
    ends = {("Quiet", 0): (7, 7), ("Quiet", 3): (2, 3), (SCHEDULE_TOPIC, 2): (6, 6)}
    known = {key: store.queues.queue_range(*key) for key in [*ends, ("gone", 0)]}
    assert known == {**ends, ("gone", 0): None}
    # Other nodes, and this one after its next start, know it from the log.
    again = Node(store, node.root, node.master.starts[1][1])
    (node.root / DELAYS_FILE).unlink()
    end = store.max_offset
    again.take_over.begin_queues(again.master.history())
    again.promote(NEXT)
    assert store.max_offset == end
    assert put(store, message(51, topic="Quiet", queue_id=0))[0].queue_offset == 7
    put_waiting(store, waiting(0, 3))
    assert store.wait_dispatched(store.max_offset, 60)
    assert store.queues.queue_range(SCHEDULE_TOPIC, 2) == (6, 7)


def test_a_queue_that_hastore_has_begun_goes_on(node):
    """The files were damaged when the epoch was opened, and are repaired."""
    node.write(TOPICS, '{"topicConfigTable":{"Quiet":{"perm":6}}}')
    node.write(POSITIONS, '{"offsetTable":')
    node.take_over.begin_queues([(0, 0)])
    node.promote()
    assert put(node.store, message(50, topic="Quiet", queue_id=0))[0].queue_offset == 0
    node.write(POSITIONS, offsets('"Quiet@g":{0:7,1:7}'))
    os.utime(node.root / POSITIONS.file, (9, 9))
    node.promote()
    assert node.positions() == {"Quiet@g": {0: 0, 1: 7}}
    for queue, expected in ((0, 1), (1, 7)):
        [result] = put(node.store, message(51, topic="Quiet", queue_id=queue))
        assert result.queue_offset == expected


@pytest.mark.parametrize("table", [POSITIONS, TOPICS, GROUPS])
def test_a_damaged_file_lets_positions_wait_and_is_said_once(node, table, caplog):
    node.write(POSITIONS, offsets('"T@g":{0:3}'))
    node.write(table, '{"offsetTable":{"T@g":{0:3')
    end = node.store.max_offset
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            node.promote()
    assert node.waits and node.store.max_offset == end
    assert len(caplog.records) == 1 and table.file in caplog.records[0].getMessage()
    assert "is removed" in node.take_over.problem
    path = node.root / table.file
    if table is POSITIONS:
        node.write(POSITIONS, offsets('"T@g":{0:2}'))  # repaired
    else:
        path.unlink()
    os.utime(node.root / POSITIONS.file, (9, 9))
    node.promote()
    assert not node.waits and node.take_over.problem is None
    assert node.positions() == {"T@g": {0: 2 if table is POSITIONS else 3}}


def test_the_brokers_own_copy_is_read_instead(node):
    node.write(POSITIONS, '{"offsetTable":')
    (node.root / f"{POSITIONS.file}.bak").write_text(offsets('"T@g":{0:3}'))
    node.promote()
    assert node.positions() == {"T@g": {0: 3}}


def test_a_file_that_may_not_be_read_is_a_problem_until_it_may(node, caplog, monkeypatch):
    """A copy of the broker's file that belongs to another user, for example."""
    path = node.root / POSITIONS.file
    node.write(POSITIONS, offsets('"T@g":{0:3}'))

    class Locked(type(REAL)):
        def read_bytes(self, name, max_bytes=1 << 26):
            if name == str(path):
                raise PermissionError(13, "Permission denied", name)
            return REAL.read_bytes(name, max_bytes)

    with monkeypatch.context() as locked:
        locked.setattr(node.take_over, "_fs", Locked())
        for _ in range(3):
            node.promote()
            node.clock.monotonic += AGAIN_MS
    assert node.waits and f"{path} cannot be taken over: Permission denied" in (
        node.take_over.problem
    )
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1
    node.promote()  # its rights have changed, and nothing else
    assert not node.waits and node.take_over.problem is None
    assert node.positions() == {"T@g": {0: 3}}


@pytest.mark.parametrize("copy_first", [False, True])
def test_a_damaged_copy_is_named_and_its_removal_is_seen(node, copy_first):
    node.write(TOPICS, '{"topicConfigTable":{}}')
    node.write(POSITIONS, '{"offsetTable":')
    both = [node.root / POSITIONS.file, node.root / f"{POSITIONS.file}.bak"]
    both[1].write_text("")
    node.promote()
    assert all(f"{path} cannot be taken over" in node.take_over.problem for path in both)
    for path in reversed(both) if copy_first else both:
        assert node.waits
        path.unlink()
        node.promote()
    assert not node.waits and node.take_over.problem is None
    assert node.positions() == {}


def test_readers_wait_until_what_was_taken_over_is_readable(node):
    node.write(POSITIONS, offsets('"T@g":{0:3}'))
    node.store.set_limits(readable=node.store.max_offset)
    node.promote()
    node.store.set_limits(readable=node.store.max_offset - 1)
    assert node.waits
    node.store.set_limits(readable=node.store.max_offset)
    assert not node.waits


def test_more_than_there_is_room_for_is_left_out(node, monkeypatch, caplog):
    monkeypatch.setattr("hastore.protocol.committed_positions.MAX_GROUPS", 3)
    node.write(POSITIONS, offsets(",".join(f'"T@g{n}":{{0:1}}' for n in range(5))))
    with caplog.at_level(logging.WARNING):
        node.promote()
    assert len(node.positions()) == 3
    assert "too many groups keep positions" in caplog.text


def test_a_group_that_no_record_can_name_stops_nothing(node, caplog):
    node.write(POSITIONS, offsets('"T@a\\u0001b":{0:1},"T@g":{0:1}'))
    with caplog.at_level(logging.WARNING):
        node.promote()
    assert node.positions() == {"T@g": {0: 1}} and not node.waits
    assert "a separator" in caplog.text


class Crashing(Master):
    """Ends after some appends, as a kill does."""

    left = 0

    def put_encoded(self, payloads, guards=None):
        if self.left <= 0:
            raise NotStoredError("killed", Status.SERVICE_NOT_AVAILABLE)
        self.left -= 1
        return super().put_encoded(payloads, guards)


@pytest.mark.parametrize("seed", range(8))
def test_crashes_in_the_middle_never_move_a_group_back(tmp_path, monkeypatch, seed):
    """Groups go on between attempts; each begins where the broker left it, and only advances."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr("hastore.server.take_over._PUT_BYTES", 300)
    with opened(tmp_path) as store:
        for number in range(40):
            put(store, message(number, topic="T", queue_id=0))
        floor = store.max_offset
        groups = {f"g{n}": rng.randrange(40) for n in range(10)}
        write(
            tmp_path, POSITIONS,
            offsets(",".join(f'"T@{name}":{{0:{at}}}' for name, at in groups.items())),
        )  # fmt: skip
        latest: dict[str, int] = {}
        for attempt in range(60):
            node = Node(store, tmp_path, floor)
            node.master = crashing = Crashing(store, EPOCH)
            crashing.starts = [(0, 0), (EPOCH, floor)]
            crashing.left = rng.randrange(3)
            try:
                node.promote((attempt + 1) << 16 | 1)
            except NotStoredError:
                assert node.waits
            found = node.positions()
            for name in groups:
                key = f"T@{name}"
                if key in found:
                    assert found[key][0] == latest.get(name, groups[name])
                    latest[name] = found[key][0] + rng.randrange(3)
                    node.commit(name, "T", q0=latest[name])
            if not node.waits:
                break
        found = node.positions()
        assert not node.waits and found.keys() == {f"T@{name}" for name in groups}
        assert all(found[f"T@{name}"][0] >= at for name, at in groups.items())
        ends = [record.physical_offset for record in records_of(store)]
        assert all(one < other for one, other in pairwise(ends))


@pytest.mark.parametrize("why", ["no slaves", "a full disk"])
@pytest.mark.parametrize("is_taken", [True, False])
def test_a_master_that_can_put_nothing_has_the_positions_if_they_were_taken_over(
    node, why, is_taken
):
    """A restart while its slaves are away: only what is not in the log yet must wait for them."""
    node.write(POSITIONS, offsets('"T@g":{0:3}'))
    if is_taken:
        node.promote()
    again = Node(node.store, node.root, node.master.starts[1][1])
    again.open_epoch = again.master.number = NEXT
    again.master.sync = True
    if why == "no slaves":
        again.master.unconfirmable = why
    else:
        again.master.refusal = why
    service = ScheduleMessageService(
        node.store, again.master, Transfer(), again.clock, on_failure=lambda *_: None,
        tables=again.take_over,
    )  # fmt: skip
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    assert again.waits
    for _ in range(3):
        service.turn()
    assert again.waits is not is_taken
    again.master.unconfirmable = again.master.refusal = None
    settle(service, node.store)
    assert node.store.wait_dispatched(node.store.max_offset, 60)
    node.store.set_limits(readable=node.store.max_offset)
    assert not again.waits and again.positions() == {"T@g": {0: 3}}


def test_the_delays_of_a_broker_that_had_the_log_back_are_taken_again(tmp_path):
    """Its marks of hastore's first time say less than the broker's file."""
    clock = Clock()

    def service(floor, epoch):
        node = Node(store, tmp_path, floor, clock=clock)
        node.open_epoch = node.master.number = epoch
        node.master.starts = [(0, 0), (epoch, floor)]
        return ScheduleMessageService(
            store, node.master, Transfer(), clock, on_failure=lambda *_: None,
            taken=lambda: read_offsets(REAL, str(tmp_path)), tables=node.take_over,
        )  # fmt: skip

    with opened(tmp_path) as store:
        put(store, message(0))
        for number in range(4):
            put_waiting(store, waiting(number, 1))
        write(tmp_path, DELAYS_FILE, '{"offsetTable":{1:0}}')
        store.wait_dispatched(store.max_offset, 60)
        clock.wall = SYSTEM_CLOCK.wall_ms() + 3_600_000
        settle(service(store.max_offset, EPOCH), store)
        assert bodies(store) == [0, 1, 2, 3]
        # Back at the broker: 4 and 5 are delivered there, 6 waits.
        for number in (4, 5, 6):
            [offset] = put_waiting(store, waiting(number, 1))
            if number < 6:
                delivered_by_broker(store, offset)
        write(tmp_path, DELAYS_FILE, '{"offsetTable":{1:6}}')
        store.wait_dispatched(store.max_offset, 60)
        floor = store.max_offset
        for epoch in (NEXT, NEXT + (1 << 16)):
            settle(service(floor, epoch), store)
        assert bodies(store) == [0, 1, 2, 3, 4, 5, 6]
        marks = [one for one in records_of(store) if one.topic == POSITIONS_TOPIC]
        assert len(marks) == 2 and not [r for r in records_of(store) if r.topic == TOPICS_TOPIC]


def bodies(store):
    return sorted(int(one.body) for one in records_of(store) if one.topic == "T")


def test_the_mark_waits_until_it_is_known_what_the_broker_has_delivered(tmp_path):
    """With the mark, a level that has one of hastore's first time would not be taken again."""
    clock = Clock()

    def service(floor, epoch):
        node = Node(store, tmp_path, floor, clock=clock)
        node.open_epoch = node.master.number = epoch
        node.master.starts = [(0, 0), (epoch, floor)]
        made = ScheduleMessageService(
            store, node.master, Transfer(), clock, on_failure=lambda *_: None,
            taken=lambda: read_offsets(REAL, str(tmp_path)), tables=node.take_over,
        )  # fmt: skip
        return made, node

    with opened(tmp_path) as store:
        put(store, message(0))
        put_waiting(store, waiting(0, 1))
        write(tmp_path, DELAYS_FILE, '{"offsetTable":{1:0}}')
        store.wait_dispatched(store.max_offset, 60)
        clock.wall = SYSTEM_CLOCK.wall_ms() + 3_600_000
        settle(service(store.max_offset, EPOCH)[0], store)
        assert bodies(store) == [0]
        put_waiting(store, waiting(1, 1))  # at the broker, after hastore had the log
        write(tmp_path, DELAYS_FILE, '{"offsetTable":{1:')
        store.wait_dispatched(store.max_offset, 60)
        floor = store.max_offset
        for epoch in (NEXT, NEXT + (1 << 16)):
            made, node = service(floor, epoch)
            put_waiting(store, waiting(epoch >> 16, 1))
            settle(made, store)
            assert bodies(store) == [0] and node.waits and made.problems()
        write(tmp_path, DELAYS_FILE, '{"offsetTable":{1:1}}')
        clock.move(10_000)
        for _ in range(3):
            settle(made, store)
        store.set_limits(readable=store.max_offset)
        assert bodies(store) == [0, 1, 2, 3] and not node.waits and not made.problems()
