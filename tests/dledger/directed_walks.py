"""Walks that go where random ones hardly ever come: without a mistake they pass."""

from __future__ import annotations

import copy
from typing import Any

from msgspec.structs import replace

from hastore.dledger.core.events import ChangeMembers, DiskFull, Retained, Role, Transfer, Update
from hastore.dledger.links.identity import Group, Stores
from hastore.protocol.dledger import (
    Code,
    HeartBeatResponse,
    InstallRequest,
    MemberSet,
    PushResponse,
    PushType,
    TruncateRequest,
    VoteResponse,
    VoteResult,
)
from tests.dledger.sim_disk import SimDisk
from tests.dledger.simulation import (
    HEALED_WITHIN_MS,
    Crash,
    Plan,
    SimNode,
    Violation,
    World,
)

NEVER_MS = 1e12


class Recorded(World):
    """A world without chance faults that keeps every message."""

    def __init__(self, members: int, **options: Any) -> None:
        super().__init__(1, Plan(members=members, **options))
        self.sent: list[tuple[int, int, Any]] = []
        self.chaos = False
        self.start_all()
        self.until(lambda: self.leader() is not None and self._together())

    def send(self, source: int, target: int, message: Any, entries: Any = ()) -> None:
        self.sent.append((source, target, message))
        super().send(source, target, message, entries)

    def until(self, done: Any, ms: float = 20_000.0) -> None:
        assert self.run(self.now + ms, done), self.describe()

    def apart(self, *groups: tuple[SimNode, ...]) -> None:
        """Cut all links between the groups."""
        place = {node.number: n for n, group in enumerate(groups) for node in group}
        self.cuts = {(a, b) for a in place for b in place if place[a] != place[b]}

    def others(self, node: SimNode) -> list[SimNode]:
        return [each for each in self.nodes.values() if each is not node]


def three() -> tuple[Recorded, SimNode, SimNode, SimNode]:
    """Begin a group of three; return its world, the leader, and the two others."""
    world = Recorded(3)
    leader = world.leader()
    assert leader is not None
    b, c = world.others(leader)
    return world, leader, b, c


def an_answer_of_an_earlier_term_arrives() -> None:
    """A leader loses an unsynced entry that a follower has acknowledged, and leads again.

    Its new entry at that index is on no other node when the old answer arrives.
    """
    world, a, b, c = three()
    first_term, a.sync_ms = a.core_term, NEVER_MS
    world.apart((a, b), (c,))
    world.cuts.add((b.number, a.number))
    put = world.put(a)
    assert put is not None
    world.until(lambda: b.disk.durable == put.last)
    old = _last_append_answer(world, b, a, put.last)
    a.die()
    b.die()
    while a.disk.end == put.last:
        a.disk.lose_power(world.rng)
    a.sync_ms, world.cuts = 1.0, set()
    c.step(DiskFull(c.local_ms(), True))  # it votes, and takes no entries
    world.restart(a)
    world.until(lambda: a.role is Role.LEADER and a.core_term > first_term)
    world.until(lambda: a.disk.durable >= put.last)
    assert a.committed < put.last
    a.receive(b.number, old, ())
    world.run(world.now + 50.0)


def _last_append_answer(world: Recorded, source: SimNode, target: SimNode, index: int) -> Any:
    for one, other, message in reversed(world.sent):
        ends = (one, other) == (source.number, target.number)
        if ends and isinstance(message, PushResponse) and message.push is PushType.APPEND:
            if message.code is Code.SUCCESS and message.index == index:
                return message
    raise AssertionError(f"node {source.number} has not acknowledged {index}")


def a_leader_leads_again_after_its_entries_were_replaced() -> None:
    """What a follower had of a leader's earlier term is not what the leader has now."""
    world = Recorded(5)
    a = world.leader()
    assert a is not None
    b, c, d, e = world.others(a)
    first_term = a.core_term
    world.apart((a, b), (c, d, e))
    put = world.put(a, 10)
    assert put is not None
    world.until(lambda: a.core.water_marks.get(b.number) == put.last)
    world.until(lambda: any(n.role is Role.LEADER for n in (c, d, e)))
    world.apart((b,), (a, c, d, e))
    world.until(lambda: a.core_term > first_term and a.committed >= put.first)
    leader = next(n for n in (c, d, e) if n.role is Role.LEADER)
    token = next(world.tokens)
    world._operate(leader, "transfer", Transfer(leader.local_ms(), a.number, token), token)
    world.until(lambda: a.role is Role.LEADER)
    begin = a.disk.end
    world.apart((a, d), (b,), (c, e))
    world.run(world.now + 100.0)
    assert d.disk.durable >= begin and a.committed < begin <= put.last, world.describe()


def _replaced_tail(world: Recorded) -> tuple[SimNode, SimNode]:
    """Let a leader take entries that the next leader replaces; return both."""
    a = world.leader()
    assert a is not None
    first_term = a.core_term
    world.apart((a,), tuple(world.others(a)))
    assert world.put(a, 5) is not None
    world.until(lambda: any(n.leads(n.core_term) for n in world.others(a)))
    world.cuts = set()
    world.until(lambda: a.core_term > first_term and a.leads(a.core_term) is False)
    leader = world.leader()
    assert leader is not None and leader is not a
    return a, leader


def an_old_truncate_arrives() -> None:
    """A TRUNCATE comes again when committed entries are where it cut."""
    world = Recorded(3)
    a, leader = _replaced_tail(world)
    world.until(lambda: _last(world, leader, a, TruncateRequest) is not None)
    old = _last(world, leader, a, TruncateRequest)
    world.put(leader, 5)
    world.until(lambda: leader.committed == a.committed == leader.disk.end)
    a.receive(leader.number, old, ())
    world.run(world.now + 50.0)


def an_old_install_arrives() -> None:
    """An INSTALL comes again when the follower has taken committed entries since."""
    world = Recorded(3)
    leader = world.leader()
    assert leader is not None
    late = world.others(leader)[0]
    late.die()
    world.put(leader, 10)
    world.until(lambda: leader.committed == leader.disk.end)
    leader.disk.retain(8)
    leader.step(Retained(leader.local_ms(), 8))
    world.restart(late)
    for one, other in ((leader, late), (late, leader)):
        world.link_changed(one.number, other.number, up=True)
    world.until(lambda: late.committed == leader.committed)
    old = _last(world, leader, late, InstallRequest)
    assert old is not None
    late.receive(leader.number, old, ())
    world.run(world.now + 50.0)


def a_sync_ends_after_its_entries_were_cut() -> None:
    """A sync that began with entries that are cut says nothing of those that came after."""
    world = Recorded(3)
    a = world.leader()
    assert a is not None
    a.sync_ms = NEVER_MS
    same, leader = _replaced_tail(world)
    assert same is a and a.syncing is not None
    world.put(leader, 8)
    world.until(lambda: a.disk.end == leader.disk.end > a.syncing[1])
    a._synced(a.life)


def two_changes_at_once() -> None:
    """A second change of members is asked for before the first is committed."""
    world = Recorded(4)
    leader = world.leader()
    assert leader is not None
    one, other, _ = (node.number for node in world.others(leader))
    for gone in ((one,), (one, other)):
        members = tuple(n for n in world.numbers if n not in gone)
        token = next(world.tokens)
        event = ChangeMembers(leader.local_ms(), members, token)
        world._operate(leader, "members", event, token)
    assert world.operations[token][1] == "REFUSED"


def two_nodes_leave() -> None:
    """One list leaves out two nodes."""
    world = Recorded(5)
    leader = world.leader()
    assert leader is not None
    token = next(world.tokens)
    gone = [node.number for node in world.others(leader)][:2]
    members = tuple(n for n in world.numbers if n not in gone)
    event = ChangeMembers(leader.local_ms(), members, token)
    world._operate(leader, "members", event, token)
    assert world.operations[token][1] == "REFUSED"


def _last(world: Recorded, source: SimNode, target: SimNode, kind: type) -> Any:
    for one, other, message in reversed(world.sent):
        if (one, other) == (source.number, target.number) and isinstance(message, kind):
            return message
    return None


def a_removed_leader_is_elected_again() -> None:
    """A leader removes itself, is cut off with that list, and is elected once more: it leaves."""
    world = Recorded(3)
    a = world.leader()
    assert a is not None
    others = world.others(a)
    first_term = a.core_term
    world.apart((a,), tuple(others))
    for each in others:  # they vote, and ask for no votes
        each.step(DiskFull(each.local_ms(), True))
    token = next(world.tokens)
    members = tuple(node.number for node in others)
    world._operate(a, "members", ChangeMembers(a.local_ms(), members, token), token)
    assert a.disk.members == members
    world.until(lambda: a.role is not Role.LEADER)
    world.cuts = set()
    world.until(lambda: a.role is Role.LEADER and a.core_term > first_term)
    for each in others:
        each.step(DiskFull(each.local_ms(), False))
    world.until(lambda: any(node.role is Role.LEADER for node in others))
    world.until(lambda: a.role is not Role.LEADER)


def a_change_would_end_the_leadership() -> None:
    """Of three nodes one is down; without the other the new list would have no majority."""
    world = Recorded(3)
    leader = world.leader()
    assert leader is not None
    gone, down = world.others(leader)
    down.die()
    world.run(world.now + 1_500.0)
    token = next(world.tokens)
    members = tuple(n for n in world.numbers if n != gone.number)
    event = ChangeMembers(leader.local_ms(), members, token)
    term = leader.core_term
    world._operate(leader, "members", event, token)
    assert world.operations[token][1] == "REFUSED" and "no majority" in world.operations[token][2]
    world.run(world.now + 3_000.0)
    assert leader.leads(term) and world.put(leader) is not None


def _dies_before_its_log_changes(node: SimNode) -> None:
    """Let a node die the next time that its log would change: after its other files have."""

    def die(update: Update, *_: Any) -> None:
        if update.install is not None or update.append:
            del node._change_log
            raise Crash(node)

    node._change_log = die  # type: ignore[method-assign]


def _change_members(
    world: Recorded,
    leader: SimNode,
    members: tuple[int, ...],
    learners: tuple[int, ...] = (),
    leaving: tuple[int, ...] = (),
) -> None:
    """Ask for a member list, and wait until it is committed."""
    token = world._change(leader, MemberSet(members, learners, leaving))
    if leader.up:
        world.until(lambda: token not in world.waiting)
        assert world.operations[token][1] == "COMMITTED", world.operations[token]


def _restarted(world: Recorded, node: SimNode) -> None:
    node.die()
    world.restart(node)
    for other in world.others(node):
        world.link_changed(node.number, other.number, up=True)


def a_member_list_is_saved_and_never_appended() -> None:
    """A leader dies between the two. What retention has removed since cannot say what was there."""
    world = Recorded(3)
    a = world.leader()
    assert a is not None
    first_term = a.core_term
    _dies_before_its_log_changes(a)
    _change_members(world, a, tuple(node.number for node in world.others(a)))
    assert not a.up
    world.restart(a)
    world.until(lambda: world.leader() is not None and world.leader().core_term > first_term)
    leader = world.leader()
    assert leader is not None and world.put(leader, 5) is not None
    world.until(lambda: world._together())
    a.disk.retain(a.disk.end)
    a.step(Retained(a.local_ms(), a.disk.begin))
    _restarted(world, a)


def an_install_does_not_begin() -> None:
    """A node dies when the lists of an INSTALL are saved and its log is still the old one."""
    world = Recorded(4)
    leader = world.leader()
    assert leader is not None
    late, gone, _ = world.others(leader)
    _change_members(world, leader, tuple(n for n in world.numbers if n != gone.number))
    world.until(lambda: late.committed == leader.committed == leader.disk.end)
    late.die()
    world.put(leader, 10)
    world.until(lambda: leader.committed == leader.disk.end)
    leader.disk.retain(leader.disk.end - 2)
    leader.step(Retained(leader.local_ms(), leader.disk.begin))
    _dies_before_its_log_changes(late)
    world.restart(late)
    world.link_changed(leader.number, late.number, up=True)
    world.until(lambda: not late.up)
    world.restart(late)
    world.until(lambda: late.committed == leader.disk.end)


def _full(full: bool, *nodes: SimNode) -> None:
    """Let the disks of nodes be full: then they vote, and ask for no votes."""
    for node in nodes:
        node.step(DiskFull(node.local_ms(), full))


def a_vote_of_an_earlier_term_arrives() -> None:
    """A candidate that lost its term gets a vote of the term before, which was on the way."""
    world, a, b, c = three()
    term = a.core_term
    token = next(world.tokens)
    world._operate(a, "transfer", Transfer(a.local_ms(), b.number, token), token)
    world.cuts = {(b.number, a.number), (c.number, b.number)}
    world.until(lambda: c.disk.hard.voted_for == b.number and a.core_term == term + 1)
    old = _last(world, c, b, VoteResponse)
    assert old == VoteResponse(term + 1, term + 1, False, VoteResult.ACCEPT)
    _full(True, a, c)
    world.cuts = set()
    world.until(lambda: b.core_term == term + 2 and b.role is Role.CANDIDATE)
    world.apart((b,), (a, c))
    b.paused_until = NEVER_MS
    _full(False, a, c)
    world.until(lambda: a.leads(term + 2) or c.leads(term + 2))
    b.receive(c.number, old, ())
    assert b.role is Role.CANDIDATE


def a_longer_log_of_an_older_term_asks_for_votes() -> None:
    """A leader that was cut off has more entries than the others, and none that is committed."""
    world, a, b, c = three()
    world.apart((a,), (b, c))
    assert world.put(a, 20) is not None
    world.until(lambda: b.role is Role.LEADER or c.role is Role.LEADER)
    world.until(lambda: b.committed == c.committed == b.disk.end)
    assert a.disk.end > c.disk.end
    world.apart((a, c), (b,))
    _full(True, c)
    world.run(world.now + 3_000.0)
    assert a.role is not Role.LEADER
    _full(False, c)
    world.until(lambda: c.role is Role.LEADER and c.committed == a.committed == c.disk.end)


def one_follower_does_not_hear_the_leader() -> None:
    """It asks again and again whether it would be elected; the others hear the leader."""
    world = Recorded(3)
    a = world.leader()
    assert a is not None
    world.cuts = {(a.number, world.others(a)[0].number)}
    world._undisturbed(a, a.core_term, 5_000.0)


def a_removal_of_long_ago_is_told() -> None:
    """A node that was removed and taken back is told so again, when only it can be elected."""
    world = Recorded(4)
    leader = world.leader()
    assert leader is not None
    gone = world.others(leader)[0]
    others = tuple(n for n in world.numbers if n != gone.number)
    _change_members(world, leader, others)
    world.until(lambda: gone.core.removed is not None)
    old = _last(world, leader, gone, VoteResponse)
    assert old.removed is not None
    token = next(world.tokens)
    event = ChangeMembers(leader.local_ms(), others, token, (gone.number,))
    world._operate(leader, "members", event, token)
    world.until(lambda: gone.number in leader.disk.members and world._together())
    assert gone.core.removed is None
    _full(True, *(node for node in world.others(gone) if node is not leader))
    leader.die()
    gone.receive(leader.number, old, ())
    world.restart(leader)
    _full(True, leader)
    if not world.run(world.now + HEALED_WITHIN_MS, lambda: gone.role is Role.LEADER):
        raise Violation(f"node {gone.number} does not ask for votes: {world.describe()}")


class Contradicting(Recorded):
    """Two nodes prefer each other as leader; `told`: they tell each other so."""

    def __init__(self, *, told: bool) -> None:
        self.told = told
        super().__init__(3, preferences=(2, 1, 2))

    def send(self, source: int, target: int, message: Any, entries: Any = ()) -> None:
        if isinstance(message, HeartBeatResponse) and not self.told:
            message = replace(message, preferred=0)  # as a version that does not say it
        super().send(source, target, message, entries)

    def terms_in(self, ms: float, most: int) -> None:
        """Let time pass; no more than `most` terms may begin."""
        first, began = max(node.core_term for node in self.nodes.values()), self.now

        def terms() -> int:
            return max(node.core_term for node in self.nodes.values()) - first

        if self.run(self.now + ms, lambda: terms() > most):
            took = (self.now - began) / 1000
            raise Violation(f"{terms()} terms in {took:.1f} s: {self.describe()}")


def two_nodes_prefer_each_other() -> None:
    """Each would hand over to the other for ever."""
    world = Contradicting(told=True)
    world.terms_in(60_000.0, 1)
    leader = world.leader()
    assert leader is not None
    said = {node.core.preferences for node in world.nodes.values()}
    assert said == {((1, 2), (2, 1), (3, 2))}, said


def two_nodes_prefer_each_other_and_do_not_say_so() -> None:
    """The leaders stay longer each time: 2, 2, 4, 4, 8 s, and so on."""
    Contradicting(told=False).terms_in(120_000.0, 12)


def who_can_serve_lacks_what_is_committed() -> None:
    """Replay is blocked on all who have it: one of them leads until the other has caught up."""
    world, a, b, c = three()
    world.apart((a, b), (c,))
    assert world.put(a, 5) is not None
    world.until(lambda: a.committed == b.committed == a.disk.end > c.disk.end)
    world.guard(lambda: a.block_replay(True))
    world.guard(lambda: b.block_replay(True))
    a.die()
    world.restart(a)
    world.cuts = set()
    world._commit_again(world.now + HEALED_WITHIN_MS)
    if world.leader() is not c:
        raise Violation(f"a node leads that cannot serve: {world.describe()}")


def a_lost_disk_is_replaced_under_load() -> None:
    """Puts never pause, so the leader always waits for some answer of the node that came back."""
    world = Recorded(3)
    leader = world.leader()
    assert leader is not None
    node = world.others(leader)[0]

    def load() -> None:
        world.put(leader)
        world.after(0.5, load)

    load()
    assert world.do_wipe(node)
    world.restart(node)
    world.link_changed(leader.number, node.number, up=True)
    world.until(lambda: node.disk.remembers, 1_000.0)


def a_log_is_cut_at_damage() -> None:
    """A follower loses acknowledged entries with its limits page; the third node lacks them too."""
    world, a, b, c = three()
    world.apart((a, b), (c,))
    put = world.put(a, 10)
    assert put is not None
    world.until(lambda: put.outcome == "COMMITTED" and b.disk.durable == put.last)
    a.die()
    b.die()
    b.lose_end(put.first)
    world.cuts = set()
    world.restart(b)
    for one, other in ((b, c), (c, b)):
        world.link_changed(one.number, other.number, up=True)
    world.run(world.now + 5_000.0)
    assert world.leader() is None, world.describe()
    world.restart(a)
    for other in (b, c):
        world.link_changed(other.number, a.number, up=True)
    world.until(lambda: b.disk.remembers and world._together())


def the_files_list_other_first_members() -> None:
    """Two files have three nodes, the others five: each list has a majority without the other."""
    world = World(1, Plan(members=5))
    world.chaos = False
    groups = {
        n: Group(first_members=(1, 2, 3) if n < 3 else tuple(world.numbers)) for n in world.numbers
    }
    for number, group in groups.items():
        node, mine = world.nodes[number], group.first_members
        node.first_members, node.disk = mine, SimDisk(mine)
        agree = [
            other
            for other in mine
            if other != number and groups[other].problem(number, group, other) is None
        ]
        if len(agree) == len(mine) - 1:  # as driver/joining.py asks
            world.restart(node)
    # No link between the two lists is up for a while.
    world.cuts = {(a, b) for a in groups for b in groups if (a < 3) != (b < 3)}
    for _ in range(20):
        world.run(world.now + 200.0)
        for node in world.nodes.values():
            if node.up and node.role is Role.LEADER:
                world.put(node)


def an_earlier_store_is_put_back() -> None:
    """A disk is lost twice; then the first new one comes back, which says that a disk was lost.

    What the second new one has acknowledged is on one other node only, and that one is down.
    """
    world, a, b, c = three()
    stores, says_lost = Stores({b.number: "first"}), True
    earlier = b.disk
    for name in ("second", "third"):
        assert stores.problem(b.number, name, lost=True) is None
        stores = stores.with_store(b.number, name)
        earlier = copy.deepcopy(b.disk)
        assert world.do_wipe(b)
        world.restart(b)
        world.link_changed(a.number, b.number, up=True)
        world.until(lambda: b.disk.remembers and world._together())
    world.apart((a, b), (c,))
    put = world.put(a, 10)
    assert put is not None
    world.until(lambda: put.outcome == "COMMITTED" and b.disk.durable == put.last)
    a.die()
    b.die()
    b.lost_disk, b.disk = b.disk, earlier
    world.oracle.terms.pop(b.number)
    refused = stores.problem(b.number, "second", lost=says_lost) is not None
    world.cuts = {(b.number, c.number), (c.number, b.number)} if refused else set()
    world.restart(b)
    if not refused:
        for one, other in ((b, c), (c, b)):
            world.link_changed(one.number, other.number, up=True)
    world.run(world.now + 5_000.0)
    assert world.leader() is None, world.describe()


# -- learners --------------------------------------------------------------------------------------


def _with_learner(
    *, leaving: bool = False, down: int = 0
) -> tuple[Recorded, SimNode, list[SimNode], SimNode]:
    """Return a group of three, its leader, its followers, and a learner that has everything.

    It stays a learner, as one follower does not answer for a while. `down` followers have ended.
    """
    world = Recorded(3, spares=1)
    a = world.leader()
    assert a is not None
    b, c, learner = world.others(a)
    for node in (b, c)[2 - down :]:
        node.die()
    world.apart((a, b, learner), (c,))
    world.run(world.now + 1_500.0)
    members = tuple(node.number for node in (a, b, c))
    _change_members(world, a, members, (learner.number,), (c.number,) if leaving else ())
    world.until(lambda: learner.disk.durable == a.disk.end and learner.committed == a.disk.end)
    return world, a, [b, c], learner


def _still(learner: SimNode, leader: SimNode) -> None:
    if learner.number in leader.disk.members:
        raise Violation(f"node {learner.number} is a member: {leader.disk.group}")


def a_stopped_node_is_added_and_one_more_fails() -> None:
    """The group goes on without both; the addition is withdrawn without a word of the learner."""
    world = Recorded(3, spares=1)
    a = world.leader()
    assert a is not None
    b, c, stopped = world.others(a)
    members = tuple(node.number for node in (a, b, c))
    stopped.die()
    _change_members(world, a, members, (stopped.number,))
    c.die()
    world.run(world.now + 3_000.0)
    _still(stopped, a)
    world._commit_again(world.now + 1_000.0)
    _change_members(world, a, members)
    assert a.disk.group == MemberSet(members)


def a_learner_keeps_up_while_a_member_is_down() -> None:
    """It is no member before the other is back: if it failed at once, no majority would be left."""
    world, a, (_b, c), learner = _with_learner(down=1)
    world.run(world.now + 3_000.0)
    _still(learner, a)
    learner.die()
    world._commit_again(world.now + 1_000.0)
    world.restart(learner)
    world.cuts = set()
    world.restart(c)
    world.until(lambda: len(a.disk.members) == 4 and a.committed == a.disk.end)


def only_a_learner_has_the_leaders_entries() -> None:
    """The leader and the learner are cut off: nothing is committed, and no read is answered."""
    world, a, (b, c), learner = _with_learner()
    world.apart((a, learner), (b,), (c,))
    world.run(world.now + 50.0)  # the answers that are on their way
    put, read = world.put(a), world.read(a)
    assert put is not None
    world.until(lambda: learner.disk.durable == put.last)
    world.run(world.now + 200.0)
    if read.outcome == "COMMITTED":
        raise Violation("a read is answered by the word of a learner")
    assert a.committed < put.last


def only_a_learner_answers_the_leader() -> None:
    """The leader steps down: a learner is no part of its majority."""
    world, a, (b, c), learner = _with_learner()
    term = a.core_term
    world.apart((a, learner), (b, c))
    if not world.run(world.now + 2_500.0, lambda: not a.leads(term)):
        raise Violation(f"node {a.number} leads on by the answers of a learner")


def the_leader_ends_and_a_learner_is_left() -> None:
    """A follower and the learner do not elect, and the learner asks for no votes."""
    world, a, (b, c), learner = _with_learner()
    a.die()
    world.apart((b, learner), (c,))
    world.run(world.now + 5_000.0)
    assert b.role is not Role.LEADER and learner.role is Role.FOLLOWER


def a_learner_falls_behind() -> None:
    """It kept up, and its disk has become slow: it is no member before it keeps up again."""
    world, a, (_b, c), learner = _with_learner()
    learner.sync_ms = NEVER_MS
    loaded = True

    def load() -> None:
        if loaded:
            world.put(a)
            world.after(20.0, load)

    load()
    world.run(world.now + 1_500.0)
    world.cuts = set()
    world.run(world.now + 1_500.0)
    assert c.committed > learner.disk.durable
    _still(learner, a)
    loaded, learner.sync_ms = False, 1.0
    learner.die()
    world.restart(learner)
    for one, other in ((a, learner), (learner, a)):
        world.link_changed(one.number, other.number, up=True)
    world.until(lambda: learner.number in a.disk.members and a.committed == a.disk.end)


def a_dead_member_is_replaced() -> None:
    """The dead one goes first, then the learner becomes a member; a leader in between goes on."""
    world, a, (b, c), learner = _with_learner(leaving=True, down=1)
    wanted = MemberSet(tuple(sorted(node.number for node in (a, b, learner))))
    world.until(lambda: a.disk.group == wanted and a.committed == a.disk.end)
    world.cuts = set()
    world.restart(c)
    world._undisturbed(a, a.core_term, 3_000.0)


def a_member_is_replaced_and_the_leader_ends() -> None:
    """The next leader finds the intent in the list, and brings it to its end."""
    world, a, (b, c), learner = _with_learner(leaving=True)
    group = a.disk.group
    assert group.learners and group.leaving == (c.number,)
    world.cuts = set()
    _restarted(world, learner)
    a.die()
    world.until(lambda: any(node.role is Role.LEADER for node in (b, c)))
    world.run(world.now + 2_000.0)
    for node in (b, c):  # of three members one is down, and the one that leaves works
        assert node.disk.group == group, world.describe()
    world.restart(a)
    world.until(lambda: world._together())
    assert b.disk.group == MemberSet(tuple(sorted(n.number for n in (a, b, learner))))


def a_removed_member_is_a_learner_and_is_elected() -> None:
    """It does not know that the lists which made it one are committed; it leads, and hands over."""
    world, a, b, c = three()
    world.apart((a, c), (b,))
    rest = tuple(sorted((a.number, c.number)))
    _change_members(world, a, rest)
    _change_members(world, a, rest, (b.number,))
    b.sync_ms, world.cuts = NEVER_MS, set()
    world.until(lambda: b.disk.end == a.disk.end)
    b.sync_ms = 1.0
    for node in (a, b):
        _restarted(world, node)
    _full(True, a, c)
    world.until(lambda: b.role is Role.LEADER)
    assert b.disk.group == MemberSet(rest, (b.number,))
    _full(False, a, c)
    world.until(lambda: b.role is Role.FOLLOWER)
    world.until(lambda: world._together())
    assert c.disk.group == MemberSet(tuple(sorted((*rest, b.number))))
