"""Restored nodes: nobody loses what was acknowledged, and none counts for what it does not have."""

import os

import msgspec
import pytest

from hastore.backup.backups import find_backup
from hastore.backup.restore import RESTORING, check_restore
from hastore.backup.target import open_target
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Role
from hastore.errors import (
    ConfigError,
    PromotionRefused,
    StoreBrokenError,
    StoreFullError,
    UsageError,
)
from hastore.fs.filesystem import REAL, RealFileSystem
from hastore.ha.master.group_transfer import Need
from hastore.ha.rules.epochs import WrittenOver, epoch_node, last_epoch, later_life
from hastore.store.state.marker_files import restore_problem
from tests.backup.kit import (
    FILE_SIZE,
    Group,
    as_slave,
    fill,
    in_step,
    restore,
    running,
    state_of,
    take,
    wait_for,
)
from tests.ha.nodes import HaNode
from tests.store.kit import log_file, scribble


@pytest.fixture
def place(tmp_path):
    return tmp_path / "backups"


@pytest.fixture
def trio(tmp_path):
    """A pair that runs; a third node is in its list, and has no store yet."""
    group = Group(tmp_path, 3)
    pair = {number: group.addresses[number] for number in (1, 2)}
    try:
        master, slave = group.start(1, nodes=pair), group.start(2, nodes=pair)
        master.promote()
        slave.follow()
        wait_for(lambda: slave.linked)
        yield group, master, slave
    finally:
        group.stop()


def grow(*nodes, to):
    """Let running nodes know the third one, as after an edit of their files."""
    for node in nodes:
        node.member.learn_nodes(to)


def test_a_new_member_copies_only_what_came_later(trio, place):
    group, master, slave = trio
    fill(master, 3 * FILE_SIZE)
    in_step(master, slave)
    REAL.replace_bytes(f"{slave.config.store.root}/hastore/positions", b"what retention removed")
    REAL.make_dirs(f"{slave.config.store.root}/config")
    REAL.replace_bytes(f"{slave.config.store.root}/config/topics.json", b"{}")
    REAL.replace_bytes(f"{slave.config.store.root}/config/mine.json", b"not the store's")
    slave.state.save(aside=3)  # the saved positions count only for this part of the store
    manifest = take(slave.config, place).manifest
    fill(master, 4 * FILE_SIZE, b"later" * 100)
    config = restore(as_slave(group.config(3)), place)
    root = config.store.root
    assert sorted(os.listdir(root)) == ["commitlog", "config", "hastore", "lock"]
    assert os.listdir(f"{root}/config") == ["topics.json"]
    assert REAL.read_bytes(f"{root}/hastore/positions") == b"what retention removed"
    data = state_of(config, REAL).data
    assert data.unclean and data.store_id not in manifest.stores and data.aside == 3
    assert data.known_stores == {1: master.state.data.store_id, 2: slave.state.data.store_id}

    grow(master, slave, to=group.addresses)
    node = group.start(3, role=Role.SLAVE)
    assert node.store.max_offset == manifest.end_offset
    assert node.store.confirmed_offset == manifest.confirmed_offset
    node.follow()
    in_step(master, slave, node)
    assert node.bytes() == master.bytes() and node.state.history == master.state.history
    assert node.state.data.aside == 3 and not REAL.exists(f"{root}/rescued"), "it was no resync"
    wait_for(lambda: not node.state.data.unclean)


def test_a_new_member_whose_backup_has_a_lost_tail_is_rewound(trio, place):
    """Node 1 had acknowledged messages alone (acks=1), was backed up, and lost its role."""
    group, master, slave = trio
    fill(master, FILE_SIZE)
    in_step(master, slave)
    slave.unfollow()
    master.ha.set_sync(False)
    common = master.store.max_offset
    fill(master, 2 * FILE_SIZE, b"alone" * 100)
    wait_for(lambda: master.store.readable_offset == master.store.max_offset)
    manifest = take(master.config, place).manifest
    assert manifest.end_offset > common >= manifest.confirmed_offset
    master.stop()
    slave.promote(force_unclean=True)
    fill(slave, 3 * FILE_SIZE, b"after" * 100)
    node = HaNode(restore(as_slave(group.config(3)), place), None)
    group.started.append(node)
    grow(slave, to=group.addresses)
    node.follow()
    wait_for(lambda: node.store.max_offset == slave.store.max_offset, "the rewind")
    assert node.bytes() == slave.bytes()
    assert os.listdir(f"{node.config.store.root}/rescued"), "the tail is kept"


def test_a_restored_node_does_not_count_for_what_it_does_not_have(trio, place):
    """What was confirmed after the backup is on nodes 1 and 2; node 1 is gone for good."""
    group, master, slave = trio
    fill(master, FILE_SIZE)
    in_step(master, slave)
    take(slave.config, place)
    assert master.put_confirmed(b"later", need=Need.SLAVES)[0] == "PUT_OK"
    in_step(master, slave)
    end = master.store.max_offset
    config = restore(as_slave(group.config(3)), place)
    grow(slave, to=group.addresses)
    node = group.start(3, role=Role.SLAVE)
    master.stop()
    slave.unfollow()
    with pytest.raises(PromotionRefused, match="unclean: node 3"):
        node.promote(msgspec.structs.replace(config, nodes=group.addresses))
    # Node 2 has it, and does not count node 3 either: the new list needs all, the old one node 2.
    with pytest.raises(PromotionRefused, match="waiting for node 1"):
        slave.promote(msgspec.structs.replace(slave.config, nodes=group.addresses))
    # Even by force it copies what node 2 has before it opens.
    entry = node.promote(force_unclean=True)
    assert entry.start == end and node.bytes() == slave.bytes()


def test_a_restored_node_does_not_trust_what_was_in_force_at_its_backup(tmp_path, place):
    """Node 4 came after the backup, and has what node 1 lacks; the restored node knows neither."""
    group = Group(tmp_path, 4)
    old = {number: group.addresses[number] for number in (1, 2)}
    later = {number: group.addresses[number] for number in (1, 2, 4)}
    try:
        one, two = group.start(1, nodes=old), group.start(2, nodes=old)
        two.promote()
        one.follow()
        fill(two, FILE_SIZE)
        in_step(two, one)
        take(one.config, place)
        four = group.start(4, nodes=later)
        grow(one, two, to=later)
        four.follow()
        wait_for(lambda: four.linked)
        one.unfollow()  # it promises the epoch of the new list, and never follows it
        two.promote(msgspec.structs.replace(two.config, nodes=later))
        wait_for(lambda: four.state.last_epoch == two.state.last_epoch)
        assert one.state.data.promised_epoch == two.state.last_epoch
        assert two.put_confirmed(b"on 2 and 4", need=Need.SLAVES)[0] == "PUT_OK"
        two.stop()
        four.stop()
        # Its file has only node 1: with the list of the backup that would be enough.
        wrong = {number: group.addresses[number] for number in (1, 3)}
        restore(as_slave(group.config(3, nodes=wrong)), place)
        grow(one, to=wrong)
        node = group.start(3, nodes=wrong, role=Role.SLAVE)
        with pytest.raises(PromotionRefused, match="unclean: node 3"):
            node.promote(msgspec.structs.replace(node.config, role=Role.SYNC_MASTER))
    finally:
        group.stop()


def test_the_only_one_left_begins_a_new_life(tmp_path, place):
    with running(tmp_path, 2) as group:
        master, slave = group.started
        fill(master, 2 * FILE_SIZE)
        in_step(master, slave)
        manifest = take(slave.config, place).manifest
        log = master.bytes()
        fill(master, 3 * FILE_SIZE)
        in_step(master, slave)
        for _ in range(3):  # the old life has later epochs, which no backup has
            slave.unfollow()
            master.promote()
            slave.follow()
            wait_for(lambda: slave.linked)
        old = master.state.last_epoch
        master.stop()
        slave.stop()
    new = Group(tmp_path / "new", 4)
    alone = {3: new.addresses[3]}
    try:
        restore(new.config(3, nodes=alone), place, as_only=True)
        node = new.start(3, nodes=alone)
        assert node.bytes() == log and node.state.data.known_stores == {}
        assert not node.state.data.unclean
        entry = node.promote()
        assert entry.epoch > old and epoch_node(entry.epoch) == 3
        assert entry.start == manifest.end_offset and entry.nodes == (3,)
        assert node.state.history[:-1] == manifest.node.history
        assert node.put_confirmed(b"the new life")[0] == "PUT_OK"
    finally:
        new.stop()


def test_the_only_one_left_may_be_a_slave_that_was_refused(tmp_path, place):
    """Its operator has accepted the loss already, and no node with other bytes is left."""
    with running(tmp_path, 2) as group:
        master, slave = group.started
        fill(master, 2 * FILE_SIZE)
        in_step(master, slave)
        begin, epoch = FILE_SIZE, slave.state.last_epoch
        slave.state.note_written_over(WrittenOver(epoch, begin, 1))
        take(slave.config, place)
        log = master.bytes()
    new = Group(tmp_path / "new", 4)
    alone = {3: new.addresses[3]}
    try:
        restore(new.config(3, nodes=alone), place, as_only=True)
        node = new.start(3, nodes=alone)
        entry = node.promote()
        *_, own, _ = node.state.history
        assert node.bytes() == log and own.start == begin
        assert epoch < own.epoch < entry.epoch  # whoever has other bytes there parts there
        assert node.put_confirmed(b"the new life")[0] == "PUT_OK"
    finally:
        new.stop()


@pytest.fixture
def survivor(tmp_path, place):
    """A group of which a backup was restored as the only one left, though node 2 was not lost.

    Yields the new master, node 3, and node 2 with what was confirmed after the backup; by mistake
    each has the other in its list.
    """
    with running(tmp_path, 2) as group:
        master, slave = group.started
        fill(master, FILE_SIZE)
        in_step(master, slave)
        take(slave.config, place)
        fill(master, 2 * FILE_SIZE)
        in_step(master, slave)
    both = Group(tmp_path, 3)
    nodes = {number: both.addresses[number] for number in (2, 3)}
    alone = {3: both.addresses[3]}
    try:
        restore(both.config(3, nodes=alone), place, as_only=True)
        node = both.start(3, nodes=alone)
        node.promote()
        node.put(b"the new life")
        grow(node, to=nodes)
        yield node, both.start(2, nodes=nodes)
    finally:
        both.stop()


def test_a_survivor_keeps_what_was_confirmed(survivor):
    node, old = survivor
    before = old.bytes()
    assert old.store.confirmed_offset > node.state.history[-1].start
    old.follow()
    wait_for(lambda: old.client.problem and "disagree" in old.client.problem, "the refusal")
    assert old.bytes() == before and old.store.confirmed_offset == len(before)


def test_a_survivor_that_is_promoted_cuts_neither_log(survivor):
    """The epoch of the new life is later, so the survivor would have to give up its own end."""
    node, old = survivor
    before, new = old.bytes(), node.bytes()
    with pytest.raises(PromotionRefused, match="disagrees"):
        old.promote()
    assert old.bytes() == before and node.bytes() == new


def test_two_lives_from_one_backup_have_no_common_epoch(trio, tmp_path, place):
    group, master, slave = trio
    master.put(b"one")
    in_step(master, slave)
    take(slave.config, place)
    promised = []
    for number, later_s in ((7, 0), (8, 60)):

        class Clock:
            monotonic_ms = SYSTEM_CLOCK.monotonic_ms

            def wall_ms(self, more=later_s):
                return SYSTEM_CLOCK.wall_ms() + 1000 * more

        config = group.config(number, nodes={number: group.addresses[1]})
        restore(config, place, as_only=True, clock=Clock())
        promised.append(state_of(config, REAL).data.promised_epoch)
    assert promised[0] < promised[1] and promised[0] >> 16 < promised[1] >> 16
    assert later_life(5, 0) == 5 + 65536 and later_life(2**40, 10**13) > 2**40


def test_what_must_not_be_restored(trio, place):
    group, master, slave = trio
    master.put(b"one")
    in_step(master, slave)
    take(slave.config, place)
    manifest = find_backup(open_target(str(place)))
    good = as_slave(group.config(3))
    check_restore(good, manifest, as_only=False)

    def refused(match, config, as_only=False, kind=UsageError):
        with pytest.raises(kind, match=match):
            check_restore(config, manifest, as_only=as_only)
        with pytest.raises(kind, match=match):
            restore(config, place, as_only=as_only)
        assert not REAL.exists(f"{config.store.root}/commitlog") or config.node != 3

    refused("node number 1 was used", as_slave(group.config(1)))
    refused("node number 2 was used", as_slave(group.config(2)), as_only=True)
    refused("node 1, 2 of the old group", good, as_only=True)
    refused("role: SYNC_MASTER", group.config(3))
    refused("lists no other node", as_slave(group.config(3, nodes={3: group.addresses[3]})))
    refused("group is", as_slave(group.config(3, group="h")), kind=ConfigError)
    size = {"commitlog_file_size": 2 * FILE_SIZE}
    refused("commitlog_file_size is", as_slave(group.config(3, store=size)), kind=ConfigError)


def test_only_an_empty_store_is_restored_into(trio, place):
    group, master, slave = trio
    master.put(b"one")
    in_step(master, slave)
    take(slave.config, place)
    config = as_slave(group.config(3))
    REAL.make_dirs(f"{config.store.root}/commitlog")
    with pytest.raises(UsageError, match="is not empty, it has commitlog"):
        restore(config, place)
    assert REAL.list_dir(config.store.root) == ["commitlog", "lock"]


def test_what_a_broken_off_restore_left_is_no_reason_to_remove_a_store(trio, place):
    """A node of mode dledger has begun there since, under any number."""
    group, master, slave = trio
    master.put(b"one")
    in_step(master, slave)
    take(slave.config, place)
    config = as_slave(group.config(3))
    root = config.store.root
    for path in ("dledger-n3/data", f"{RESTORING}/hastore", "hastore"):
        REAL.make_dirs(f"{root}/{path}")
    REAL.replace_bytes(f"{root}/hastore/votes.json", b"{}")
    with pytest.raises(UsageError, match="is not empty, it has dledger-n3"):
        restore(config, place)
    assert REAL.read_bytes(f"{root}/hastore/votes.json") == b"{}"
    REAL.remove_tree(f"{root}/dledger-n3")
    restore(config, place)  # `hastore` alone is what a restore leaves
    assert sorted(os.listdir(root)) == ["commitlog", "hastore", "lock"]


def test_a_damaged_backup_is_not_restored(trio, place):
    group, master, slave = trio
    fill(master, 2 * FILE_SIZE)
    in_step(master, slave)
    manifest = take(slave.config, place).manifest
    config = as_slave(group.config(3))
    path = place / manifest.log[1].name
    scribble(path, path.stat().st_size - 1, b"!")
    with pytest.raises(StoreBrokenError, match=path.name):
        restore(config, place)
    assert REAL.list_dir(config.store.root) == ["lock"]


class Crash(BaseException):
    """The process dies."""


class Dying(RealFileSystem):
    """Ends the process at the n-th change of a name or a sync."""

    def __init__(self, steps):
        self.steps = steps

    def step(self):
        self.steps -= 1
        if self.steps < 0:
            raise Crash

    def rename(self, source, target):
        self.step()
        super().rename(source, target)

    def sync_dir(self, path):
        self.step()
        super().sync_dir(path)

    def create_new(self, path):
        self.step()
        return super().create_new(path)

    def remove_tree(self, path):
        self.step()
        super().remove_tree(path)


def test_a_crash_leaves_no_store_that_a_node_would_start_with(trio, place):
    group, master, slave = trio
    fill(master, FILE_SIZE)
    in_step(master, slave)
    manifest = take(slave.config, place).manifest
    config = as_slave(group.config(3))
    root, steps = config.store.root, 0
    while True:
        try:
            restore(config, place, fs=Dying(steps))
            break
        except Crash:
            steps += 1
        there = REAL.list_dir(root)
        in_place = "commitlog" in there
        refused = restore_problem(REAL, root) is not None
        assert refused == (RESTORING in there and not in_place), (steps, there)
        if in_place:  # it was put in place, and has all
            assert "hastore" in there
            left = f"{root}/{RESTORING}"
            assert not REAL.exists(left) or not REAL.list_dir(left)
            break
        if "hastore" in there:
            with pytest.raises(StoreBrokenError, match="no file is there"):
                HaNode(config, None)
            assert REAL.list_dir(f"{root}/commitlog") == []  # which the start has made
    assert steps > 10
    node = group.start(3, role=Role.SLAVE)
    assert node.bytes() == slave.bytes(0, manifest.end_offset)


def test_a_node_that_began_beside_what_a_restore_left_is_let_be(trio, place):
    """Earlier versions started there, and what they have acknowledged is in the log."""
    group, master, slave = trio
    master.put(b"one")
    in_step(master, slave)
    take(slave.config, place)
    config = as_slave(group.config(3))
    root = config.store.root
    REAL.make_dirs(f"{root}/{RESTORING}/commitlog")
    assert "give `hastore restore` again" in str(restore_problem(REAL, root))
    for name in ("hastore", "commitlog"):
        REAL.make_dirs(f"{root}/{name}")
    REAL.replace_bytes(f"{root}/commitlog/{0:020}", b"acknowledged")
    assert restore_problem(REAL, root) is None
    with pytest.raises(UsageError, match="is not empty, it has commitlog"):
        restore(config, place)
    assert REAL.read_bytes(f"{root}/commitlog/{0:020}") == b"acknowledged"


def test_a_full_disk(trio, place):
    group, master, slave = trio
    master.put(b"one")
    in_step(master, slave)
    take(slave.config, place)

    class Small(RealFileSystem):
        def free_bytes(self, path):
            return 1000

    config = as_slave(group.config(3))
    with pytest.raises(StoreFullError, match="1,000 bytes free"):
        restore(config, place, fs=Small())
    assert REAL.list_dir(config.store.root) == ["lock"]


def test_what_remains_of_a_log_whose_beginning_was_removed(tmp_path, place):
    with running(tmp_path, 1) as group:
        node = group.started[0]
        fill(node, 3 * FILE_SIZE)
        node.stop()
        os.remove(log_file(node.config.store.root, 0))
        manifest = take(node.config, place).manifest
        assert manifest.start_offset == FILE_SIZE
        new = Group(tmp_path / "new", 5)
        try:
            alone = {5: new.addresses[5]}
            restore(new.config(5, nodes=alone), place, as_only=True)
            restored = new.start(5, nodes=alone)
            assert restored.store.min_offset == FILE_SIZE
            assert restored.store.max_offset == manifest.end_offset
            assert last_epoch(restored.state.history) == last_epoch(manifest.node.history)
        finally:
            new.stop()
