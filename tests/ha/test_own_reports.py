"""What a slave knows by its own reports, and says with them: in groups of the simulation."""

import contextlib
import logging

import msgspec
import pytest

from hastore.ha.node.member import Member
from tests.ha.simulation import SimConnection, World, installed
from tests.ha.test_flips import Flips, follow_until


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def version_before(monkeypatch):
    """All nodes say HELLO as the version before does."""
    hello = Member.hello

    def old(self, purpose, **extra):
        said = hello(self, purpose, **extra)
        return msgspec.structs.replace(said, readers=False, counts_written=False)

    monkeypatch.setattr(Member, "hello", old)


@pytest.fixture
def begin():
    """Return a group and its master, with one record; node 2 has followed and got it."""
    with contextlib.ExitStack() as stack:

        def make(acks, *, waits=True, **more):
            group = Flips(7, world=World(7, nodes=3, acks=acks, crash_rate=0.0, **more))
            stack.enter_context(installed(group.world))
            master = group.promote(1)
            group.put(master)
            group.node(2).store.on_readers = lambda: waits
            return group, master, follow_until(group, master, 2, master.store.max_offset)

        yield make


def report(group, master):
    """Let the master count all reports; return the connection of node 2."""
    found: list[SimConnection] = [c for c in group.world.connections if not c.closed]
    [link] = found
    while link.to_master:
        group.world.do_report(master)
    return link


def test_a_slave_knows_before_its_master_what_it_has_confirmed(begin):
    group, master, two = begin(1)
    end = master.store.max_offset
    assert two.store.confirmed_offset == two.store.readable_offset == end
    assert master.store.confirmed_offset == 0
    report(group, master)
    assert master.store.confirmed_offset == end


def test_without_a_reader_it_waits_for_its_master_s_word_and_takes_nothing_back(begin):
    """Each write of the limits costs it time, beside the puts."""
    group, master, two = begin(1, waits=False)
    assert two.store.max_offset > 0 == two.store.confirmed_offset == two.store.readable_offset
    two.store.on_readers = lambda: True
    group.put(master)
    while two.store.max_offset < master.store.max_offset:
        group.world.do_send(master)
        group.world.do_receive(two)
    shown = two.store.max_offset
    assert two.store.readable_offset == two.store.confirmed_offset == shown
    two.store.on_readers = lambda: False
    report(group, master)
    group.put(master)
    while two.store.max_offset < master.store.max_offset:
        group.world.do_send(master)
        group.world.do_receive(two)
    assert two.store.readable_offset == two.store.confirmed_offset == shown


@pytest.mark.parametrize(("acks", "flushed"), [(2, False), (1, True)])
def test_where_it_cannot_know_it_waits_for_its_master(begin, acks, flushed):
    group, _, two = begin(acks, flushed=flushed)
    assert two.store.max_offset > 0 == two.store.confirmed_offset == two.store.readable_offset
    assert group.world.counts.get("own", 0) == 0


def test_of_a_master_of_the_version_before_it_believes_only_what_it_says(version_before, begin):
    group, master, two = begin(1)
    assert two.store.max_offset > 0 == two.store.confirmed_offset
    report(group, master)
    while two.store.confirmed_offset < master.store.max_offset:
        group.world.do_send(master)
        group.world.do_receive(two)


def test_it_says_whether_readers_wait_for_what_it_cannot_know(begin):
    group, master, two = begin(2)
    for waits in (True, True, False, False, True):
        two.store.on_readers = lambda waits=waits: waits
        group.put(master)
        while two.store.max_offset < master.store.max_offset:
            group.world.do_send(master)
            group.world.do_receive(two)
        link = report(group, master)
        assert link.writer is not None and link.writer.at_once is waits
        assert link.ack_offset == master.store.max_offset


@pytest.mark.parametrize("acks", [1, 2])
def test_to_others_it_does_not_say_it(begin, acks, request):
    """To a master of the version before; nor to one whose word it does not need."""
    if acks == 2:
        request.getfixturevalue("version_before")
    group, master, two = begin(acks)
    two.store.on_readers = lambda: True
    group.put(master)
    while two.store.max_offset < master.store.max_offset:
        group.world.do_send(master)
        group.world.do_receive(two)
    link = report(group, master)  # a wrong report is a Violation
    assert link.writer is not None and not link.writer.at_once
