"""A node of mode dledger in this process: levels, refusals, the file, retention, store kinds."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest

from hastore.cli.dledger import recovery_text
from hastore.client.consumer.consumer import Consumer
from hastore.client.messages import Message, Position
from hastore.client.producer.producer import Producer
from hastore.clock import SYSTEM_CLOCK, SystemClock
from hastore.config.model import (
    Config,
    DLedgerConfig,
    Flush,
    NodeAddress,
    RetentionConfig,
    StoreKind,
)
from hastore.dledger.core.events import HardState, OwnEntry, Settings
from hastore.dledger.driver.status import FollowerStatus
from hastore.dledger.store.mmap_file_store import DLedgerMmapFileStore
from hastore.errors import NotStoredError, PositionBehindError, PositionLostError, StoreError
from hastore.fs.filesystem import GROUP_READABLE, REAL
from hastore.server.base_node import store_host
from hastore.server.dledger_node import DLedgerNode, GroupService, settings_of
from hastore.server.metrics.from_status import add_status, page_of
from hastore.server.node import Node
from hastore.server.recover_group import recover_group
from hastore.service import raise_failure
from hastore.store.log import flush
from hastore.store.log.flush import FlushService
from tests.process.harness import Ports
from tests.server.kit import config_of, group_of_one, running
from tests.server.test_node import until


def read(consumer: Consumer, count: int) -> list[Message]:
    """Return the next messages; replay may make the last ones readable later than the first."""
    found: list[Message] = []
    while len(found) < count and (more := consumer.poll(count - len(found), timeout_s=20)):
        found += more
    return found


def test_the_settings_of_the_file_are_those_of_the_core_with_the_same_defaults() -> None:
    config = group_of_one(pathlib.Path("/none"))
    assert settings_of(config) == Settings()
    values = {
        field.name: 7_000 + place
        for place, field in enumerate(msgspec.structs.fields(DLedgerConfig))
        if field.name != "allow_async_flush"
    }
    changed = msgspec.structs.replace(config, dledger=DLedgerConfig(**values))
    settings = settings_of(changed)
    used = {getattr(settings, name) for name in Settings.__slots__}
    assert used == set(values.values()), "a key of the file reaches no setting, or two do"


def test_a_link_bears_the_silence_that_the_elections_of_the_file_bear(
    tmp_path: pathlib.Path,
) -> None:
    config = group_of_one(tmp_path / "s")
    slow = DLedgerConfig(election_timeout_ms=10_000, append_timeout_ms=10_000)
    patient = msgspec.structs.replace(config, dledger=slow)
    for changed, silence_ms in ((config, 3_000), (patient, 60_000)):
        times = DLedgerNode(changed, lambda: None).driver.links.times
        assert times.silence_ms == silence_ms
        assert times.keep_alive_ms == 750, "the other end may still have the times of another file"


@pytest.mark.parametrize(
    ("store", "level"),
    [
        ({}, "QUORUM_DISK"),
        ({"flush": Flush.ASYNC}, "QUORUM_MEM"),
        ({"flush": Flush.ASYNC, "kind": StoreKind.MEMORY}, "QUORUM_MEM"),
    ],
    ids=["sync", "async", "memory"],
)
def test_levels(tmp_path: pathlib.Path, store: dict[str, object], level: str) -> None:
    with running(DLedgerNode(group_of_one(tmp_path / "s", **store), lambda: None)) as node:
        for acks in (1, "all", None):
            with Producer(node.api.endpoint, acks=acks) as producer:  # type: ignore[arg-type]
                assert producer.send_sync("t", b"x").level == level
        with Producer(node.api.endpoint, sync_flush=True, delivery_timeout_s=20) as producer:
            if level == "QUORUM_DISK":
                assert producer.send_sync("t", b"x").level == level
            else:  # refused for good: long before the delivery timeout
                with pytest.raises(NotStoredError, match="sync_flush: with store"):
                    producer.send_sync("t", b"x")
        with Consumer("t", node.api.endpoint) as consumer:
            assert len(consumer.poll(10, timeout_s=20)) >= 1
        status = node.backend.status()
        assert status["problems"] == [] and status["writable"] and status["rescued_bytes"] == 0
        assert status["ledger_end_index"] == status["committed_index"]


def test_sync_flush_is_refused_while_a_member_confirms_what_is_on_no_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For now, not for good: the nodes' files are changed one after the other."""
    with running(DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)) as node:
        monkeypatch.setattr(node.driver, "without_syncs", lambda: {3})
        assert "that confirm what is on no disk yet: node 3;" in str(node.backend.can_confirm(True))
        assert node.backend.never_flushed() is None and node.backend.can_confirm(False) is None
        with Producer(node.api.endpoint) as producer:
            assert producer.send_sync("t", b"x").level == "QUORUM_MEM"
        with Producer(node.api.endpoint, sync_flush=True) as producer:
            sent = producer.send("t", b"y")
            until(lambda: node.api.counts.refused_messages)
            monkeypatch.undo()
            assert sent.result(60).level == "QUORUM_DISK"


@pytest.mark.parametrize("mode", ["classic", "dledger"])
def test_a_clock_that_was_ahead_is_a_problem_and_does_not_last(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    ahead_ms, right = [0], SystemClock.wall_ms
    monkeypatch.setattr(SystemClock, "wall_ms", lambda clock: right(clock) + ahead_ms[0])
    root = tmp_path / "s"
    node = (
        Node(config_of(root), lambda: None)
        if mode == "classic"
        else DLedgerNode(group_of_one(root), lambda: None)
    )
    with running(node), Producer(node.api.endpoint) as producer:
        producer.send_sync("t", b"before")
        ahead_ms[0] = 7_200_000
        producer.send_sync("t", b"ahead")
        ahead_ms[0] = 0
        offset = producer.send_sync("t", b"after").offset or 0
        store = node.backend.store
        assert store.wait_dispatched(store.max_offset, 60)
        record = store.reader.record_at(offset)
        assert record is not None
        assert abs(record.store_timestamp_ms - SYSTEM_CLOCK.wall_ms()) < 600_000
        status = node.backend.status()
        (problem,) = status["problems"]
        assert "s ahead of this node's clock" in problem and status["writable"]


def test_a_large_rescued_is_in_the_status_and_a_problem(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)) as node:
        with Producer(node.api.endpoint) as producer:
            assert producer.send_sync("t", b"x" * 5000).level == "QUORUM_DISK"
        node.store.messages.archive(0, "1-0")
        assert 5000 < node.backend.status()["rescued_bytes"] < 20_000
        assert node.backend.status()["problems"] == []
        monkeypatch.setattr("hastore.store.rescue.LARGE_BYTES", 5000)
        node.store.messages.rescued.look()
        (problem,) = node.backend.status()["problems"]
        assert f"{tmp_path}/s/rescued takes" in problem
        shutil.rmtree(tmp_path / "s" / "rescued")
        node.store.messages.rescued.look()
        status = node.backend.status()
        assert (status["problems"], status["rescued_bytes"]) == ([], 0)


def test_a_restart_keeps_the_entries_and_begins_a_new_term(tmp_path: pathlib.Path) -> None:
    config = group_of_one(tmp_path / "s")
    with running(DLedgerNode(config, lambda: None)) as node:
        with Producer(node.api.endpoint) as producer:
            offsets = [producer.send_sync("t", b"%d" % n).offset for n in range(5)]
        term = node.backend.epoch()
    with running(DLedgerNode(config, lambda: None)) as node:
        assert node.backend.epoch() > term
        assert [epoch for epoch, _ in node.backend.history()] == [term, node.backend.epoch()]
        with Consumer("t", node.api.endpoint) as consumer:
            found = read(consumer, len(offsets))
        assert sorted(one.offset for one in found) == sorted(offsets)  # type: ignore[type-var]


def test_the_positions_of_a_group_are_kept(tmp_path: pathlib.Path) -> None:
    config = group_of_one(tmp_path / "s")
    with running(DLedgerNode(config, lambda: None)) as node:
        with Producer(node.api.endpoint) as producer:
            for n in range(5):
                producer.send_sync("t", b"%d" % n, queue=0)
        with Consumer("t", node.api.endpoint, group="g", queues=[0]) as consumer:
            assert [one.body for one in read(consumer, 3)] == [b"0", b"1", b"2"]
            consumer.commit()
    with running(DLedgerNode(config, lambda: None)) as node:
        with Consumer("t", node.api.endpoint, group="g", queues=[0]) as consumer:
            assert [one.body for one in read(consumer, 2)] == [b"3", b"4"]


def test_the_nodes_of_a_changed_file_are_followed(tmp_path: pathlib.Path) -> None:
    config = group_of_one(tmp_path / "s")
    added = NodeAddress(api="tcp://127.0.0.1:1", ha="127.0.0.1:2", http="127.0.0.1:3")
    changed = msgspec.structs.replace(
        config,
        nodes={**config.nodes, 2: added},
        dledger=DLedgerConfig(append_timeout_ms=9_000),
    )
    answers: list[Config | None] = []
    with running(DLedgerNode(config, lambda: answers.pop() if answers else None)) as node:
        answers.append(changed)
        node.wake()
        until(lambda: 2 in node.backend.master_map().nodes)
        status = node.backend.status()
        assert status["members"] == [1] and status["writable"]  # it is no member yet
        (pending,) = status["config_pending"]
        assert (pending["key"], pending["counts_from"]) == ("dledger.append_timeout", "restart")


def test_retention_removes_committed_files_and_tells_the_core(tmp_path: pathlib.Path) -> None:
    retention = RetentionConfig(max_size_bytes=65536, check_interval_ms=50)
    with running(
        DLedgerNode(group_of_one(tmp_path / "s", retention=retention), lambda: None)
    ) as node:
        with Producer(node.api.endpoint) as producer:
            for _ in range(40):
                producer.send_batch("t", [b"x" * 1_000] * 10)
            producer.flush()
        until(lambda: node.store.begin_index > 0)
        until(lambda: node.backend.status()["ledger_begin_index"] == node.store.begin_index)
        assert node.store.messages.min_offset == node.store.position(node.store.begin_index)
        with Producer(node.api.endpoint) as producer:
            assert producer.send_sync("t", b"after").level == "QUORUM_DISK"


def test_a_cut_while_retention_or_the_status_looks_at_the_followers_ends_no_thread(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new leader cuts what this one has appended last, and what its followers may have."""
    with running(DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)) as node:
        with Producer(node.api.endpoint) as producer:
            producer.send_sync("t", b"stays")
        store, real = node.store, node.store.end_position
        for asked in (node._needed_from, node.backend.status, node.backend.reading_nodes):
            store.append_own(OwnEntry(store.end_index + 1, store.end_term))
            end, due = store.end_index, [store.truncate]
            followers = [FollowerStatus(2, "APPEND", end, 0, able=True)]

            def end_position(
                index: int, end: int = end, due: list[Callable[[int], int]] = due
            ) -> int:
                if index == end and due:
                    due.pop()(end)
                return real(index)

            monkeypatch.setattr(node.driver, "followers", partial(list, followers))
            monkeypatch.setattr(store, "end_position", end_position)
            asked()
            assert store.end_index == end - 1
            monkeypatch.undo()


def test_a_follower_with_a_full_disk_is_not_in_sync(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no entry: a put that waits for it waits in vain, however little it lacks."""
    with running(DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)) as node:
        end, links = node.store.end_index, node.driver.links
        for full in (False, True):
            followers = [FollowerStatus(2, "APPEND", end, 0, able=not full, full=full)]
            monkeypatch.setattr(node.driver, "followers", partial(list, followers))
            for linked in (set(), {2}):
                monkeypatch.setattr(type(links), "linked", linked)
                (one,) = node.backend.status()["slaves"]
                assert one["in_sync"] is bool(linked and not full), one
                assert one["full"] is bool(linked and full)
        assert node.backend.reading_nodes() == []
        monkeypatch.undo()


def test_a_follower_whose_disk_was_lost_is_not_in_sync_before_it_counts(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In quarantine it may have every entry of a short log, and still no put counts it."""
    with running(DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)) as node:
        end, links = node.store.end_index, node.driver.links
        monkeypatch.setattr(type(links), "linked", {2})
        for index in (-1, end):
            followers = [FollowerStatus(2, "APPEND", index, end - index, able=True)]
            monkeypatch.setattr(node.driver, "followers", partial(list, followers))
            (one,) = node.backend.status()["slaves"]
            assert (one["ack_index"], one["in_sync"]) == (index, index == end)
            assert node.backend.reading_nodes() == ([2] if index == end else [])
        monkeypatch.undo()


def test_a_disk_that_hangs_is_not_in_sync_and_a_problem(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower's, whose link is open, and the node's own."""
    with running(DLedgerNode(group_of_one(tmp_path / "s"), lambda: None)) as node:
        end, links = node.store.end_index, node.driver.links
        monkeypatch.setattr(type(links), "linked", {2})
        for silent in (False, True):
            followers = [FollowerStatus(2, "APPEND", end, 0, able=not silent, silent=silent)]
            monkeypatch.setattr(node.driver, "followers", partial(list, followers))
            (one,) = node.backend.status()["slaves"]
            assert (one["in_sync"], one["answers"]) == (not silent, not silent)
            assert node.backend.reading_nodes() == ([] if silent else [2])
        status = node.backend.status()
        assert (status["sync_hangs"], status["problems"]) == (False, [])
        monkeypatch.setattr(FlushService, "running_ms", 2 * flush.HANGS_MS)
        status = node.backend.status()
        assert status["sync_hangs"]
        assert "a sync of the log has not returned" in status["problems"][0]
        margins = []
        for hangs in (False, True):
            page = page_of(status)
            add_status(page, status | {"sync_hangs": hangs})
            text = page.render().decode()
            margins += [x.split()[-1] for x in text.splitlines() if "quorum_margin{" in x]
        assert [float(one) for one in margins] == [0, -1]
        monkeypatch.undo()
    config = group_of_one(tmp_path / "a", flush=Flush.ASYNC)
    with running(DLedgerNode(config, lambda: None)) as node:
        monkeypatch.setattr(FlushService, "running_ms", 2 * flush.HANGS_MS)
        status = node.backend.status()
        assert not status["sync_hangs"], "no put waits for a sync"
        assert "a sync of the log has not returned" in str(status["problems"])
        monkeypatch.undo()


def test_the_next_offset_of_a_quiet_queue_outlives_retention(tmp_path: pathlib.Path) -> None:
    retention = RetentionConfig(max_size_bytes=65536, check_interval_ms=10)
    config = group_of_one(tmp_path / "s", retention=retention)
    with running(DLedgerNode(config, lambda: None)) as node:
        with Producer(node.api.endpoint) as producer:
            for _ in range(10):
                producer.send_sync("quiet", b"q", queue=0)
            end = node.store.messages.max_offset
            for _ in range(40):
                producer.send_batch("t", [b"x" * 1_000] * 10)
            producer.flush()
        until(lambda: node.store.messages.min_offset > end)
    shutil.rmtree(tmp_path / "s" / "consumequeue")
    with running(DLedgerNode(config, lambda: None)) as node:
        with Producer(node.api.endpoint) as producer:
            assert producer.send_sync("quiet", b"q", queue=0).queue_offset == 10


def test_what_retention_has_removed_was_not_cut_by_a_failover(tmp_path: pathlib.Path) -> None:
    """The history of a log of entries begins where the log does: it cannot tell what was before."""
    retention = RetentionConfig(max_size_bytes=65536, check_interval_ms=10)
    config = group_of_one(tmp_path / "s", retention=retention)

    def goes_on(node: DLedgerNode, group: Consumer, at: Position) -> None:
        with Producer(node.api.endpoint) as producer:
            for _ in range(40):
                producer.send_batch("t", [b"x" * 1_000] * 10)
            producer.flush()
            until(lambda: node.store.messages.min_offset > (at.offset or 0))
            sent = producer.send_sync("quiet", b"q", queue=0)
        (found,) = read(group, 1)
        assert found.queue_offset == sent.queue_offset == at.queue_offset

    with running(DLedgerNode(config, lambda: None)) as node:
        with Producer(node.api.endpoint) as producer:
            for _ in range(10):
                producer.send_sync("quiet", b"q", queue=0)
        with (
            Consumer("quiet", node.api.endpoint, group="g", queues=[0]) as group,
            Consumer("quiet", node.api.endpoint, group="g", queues=[0]) as behind,
        ):
            assert len(read(behind, 3)) == 3
            places = [one.next_position for one in read(group, 10)]
            group.commit()
            goes_on(node, group, places[9])
            with pytest.raises(PositionBehindError, match="at 10 in queue 0, the commit at 3"):
                behind.commit()
            group.seek(0, places[4])
            with pytest.raises(PositionLostError, match="is before the first one kept, 10"):
                group.poll(10, timeout_s=20)
    with running(DLedgerNode(config, lambda: None)) as node:  # of another term
        with Consumer("quiet", node.api.endpoint, queues=[0]) as behind:
            behind.seek(0, 10)
            with Consumer("quiet", node.api.endpoint, group="g", queues=[0]) as group:
                group.seek(0, read(behind, 1)[0].next_position)
                group.commit()
                goes_on(node, group, behind.position(0))


def test_a_store_of_the_other_mode_is_refused(tmp_path: pathlib.Path) -> None:
    with running(DLedgerNode(group_of_one(tmp_path / "d"), lambda: None)):
        pass
    classic = Node(config_of(tmp_path / "d"), lambda: None)
    with pytest.raises(StoreError, match="is a log of mode dledger"):
        classic.start()
    with running(Node(config_of(tmp_path / "c"), lambda: None)) as classic:
        with Producer(classic.api.endpoint) as producer:
            producer.send_sync("t", b"x")
    with pytest.raises(StoreError, match="is a log of mode classic"):
        DLedgerNode(group_of_one(tmp_path / "c"), lambda: None).start()
    with running(
        DLedgerNode(group_of_one(tmp_path / "d"), lambda: None)
    ):  # neither attempt left a lock behind
        pass


def test_the_place_of_a_broken_off_restore_is_refused(tmp_path: pathlib.Path) -> None:
    """A node began an empty log there, and acknowledged messages; a restore refused it then."""
    (tmp_path / "s" / "restoring.tmp" / "hastore").mkdir(parents=True)
    config = group_of_one(tmp_path / "s")
    for node in (Node(config_of(tmp_path / "s"), lambda: None), DLedgerNode(config, lambda: None)):
        with pytest.raises(StoreError, match="give `hastore restore` again"):
            node.start()
        assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["lock", "restoring.tmp"]
    (tmp_path / "s" / "hastore").mkdir()
    (tmp_path / "s" / "hastore" / "node.json").write_text("{}")
    with pytest.raises(StoreError, match="give `hastore restore` again"):
        recover_group(config, unsafe=True)


def test_a_recovery_tells_the_term_of_the_last_entry_not_of_the_last_vote(
    tmp_path: pathlib.Path,
) -> None:
    """A node that voted in a later term may lack what one that did not vote has acknowledged."""
    config = group_of_one(tmp_path / "s")
    with (
        running(DLedgerNode(config, lambda: None)) as node,
        Producer(node.api.endpoint) as producer,
    ):
        producer.send_sync("t", b"x")
        term, last = node.backend.epoch(), node.backend.status()["ledger_end_index"]
    store = DLedgerMmapFileStore(config.store, node=1, fs=REAL, store_host=store_host(config))
    store.messages.lock()
    store.open()
    store.save_hard_state(HardState(term + 7, None), remembers=True)
    store.close()

    found = recover_group(config, unsafe=False)
    assert (found.end_term, found.end_index, found.term) == (term, last, term + 7)
    assert f"the last entry of this store is {last}, of term {term}" in recovery_text(found)
    done = recover_group(config, unsafe=True)
    assert (done.end_term, done.end_index) == (term, last) and done.term > term + 60_000
    assert f"the last entry of this store was {last}, of term {term}" in recovery_text(done)


def test_clients_of_the_lost_nodes_go_on_with_the_recovered_group(
    tmp_path: pathlib.Path,
) -> None:
    """The lost nodes had elections that the store which is left knows nothing of.

    Clients take no leader of an earlier term than the last that they saw. And if the recovered
    group used one of those terms again, a reader would take its place there for one in this log.
    """
    ports = Ports()
    nodes = {1: NodeAddress(**ports.addresses(1)[1])}
    config = msgspec.structs.replace(group_of_one(tmp_path / "s"), nodes=nodes)
    api = config.nodes[1].api
    with running(DLedgerNode(config, lambda: None)), Producer(api) as first:
        first.send_sync("t", b"0", queue=0)
    shutil.copytree(tmp_path / "s", tmp_path / "left")  # this node is cut off from now on
    with Producer(api, delivery_timeout_s=60) as producer, Consumer("t", api) as consumer:
        for body in (b"1", b"2", b"3"):
            with running(DLedgerNode(config, lambda: None)) as node:
                producer.send_sync("t", body, queue=0)
                if body == b"1":
                    assert [one.body for one in read(consumer, 2)] == [b"0", b"1"]
                lost_term = node.backend.epoch()
        shutil.rmtree(tmp_path / "s")
        (tmp_path / "left").rename(tmp_path / "s")
        recover_group(config, unsafe=True)
        with running(DLedgerNode(config, lambda: None)) as node:
            assert node.backend.epoch() > lost_term
            for body in (b"after", b"more", b"last"):
                producer.send_sync("t", body, queue=0)
            with pytest.raises(PositionLostError) as lost:
                read(consumer, 1)
            consumer.seek(0, lost.value.common)
            bodies: list[bytes] = []
            while bodies[-1:] != [b"last"]:
                bodies += [one.body for one in read(consumer, 1)]
            assert bodies[-3:] == [b"after", b"more", b"last"]
    ports.close()


def test_a_recovery_leaves_the_store_to_those_who_may_read_it(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "s"
    config = group_of_one(root, group_read=True)
    with running(DLedgerNode(config, lambda: None, fs=GROUP_READABLE)):
        pass
    recover_group(config, unsafe=True)
    shared = {"hastore": 0o750, "dledger-n1": 0o750, "hastore/node.json": 0o640}
    assert {name: (root / name).stat().st_mode & 0o777 for name in shared} == shared


def test_a_log_of_dledger_under_another_id_is_refused_not_ignored(tmp_path: pathlib.Path) -> None:
    config = group_of_one(tmp_path / "d")
    with (
        running(DLedgerNode(config, lambda: None)) as node,
        Producer(node.api.endpoint) as producer,
    ):
        producer.send_sync("t", b"x")
    (tmp_path / "d" / "dledger-n1").rename(tmp_path / "d" / "dledger-n0")  # as RocketMQ names it
    with pytest.raises(StoreError, match="keeps its log in dledger-n1: rename"):
        DLedgerNode(config, lambda: None).start()
    (tmp_path / "d" / "dledger-n0").rename(tmp_path / "d" / "dledger-n1")
    with (
        running(DLedgerNode(config, lambda: None)) as node,
        Consumer("t", node.api.endpoint) as consumer,
    ):
        assert [one.body for one in read(consumer, 1)] == [b"x"]


def test_a_node_that_is_long_without_a_leader_asks_whether_it_was_removed() -> None:
    """And not more often than it takes to elect one."""
    now, asked, removed = [0.0], [], []
    core = SimpleNamespace(leader=None)
    driver = SimpleNamespace(
        core=core,
        outdated=lambda: removed[-1] if removed else None,
        links=SimpleNamespace(ask_callers=lambda: asked.append(now[0])),
    )
    service = GroupService(
        driver,  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        lambda: None,
        SimpleNamespace(monotonic_ms=lambda: now[0]),  # type: ignore[arg-type]
        on_failure=raise_failure,
    )
    service._asks_ms = 3_000.0
    for tick in range(0, 10_000, 500):
        now[0] = float(tick)
        core.leader = 2 if tick == 4_000 else None
        service._ask_if_alone(3_000.0)
    assert asked == [3_000.0, 7_000.0]
    removed.append("it was removed")
    now[0] = 20_000.0
    service._ask_if_alone(3_000.0)
    assert asked == [3_000.0, 7_000.0]


def test_a_store_that_the_version_before_has_written_forgets_whom_it_has_met(
    tmp_path: pathlib.Path,
) -> None:
    """The whole group went back, and comes again node by node: the others are old again."""
    root = tmp_path / "s"
    with running(DLedgerNode(group_of_one(root), lambda: None)) as node:
        assert node.state.data.proved_only
        node.state.save(proved_nodes=(2, 3))
    with running(DLedgerNode(group_of_one(root), lambda: None)) as node:  # a restart forgets none
        assert node.state.data.proved_only and node.state.data.proved_nodes == (2, 3)
    path = root / "hastore" / "entries.json"
    facts = json.loads(path.read_bytes())
    assert facts.pop("proves_first")  # the version before writes only the fields that it knows
    path.write_text(json.dumps(facts))
    with running(DLedgerNode(group_of_one(root), lambda: None)) as node:
        assert not node.state.data.proved_only and node.state.data.proved_nodes == ()
        assert node.state.may_be_old((2, 3), 2)
        node.state.learn_proved(2)
    with running(DLedgerNode(group_of_one(root), lambda: None)) as node:
        assert node.state.data.proved_nodes == (2,)
    path.write_text(json.dumps(facts))
    identity = root / "hastore" / "node.json"
    identity.unlink()
    with pytest.raises(StoreError, match="node.json is missing"):
        DLedgerNode(group_of_one(root), lambda: None).start()
    assert not identity.exists()
