"""What replication counts: links by peer, promotions, round trips."""

from __future__ import annotations

from collections.abc import Callable

from hastore.ha.master.ha_service import TIMED_EVERY
from tests.ha.nodes import Group, wait_for


def test_links_promotions_and_round_trips_are_counted(make_group: Callable[..., Group]) -> None:
    group = make_group(2)
    master, slave = group.start(1), group.start(2)
    master.promote()
    slave.follow()
    wait_for(lambda: master.ha.can_confirm(flushed=False) is None)
    for number in range(20 * TIMED_EVERY):
        assert master.put_confirmed(b"%d" % number)[0] == "PUT_OK"
    ours, theirs = master.member.counts, slave.member.counts
    assert (ours.promotions, theirs.promotions) == (1, 0)
    assert ours.links.items() == [("2", 1)] and theirs.links.items() == [("1", 1)]
    wait_for(lambda: sum(ours.round_trips.times.counts) >= 10)
    assert sum(theirs.round_trips.times.counts) == 0
    slave.unfollow()
    wait_for(lambda: not master.ha.slaves())
    assert not ours.round_trips.waiting, "what was on its way when the link ended is no sample"
    slave.follow()
    wait_for(lambda: ours.links.items() == [("2", 2)])
