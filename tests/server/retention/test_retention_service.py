"""Files kept for slaves and for confirmation; real stores and links."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from hastore.config.model import Config, Mode, RetentionConfig, Role
from hastore.errors import Status, StoreFullError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.protocol.committed_positions import CommitBody
from hastore.record.codec import build_record
from hastore.record.topic_records import TopicChange, TopicConfig, build_change
from hastore.server.api.commit_records import commit_record
from hastore.server.dledger_node import DLedgerNode
from hastore.server.kept_positions import KeptPositions
from hastore.server.node import Node
from hastore.server.retention_service import RetentionService
from hastore.store.append.results import own_records
from hastore.store.log_store import LogStore
from tests.ha.nodes import FILE_SIZE, HOST, Group, HaNode, wait_for
from tests.server.kit import config_of, running
from tests.store.faulty import FullDisk
from tests.store.kit import fill_up, message

replace = msgspec.structs.replace


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic_ms(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return int(self.now)


Groups = Callable[..., Group]
RETENTION = RetentionConfig(max_size_bytes=FILE_SIZE, hold_ms=60_000)


@pytest.fixture
def make_group(tmp_path: pathlib.Path) -> Iterator[Groups]:
    with contextlib.ExitStack() as stack:

        def make(count: int, **settings: object) -> Group:
            group = Group(tmp_path, count, **settings)
            stack.callback(group.stop)
            return group

        yield make


def service_of(
    node: HaNode, put: Any = None, *, keep_unconfirmed: bool = False
) -> tuple[RetentionService, Clock]:
    clock = Clock()
    root = node.config.store.root
    kept = KeptPositions(REAL, root, lambda: node.state.data.aside)
    service = RetentionService(
        node.config.store.retention,
        node.store,
        kept,
        clock,
        open_epoch=lambda: node.member.open_epoch,
        confirms=lambda: node.member.confirms,
        needed_from=node.ha.slave_offsets,
        put=put or put_own(node),
        on_failure=_fail,
        keep_unconfirmed=keep_unconfirmed,
    )
    return service, clock


def put_own(node: HaNode) -> Callable[[Sequence[bytes]], Any]:
    """Return what appends also the records that no client may put."""
    return lambda payloads: node.store.put_encoded(payloads, [own_records] * len(payloads))


def _fail(name: str, failure: BaseException) -> None:
    raise AssertionError(f"{name} failed") from failure


def fill(node: HaNode, files: int) -> None:
    """Put until the log has grown by that many files, all synced and replayed."""
    end = node.store.max_offset + files * FILE_SIZE
    while node.store.max_offset < end:
        node.put(*[b"x" * 900] * 5)
    node.store.flush()
    assert node.store.wait_dispatched(node.store.max_offset, 60)


def pair(make_group: Groups) -> tuple[HaNode, HaNode]:
    """Start a master, and a slave that follows it."""
    group = make_group(2, role=Role.ASYNC_MASTER, store={"retention": RETENTION})
    master, slave = group.start(1), group.start(2)
    master.promote()
    slave.follow()
    return master, slave


def master_with_a_commit(make_group: Groups) -> HaNode:
    """Start a master alone; its log begins with a commit and is four files too long."""
    settings = RetentionConfig(max_size_bytes=FILE_SIZE)
    group = make_group(1, acks=0, role=Role.ASYNC_MASTER, store={"retention": settings})
    master = group.start(1)
    master.promote()
    body = CommitBody("g", "t", {0: (5, None, None)})
    with master.member.gate.lock:
        master.store.put_encoded([commit_record(body, 1)])
    fill(master, 4)
    return master


def test_a_master_keeps_unconfirmed_bytes_for_the_hold(make_group: Groups) -> None:
    group = make_group(2, role=Role.ASYNC_MASTER, store={"retention": RETENTION})
    master, other = group.start(1), group.start(2)
    master.promote()
    fill(master, 4)
    assert master.store.confirmed_offset == 0
    service, clock = service_of(master)
    assert service.remove_expired() == 0
    clock.now = 59_999
    assert service.remove_expired() == 0
    assert not service.problems()
    clock.now = 60_000
    assert service.remove_expired() == 4
    assert "confirmed" in service.problems()[0]
    other.follow()
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    service.remove_expired()
    assert not service.problems()


def test_a_slave_keeps_bytes_that_it_does_not_know_as_confirmed(make_group: Groups) -> None:
    group = make_group(3, acks=2, role=Role.ASYNC_MASTER, store={"retention": RETENTION})
    master, slave, third = group.start(1), group.start(2), group.start(3)
    master.promote()
    slave.follow()
    fill(master, 4)
    assert service_of(master)[0].remove_expired() == 0  # it states the ends of quiet queues
    wait_for(lambda: slave.store.max_offset == master.store.max_offset)
    slave.store.flush()
    assert slave.store.wait_dispatched(slave.store.max_offset, 60)
    assert slave.store.confirmed_offset == 0
    service, clock = service_of(slave)
    assert service.remove_expired() == 0
    third.follow()
    wait_for(lambda: slave.store.confirmed_offset == master.store.max_offset)
    assert service.remove_expired() == 4
    assert clock.now == 0
    assert not service.problems()


def test_a_statement_counts_for_retention_once_it_is_confirmed(make_group: Groups) -> None:
    """A failover may cut it before; the queues' last records must still be there then."""
    master, slave = pair(make_group)
    fill(master, 4)
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    filled = master.store.max_offset
    service, clock = service_of(master)
    with slave.store.log.lock:  # nothing more is confirmed
        assert service.remove_expired() == 0
        assert master.store.stated.since(master.store.max_offset) == 4 * FILE_SIZE
        assert master.store.confirmed_offset == filled
        end = master.store.max_offset
        assert service.remove_expired() == 0
        assert master.store.max_offset == end > filled  # it is stated once
        assert master.store.min_offset == 0
    wait_for(lambda: master.store.confirmed_offset == end)
    assert service.remove_expired() == 4
    assert clock.now == 0


def test_rewritten_positions_are_confirmed_before_their_records_go(make_group: Groups) -> None:
    """A node that has only the rest of the log could become master without them."""
    master, slave = pair(make_group)
    body = CommitBody("g", "t", {0: (5, None, None)})
    with master.member.gate.lock:
        master.store.put_encoded([commit_record(body, 1)])
    fill(master, 4)
    service, _ = service_of(master)
    service.state_queue_ends()
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    stated = master.store.max_offset
    with slave.store.log.lock:  # nothing more is confirmed
        for _ in range(3):
            assert service.remove_expired() == 0
        assert master.store.max_offset > stated  # the position is in the log again
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    assert service.remove_expired() == 4


def test_in_mode_dledger_what_is_not_confirmed_is_waited_for_without_end(
    make_group: Groups,
) -> None:
    """As while the disks of the others are full for longer than `retention.hold`.

    Else the leader would remove the records of positions that only its own log has again, and say
    that it may remove what nobody has confirmed, which it never does.
    """
    master, slave = pair(make_group)
    body = CommitBody("g", "t", {0: (5, None, None)})
    with master.member.gate.lock:
        master.store.put_encoded([commit_record(body, 1)])
    fill(master, 4)
    service, clock = service_of(master, keep_unconfirmed=True)
    service.state_queue_ends()
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    stated = master.store.max_offset
    with slave.store.log.lock:  # nothing more is confirmed
        for now in (0, 1, 60_001, 200_000):
            clock.now = now
            assert service.remove_expired() == 0
            assert not [one for one in service.problems() if "confirmed" in one]
        assert master.store.max_offset > stated  # the position is in the log again
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    assert service.remove_expired() == 4


def test_in_mode_dledger_a_statement_is_waited_for_without_end(make_group: Groups) -> None:
    """Once the log has it; a node that begins with the rest of the log would not know the ends."""
    master, slave = pair(make_group)
    fill(master, 4)
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    service, clock = service_of(master, keep_unconfirmed=True)
    with slave.store.log.lock:  # nothing more is confirmed
        for now in (0, 1, 60_001, 200_000):
            clock.now = now
            assert service.remove_expired() == 0
            assert not [one for one in service.problems() if "quiet queues" in one]
        assert master.store.stated.since(master.store.max_offset) == 4 * FILE_SIZE
    wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
    assert service.remove_expired() == 4


def test_what_no_master_states_holds_the_log_for_the_hold(make_group: Groups) -> None:
    """As under a master of an earlier version."""
    master, slave = pair(make_group)
    fill(master, 4)
    wait_for(lambda: slave.store.confirmed_offset == master.store.max_offset)
    slave.store.flush()
    assert slave.store.wait_dispatched(slave.store.max_offset, 60)
    service, clock = service_of(slave)
    assert service.remove_expired() == 0
    clock.now = 59_999
    assert service.remove_expired() == 0 and not service.problems()
    clock.now = 60_000
    assert service.remove_expired() == 4
    assert "quiet queues" in service.problems()[0] and "offset" in service.problems()[0]
    service_of(master)[0].remove_expired()
    wait_for(lambda: slave.store.confirmed_offset == master.store.max_offset)
    assert slave.store.wait_dispatched(slave.store.max_offset, 60)
    service.remove_expired()
    assert not service.problems()


def test_a_lapse_lasts_although_the_removal_moves_the_logs_begin(make_group: Groups) -> None:
    """Under a master that states nothing: else the hold would be in force again, and the disk full.

    The master here has no retention, so it is like one of an earlier version.
    """
    settings = RetentionConfig(max_size_bytes=3 * FILE_SIZE, hold_ms=60_000)
    group = make_group(2, role=Role.ASYNC_MASTER, store={"retention": settings})
    master, slave = group.start(1), group.start(2)
    master.promote()
    slave.follow()
    service, clock = service_of(slave)

    def fill_both() -> None:
        fill(master, 4)
        wait_for(lambda: slave.store.confirmed_offset == master.store.max_offset)
        assert slave.store.wait_dispatched(slave.store.max_offset, 60)
        slave.store.flush()

    fill_both()
    assert service.remove_expired() == 0
    clock.now = 60_000
    assert service.remove_expired() > 0
    fill_both()
    clock.now = 60_010
    assert service.remove_expired() == 4
    assert "has not stated the next offsets" in service.problems()[0]


def test_thousands_of_quiet_queues_are_stated_once_for_each_file(make_group: Groups) -> None:
    settings = {"retention": RETENTION, "commitlog_file_size": 16 * FILE_SIZE}
    group = make_group(1, acks=0, role=Role.ASYNC_MASTER, store=settings)
    master = group.start(1)
    master.promote()
    count = 3000
    with master.member.gate.lock:
        for number in range(count):
            master.store.put_encoded([
                build_record(
                    f"topic{number % 100}", b"", queue_id=0, born_timestamp_ms=1, born_host=HOST
                )
            ])  # fmt: skip
    while master.store.max_offset < 16 * FILE_SIZE:
        master.put(*[b"x" * 9000] * 5)
    assert master.store.wait_dispatched(master.store.max_offset, 60)
    puts: list[list[bytes]] = []
    plain = put_own(master)

    def put(payloads: Sequence[bytes]) -> Any:
        puts.append(list(payloads))
        return plain(payloads)

    service, _ = service_of(master, put)
    service.remove_expired()
    assert [len(payloads) for payloads in puts] == [1]
    assert len(puts[0][0]) < 100 * 40
    for _ in range(3):
        service.remove_expired()
    assert len(puts) == 1
    assert dict.fromkeys(master.store.queues.quiet_since(16 * FILE_SIZE)) == dict.fromkeys(
        (f"topic{number}", 0, count // 100) for number in range(100)
    )


def test_statements_that_would_fill_the_log_are_a_problem(make_group: Groups) -> None:
    group = make_group(1, acks=0, role=Role.ASYNC_MASTER, store={"retention": RETENTION})
    master = group.start(1)
    master.promote()
    with master.member.gate.lock:
        for number in range(600):
            master.store.put_encoded([
                build_record(
                    f"a-topic-with-a-long-name-{number}", b"", queue_id=0, born_timestamp_ms=1,
                    born_host=HOST,
                )
            ])  # fmt: skip
    fill(master, 2)
    end = master.store.max_offset
    service, clock = service_of(master)
    assert service.remove_expired() == 0
    assert master.store.max_offset == end
    assert "store.commitlog_file_size" in service.problems()[0]
    clock.now = 60_000
    assert service.remove_expired() > 0
    assert len(service.problems()) == 2


def test_a_slave_without_progress_holds_the_log_for_the_hold(make_group: Groups) -> None:
    patient = {"housekeeping_interval_ms": 600_000}  # so that its silence does not end the link
    group = make_group(3, role=Role.ASYNC_MASTER, ha=patient, store={"retention": RETENTION})
    master, slave, stuck = group.start(1), group.start(2), group.start(3)
    master.promote()
    slave.follow()
    stuck.follow()
    wait_for(lambda: len(master.ha.slaves()) == 2)
    # Its link lives and its log does not grow, as with a full disk.
    stand = stuck.store.max_offset
    with stuck.store.log.lock:
        fill(master, 4)
        wait_for(lambda: master.ha.slave_offsets()["node 2"] == master.store.max_offset)
        service, clock = service_of(master)
        assert service.remove_expired() == 0
        clock.now = 60_000
        assert service.remove_expired() == 4
        assert stuck.store.max_offset == stand
        assert service.problems()[0].startswith("node 3 ")
        assert not service.keeps_files_for("node 3")
        assert service.keeps_files_for("node 2")
    wait_for(lambda: len(master.ha.slaves()) == 2)


def test_a_problem_is_named_only_where_files_are_removed(make_group: Groups) -> None:
    group = make_group(2, role=Role.ASYNC_MASTER, store={"retention": RetentionConfig(hold_ms=0)})
    master = group.start(1)
    master.promote()
    fill(master, 2)
    service, _ = service_of(master)
    assert service.remove_expired() == 0
    assert not service.problems()


def test_topics_outlive_their_records(make_group: Groups) -> None:
    """A slave that joins later has only the log that is left."""
    group = make_group(2, role=Role.ASYNC_MASTER, store={"retention": RETENTION})
    master, slave = group.start(1), group.start(2)
    master.promote()
    orders, gone = TopicConfig("orders", 16, 8), TopicConfig("gone", 1, 1)
    changes = [TopicChange(orders), TopicChange(gone), TopicChange(deleted="gone")]
    with master.member.gate.lock:
        put_own(master)([build_change(change, 1) for change in changes])
        master.store.put_encoded([message(1, topic="deleted"), message(2, topic="kept")])
        put_own(master)([build_change(TopicChange(deleted="deleted"), 1)])
    fill(master, 4)
    service, clock = service_of(master)
    assert service.remove_expired() == 0  # the copies are in the log, and not confirmed
    clock.now = 60_000
    assert service.remove_expired() > 0
    assert master.store.min_offset > 0
    slave.follow()
    wait_for(lambda: slave.store.dispatched_offset == master.store.max_offset)
    for node in (master, slave):
        table = node.store.topic_table
        assert table.recorded("orders") == orders
        assert table.find("gone") is None
        assert table.find("deleted") is None
        assert table.find("kept") is not None  # its queues are stated, too
    end = master.store.max_offset
    service.remove_expired()
    assert master.store.max_offset == end  # one copy is enough while it is in the log


def test_many_topics_do_not_push_each_other_out_of_the_log(make_group: Groups) -> None:
    group = make_group(1, acks=0, role=Role.ASYNC_MASTER, store={"retention": RETENTION})
    master = group.start(1)
    master.promote()
    count = FILE_SIZE // 800
    with master.member.gate.lock:
        for number in range(count):
            put_own(master)([build_change(TopicChange(TopicConfig(f"t{number}", 1, 1)), 1)])
    fill(master, 4)
    service, _ = service_of(master)
    wait_for(lambda: service.remove_expired() > 0)
    assert any(f"{count} topics take more" in text for text in service.problems())
    assert master.store.topic_table.recorded("t0") == TopicConfig("t0", 1, 1)  # this node has it


def test_files_are_removed_although_positions_cannot_be_rewritten(make_group: Groups) -> None:
    """On a full disk the removal makes room."""
    tried: list[int] = []

    def full(payloads: Sequence[bytes]) -> Any:
        tried.append(len(payloads))
        raise StoreFullError("no room for the next log file")

    master = master_with_a_commit(make_group)
    service, _ = service_of(master, full)
    assert service.remove_expired() == 4
    assert tried == [1, 1]  # the ends of quiet queues, and the positions
    service._put = put_own(master)
    before = master.store.max_offset
    assert service.remove_expired() == 0
    assert master.store.max_offset > before


def test_no_file_is_removed_whose_positions_cannot_be_saved(make_group: Groups) -> None:
    master = master_with_a_commit(make_group)
    service, _ = service_of(master)
    in_the_way = pathlib.Path(master.config.store.root, "hastore", "positions.tmp")
    in_the_way.mkdir()
    with pytest.raises(OSError, match="positions"):
        service.remove_expired()
    assert master.store.min_offset == 0
    in_the_way.rmdir()
    assert service.remove_expired() == 4


def test_a_log_that_was_cut_after_its_positions_were_gathered_keeps_its_files(
    make_group: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a resync the offset is one of another log, whose positions nobody has saved."""
    master = master_with_a_commit(make_group)
    service, _ = service_of(master)
    gather = service.kept.gather

    def then_cut(store: LogStore, end: int, pause: Callable[[], bool]) -> bool:
        found = gather(store, end, pause)
        store.truncate(store.max_offset)
        return found

    monkeypatch.setattr(service.kept, "gather", then_cut)
    assert service.remove_expired() == 0 and master.store.min_offset == 0
    monkeypatch.undo()
    assert service.remove_expired() == 4


def test_a_slave_with_a_full_disk_does_not_wait_for_a_statement(make_group: Groups) -> None:
    """It could not receive the statement of the queues' ends: it would wait for ever."""
    master, slave = pair(make_group)
    fill(master, 4)
    wait_for(lambda: slave.store.confirmed_offset == master.store.max_offset)
    slave.store.flush()
    assert slave.store.wait_dispatched(slave.store.max_offset, 60)
    service, _ = service_of(slave)
    assert service.remove_expired() == 0
    slave.store.log.allocator.failure_reason = "no room"
    assert service.remove_expired() == 4


@pytest.fixture(params=["a file system without a free block", "a small tmpfs"])
def disk(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> tuple[pathlib.Path, FileSystem, Callable[[], object]]:
    """A folder, its file system, and a call that takes all the room there is."""
    if "tmpfs" in request.param:
        place = request.getfixturevalue("small_disk")
        return place, REAL, lambda: fill_up(place)
    fs = FullDisk()
    return tmp_path, fs, lambda: setattr(fs, "full", True)


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("mode", [Mode.CLASSIC, Mode.DLEDGER])
def test_retention_makes_room_on_a_full_disk(
    disk: tuple[pathlib.Path, FileSystem, Callable[[], object]], mode: Mode, restarted: bool
) -> None:
    """It saves positions and more before it removes a file, and finds no free block for that."""
    place, fs, take_all_room = disk
    config = config_of(place / "s")
    idle = RetentionConfig(check_interval_ms=3_600_000)
    config = replace(config, store=replace(config.store, retention=idle))
    make: type[Node | DLedgerNode] = Node
    if mode is Mode.DLEDGER:
        config, make = replace(config, mode=mode, role=None), DLedgerNode
    with contextlib.ExitStack() as stack:
        node = make(config, lambda: None, fs=fs)
        node.start()
        stack.callback(lambda: node.stop())
        store = node.backend.store
        wait_for(lambda: node.backend.writable_reason() is None)
        places = dict.fromkeys(range(8), (5, None, None))
        put_to(node, *(commit_record(CommitBody(f"g{n}", "t", places), 1) for n in range(10)))
        while store.max_offset < 4 * 65536:
            put_to(node, *[build_record("T", b"x" * 900, queue_id=0, properties=(),
                                        born_timestamp_ms=1, born_host=HOST)] * 5)  # fmt: skip
        wait_for(lambda: store.confirmed_offset == store.max_offset == store.dispatched_offset)
        store.flush()
        node.retention.look()  # nothing goes yet; the reserve suffices for what was put
        assert store.min_offset == 0 and node.retention.problems() == []
        take_all_room()
        if restarted:
            node.stop()
            node = make(config, lambda: None, fs=fs)
            node.start()
            store = node.backend.store
            wait_for(lambda: store.confirmed_offset == store.max_offset == store.dispatched_offset)
        node.retention.configure(replace(idle, max_size_bytes=65536))
        wait_for(lambda: store.min_offset or node.retention.problems())
        assert not any("remove" in one for one in node.retention.problems())
        wait_for(lambda: store.min_offset >= 3 * 65536)
        assert len(node.retention.kept.find("g7", "t")) == 8
        assert not any("remove" in one for one in node.retention.problems())
        put_to(node, *[commit_record(CommitBody("g", "t", {0: (6, None, None)}), 1)])
    again = KeptPositions(REAL, config.store.root, lambda: 0)
    again.load()
    assert len(again.find("g9", "t")) == 8


@pytest.mark.parametrize("mode", [Mode.CLASSIC, Mode.DLEDGER])
def test_other_limits_in_the_file_count_without_a_restart(
    tmp_path: pathlib.Path, mode: Mode
) -> None:
    """Whoever must make room on a full disk need not stop the node for it."""
    config = config_of(tmp_path / "s")
    make: type[Node | DLedgerNode] = Node
    if mode is Mode.DLEDGER:
        config, make = replace(config, mode=mode, role=None), DLedgerNode
    slow = RetentionConfig(check_interval_ms=3_600_000, hold_ms=5)
    config = replace(config, store=replace(config.store, retention=slow))
    news: list[Config] = []
    with running(make(config, lambda: news.pop() if news else None)) as node:
        store = node.backend.store
        wait_for(lambda: node.backend.writable_reason() is None)
        while store.max_offset < 4 * 65536:
            put_to(node, *[build_record("T", b"x" * 900, queue_id=0, properties=(),
                                        born_timestamp_ms=1, born_host=HOST)] * 5)  # fmt: skip
        wait_for(lambda: store.confirmed_offset == store.max_offset == store.dispatched_offset)
        store.flush()
        limits = replace(slow, max_size_bytes=65536, max_age_ms=1 << 40, hold_ms=7)
        news.append(replace(config, store=replace(config.store, retention=limits)))
        node.wake()
        wait_for(lambda: not news)
        assert node.backend.status()["config_pending"] == []
        wait_for(lambda: store.min_offset >= 3 * 65536)
        assert node.retention.problems() == []


def put_to(node: Node | DLedgerNode, *records: bytes) -> None:
    """Append the records, those that no client may put too."""
    for results in node.backend.put_encoded(list(records), [own_records] * len(records)):
        assert all(one.status is Status.PUT_OK for one in results)
