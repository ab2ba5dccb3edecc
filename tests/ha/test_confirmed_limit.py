"""A confirmed offset inside a record, or inside the blank before one, confirms no record.

So the node may rejoin its group. A node that knows a whole record beyond as confirmed may not.
"""

import logging

import pytest

from hastore.errors import GroupDisagrees
from hastore.ha.replica.rewind import cut_back
from hastore.ha.rules.epochs import EpochEntry
from hastore.protocol.ha_link import data_header
from tests.ha.nodes import FILE_SIZE
from tests.ha.simulation import Violation, installed
from tests.ha.test_flips import Flips


@pytest.fixture
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Retained(Flips):
    """Node 1 was master, and its slave had reported only part of the last record. The group has
    continued without it, and retention has passed the offset where the two logs part.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.common = 0

    def part(self, told_bytes: int) -> None:
        master = self.flip(1, 2)
        self.common = master.store.max_offset
        assert self.put(master) == self.common and master.store.max_offset == self.common + 2
        slave = self.node(2)
        link = slave.stream.connection
        body = bytes(master.store.data[self.common : self.common + told_bytes])
        link.writer.sent_offset = link.writer.reach_offset = self.common + told_bytes
        link.to_slave.append(data_header(self.common, told_bytes) + body)
        while link.to_slave:
            self.world.do_receive(slave)
        while master.store.confirmed_offset < self.common + told_bytes:
            self.world.do_report(master)
        master.die()

    def go_on(self) -> None:
        master = self.flip(2, 3)
        starts = [at for at, _ in master.store.records() if at > self.common]
        for node in self.up:
            node.store.min_offset = starts[1]


@pytest.mark.usefixtures("quiet")
def test_a_node_with_a_confirmed_part_of_a_record_may_rejoin():
    group = Retained()
    with installed(group.world):
        group.part(1)
        group.go_on()
        old, master = group.node(1), group.node(2)
        assert master.state.history[-1].start == group.common < old.store.confirmed_offset
        assert old.store.record_size(group.common) == 2
        old.start()
        group.stream(master)
        assert old.state.data.aside == 1 and not old.state.data.unclean
        assert (
            old.store.data[master.store.min_offset :]
            == (master.store.data[master.store.min_offset :])
        )


@pytest.mark.usefixtures("quiet")
def test_a_node_with_a_whole_confirmed_record_rejoins_only_with_accept_loss():
    """Node 1 alone has a confirmed record, as if the others had given it up."""
    group = Retained()
    with installed(group.world):
        group.part(1)
        group.go_on()
        old, master = group.node(1), group.node(2)
        old.store.set_limits(confirmed=group.common + 2)
        old.start()
        with pytest.raises(Violation, match="confirmed data up to 6.*hastore demote"):
            old.client._follow_once()
        assert not old.state.data.aside
        old.client.accept_loss = True
        group.stream(master)
        assert old.state.data.aside == 1


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("confirmed", "kept_out"), [(1, False), (2, True)])
def test_the_same_holds_for_a_log_that_shares_nothing(confirmed, kept_out):
    """All of the log would be cut, from the first record that retention has left."""
    group = Retained()
    with installed(group.world):
        group.part(1)
        group.go_on()
        old = group.node(1)
        old.store.min_offset = group.common
        old.state.save(history=(EpochEntry(1 << 16 | 3, 0, 1, (1, 2, 3)),))
        old.store.set_limits(confirmed=group.common + confirmed)
        old.start()
        if kept_out:
            with pytest.raises(Violation, match="confirmed data up to 6"):
                old.client._follow_once()
        else:
            group.stream(group.node(2))
        assert old.state.data.aside == (not kept_out)


def test_a_limit_inside_a_blank_protects_nothing(make_group):
    """Neither the record that did not fit in the file nor the blank before it is confirmed."""
    for part in ("blank", "its end", "record", "whole"):
        node = make_group().start(1)
        node.promote()
        node.put(b"a" * 100)
        while node.store.max_offset + 4096 < FILE_SIZE:
            cut = node.put(b"b" * 2000)
        node.put(b"c" * 4096)
        assert cut < FILE_SIZE < node.store.max_offset
        assert node.store.record_size(cut) is None and node.store.record_size(FILE_SIZE)
        node.member.step_down()
        node.ha.close_epoch("a test")
        confirmed = {
            "blank": cut + 10, "its end": FILE_SIZE, "record": FILE_SIZE + 100,
            "whole": node.store.max_offset,
        }[part]  # fmt: skip
        node.store.set_limits(confirmed=confirmed, readable=confirmed)
        entries = len(node.member.state.history)

        def back(node=node, cut=cut, entries=entries):
            cut_back(
                node.store, node.member.state, cut, entries, accept_loss=False, why="a test",
            )  # fmt: skip

        if part == "whole":
            with pytest.raises(GroupDisagrees):
                back()
        else:
            back()
            assert node.store.max_offset == cut == node.store.confirmed_offset
        node.stop()
