"""Files kept for slaves and for confirmation; real stores and links."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from hastore.config.model import RetentionConfig, Role
from hastore.errors import StoreFullError
from hastore.fs.filesystem import REAL
from hastore.protocol.committed_positions import CommitBody
from hastore.record.codec import build_record
from hastore.server.api.commit_records import commit_record
from hastore.server.kept_positions import KeptPositions
from hastore.server.retention_service import RetentionService
from hastore.store.append.results import own_records
from tests.ha.nodes import FILE_SIZE, HOST, Group, HaNode, wait_for


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


def service_of(node: HaNode, put: Any = None) -> tuple[RetentionService, Clock]:
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
        wait_for(lambda: master.store.confirmed_offset == master.store.max_offset)
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
