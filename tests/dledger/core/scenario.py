"""Scenarios of the core as readable text: commands, and after each its whole expected output.

    propose 1 2 as p1        a command
    ----
    1 flushes                what it did, up to an empty line

A file is read and run by `run`; `python tests/dledger/core/regenerate.py` writes what came out.
Read each difference: the files are the specification.

The world: nodes with the core and a disk (terms of entries, hard state, member lists), a clock, and
a queue of messages for each pair of nodes. A node's election timeout is fixed: node 1 waits 1.0
times, node 2 1.1 times, node 3 1.2 times the setting, so node 1 is the first. A line `1>2 ...` is a
message that is delivered; the indented lines below it are what it caused. Messages that nothing
delivers stay queued. Entries become durable at once unless `hold` says otherwise.

Commands:

    nodes 1,2,3 [start=no] [key=value ...]
                                    start nodes with empty logs; keys are fields of Settings
    log 1 1x3,2x4 [term=T] [vote=N] [committed=I] [begin=B]
                                    before `start`: node 1's log is 3 entries of term 1, 4 of term 2
    prefer 1 2                      before `start`: node 1 prefers node 2 as leader
    start 1,2 [remembers=no]        start nodes (again) from their disks
    campaign 1                      wait for node 1's election timeout, tick only node 1
    wait MS                         let time pass; nodes tick, nothing is delivered
    run MS                          let time pass; nodes tick, all messages are delivered
    deliver [1>2 ...] [N]           deliver what is queued and what that causes, at most N messages
    drop [1>2 ...]                  lose what is queued
    repeat 1>2                      queue what is queued once more
    reverse 1>2                     turn the order of the queue around
    queue                           show what is queued
    partition 1,2 | 3               messages between the sides are lost; heal ends it
    link 1-2 down|up                both nodes see the link close or open
    propose 1 COUNT as NAME         a put; read 1 as NAME; transfer 1 to 2 as NAME;
                                    members 1 to 1,2,3 [+ 4] [- 3] as NAME: with learner 4, which
                                    replaces 3
    hold 1, persist 1 [INDEX]       entries become durable only with `persist`
    crash 1                         what is not durable is lost; wipe 1: everything is
    full 1 yes|no, blocked 1 yes|no (replay), hangs 1 yes|no (its syncs), retain 1 INDEX
    send 1>2 MESSAGE                queue a message that no core has sent, as Python
    show [1,2]                      the state of the nodes
    quiet COMMAND                   do it, but show only a summary
"""

import pathlib
import re
from dataclasses import replace

from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.events import (
    ChangeMembers,
    DiskFull,
    HardState,
    LinkChanged,
    LogState,
    OwnEntry,
    Persisted,
    Propose,
    ReadIndex,
    Receive,
    ReplayBlocked,
    Retained,
    Role,
    Settings,
    Start,
    SyncHangs,
    Tick,
    Transfer,
)
from hastore.protocol import dledger as protocol
from hastore.protocol.dledger import (
    AppendRequest,
    CommitRequest,
    CompareRequest,
    HeartBeatRequest,
    HeartBeatResponse,
    InstallRequest,
    MemberSet,
    PushResponse,
    TakeLeadership,
    TruncateRequest,
    VoteRequest,
    VoteResponse,
)

STEPS_MAX = 20_000  # of one command: more is a pair of nodes that never comes to rest


class FixedDelay:
    """The randomness of node n: the (n - 1)th tenth of every range."""

    def __init__(self, node):
        self._share = (node - 1) / 10

    def uniform(self, a, b):
        return a + (b - a) * self._share


class Disk:
    """What a node finds when it starts."""

    def __init__(self):
        self.hard_state = HardState(0, None)
        self.begin = 0
        self.prev_term = -1
        self.terms = []  # of the entries from `begin` on
        self.persisted = -1
        self.committed = -1
        self.member_lists = ()
        self.removed = None
        self.remembers = True

    @property
    def end(self):
        return self.begin + len(self.terms) - 1

    def log_state(self):
        pairs = []
        for place, term in enumerate(self.terms):
            if not pairs or pairs[-1][0] != term:
                pairs.append((term, self.begin + place))
        return LogState(self.begin, self.end, tuple(pairs), self.prev_term)


class World:
    """Nodes, their disks, the clock, and the messages on their way."""

    def __init__(self):
        self.now_ms = 0.0
        self.settings = Settings()
        self.members = ()
        self.preferred = {}  # of nodes that do not have the settings of all
        self.cores = {}
        self.disks = {}
        self.due_ms = {}
        self.queues = {}  # (from, to) -> messages, in the order of the first message
        self.cut = set()  # pairs between which messages are lost
        self.held = set()  # nodes whose entries become durable only by a command
        self.lines = []
        self.indent = ""

    def say(self, line):
        self.lines.append(self.indent + line)

    # -- updates -----------------------------------------------------------------------------------

    def step(self, node, event):
        core = self.cores[node]
        before = (core.role, core.term, core.leader)
        update = core.step(event)
        self.due_ms[node] = update.deadline_ms
        self.save(node, update)
        if (core.role, core.term, core.leader) != before:
            leader = "" if core.leader is None else f", leader {core.leader}"
            self.say(f"{node} is {core.role.value} of term {core.term}{leader}")
        if update.committed_index is not None:
            self.disks[node].committed = update.committed_index
            self.say(f"{node} has committed {update.committed_index}")
        for one in update.settled:
            index = f" at {one.index}" if one.index >= 0 else ""
            reason = f": {one.reason}" if one.reason else ""
            self.say(f"{node} settles {one.token}: {one.outcome}{index}{reason}")
        for peer, message in update.messages:
            self.queues.setdefault((node, peer), []).append(message)
        if update.flush and node not in self.held:
            self.persist(node, self.disks[node].end)

    def save(self, node, update):
        disk = self.disks[node]
        if update.hard_state is not None:
            disk.hard_state = update.hard_state
            vote, remembers = update.hard_state.voted_for, update.hard_state.remembers
            says = "" if remembers else ", remembers nothing before"
            self.say(f"{node} saves term {update.hard_state.term}, vote {vote}{says}")
        if update.truncate_from is not None:
            del disk.terms[update.truncate_from - disk.begin :]
            disk.persisted = min(disk.persisted, update.truncate_from - 1)
            self.say(f"{node} truncates from {update.truncate_from}")
        if update.member_lists is not None:
            disk.member_lists = update.member_lists
            lists = "; ".join(f"{_group(one.group)} at {one.index}" for one in disk.member_lists)
            self.say(f"{node} saves member lists: {lists or 'none'}")
        if update.removed:
            disk.removed = self.cores[node].removed
            out = "is in the group again" if disk.removed is None else "was removed"
            self.say(f"{node} saves that it {out}")
        if update.install is not None:
            disk.begin, _, disk.prev_term = update.install
            disk.terms, disk.persisted = [], disk.begin - 1
            self.say(f"{node} sets its log aside and begins at {disk.begin}")
        for one in update.append:
            if isinstance(one, OwnEntry):
                disk.terms.append(one.term)
                what = "a no-op" if one.group is None else f"members {_group(one.group)}"
                self.say(f"{node} appends {what} at {one.index} of term {one.term}")
            else:
                core = self.cores[node]
                first = disk.end + 1
                disk.terms += [core.term_at(i) for i in range(first, one.last_index + 1)]
                self.say(f"{node} takes {first} to {one.last_index}")
        assert disk.end == self.cores[node].ledger_end_index
        if update.flush:
            self.say(f"{node} flushes")

    def persist(self, node, index):
        self.disks[node].persisted = max(self.disks[node].persisted, index)
        self.step(node, Persisted(self.now_ms, index))

    # -- messages ----------------------------------------------------------------------------------

    def deliver_one(self, pair):
        queue = self.queues[pair]
        message = queue.pop(0)
        if not queue:
            del self.queues[pair]
        sender, to = pair
        lost = pair in self.cut or to not in self.cores
        self.say(f"{sender}>{to} {describe(message)}{' (lost)' if lost else ''}")
        if not lost:
            self.indent = "  "
            self.step(to, Receive(self.now_ms, sender, message))
            self.indent = ""

    def deliver(self, pairs=None, count=STEPS_MAX):
        for _ in range(count):
            ready = [one for one in self.queues if pairs is None or one in pairs]
            if not ready:
                return
            self.deliver_one(ready[0])
        assert count < STEPS_MAX, "the nodes never come to rest"

    def pass_time(self, ms, *, deliver):
        until = self.now_ms + ms
        for _ in range(STEPS_MAX):
            if deliver:
                self.deliver()
            due = [(self.due_ms[one], one) for one in self.cores if self.due_ms[one] <= until]
            if not due:
                self.now_ms = until
                return
            due_ms, node = min(due)
            self.now_ms = max(self.now_ms, due_ms)
            before = len(self.lines)
            self.indent = "  "
            self.step(node, Tick(self.now_ms))
            self.indent = ""
            if len(self.lines) > before:
                self.lines.insert(before, f"at {self.now_ms:.0f} ms {node} ticks")
        raise AssertionError("the nodes tick without end")


def _names(members):
    return ",".join(str(one) for one in members)


def _group(group):
    """Return a member list as text."""
    learners = f" + {_names(group.learners)}" if group.learners else ""
    leaving = f" - {_names(group.leaving)}" if group.leaving else ""
    return f"{_names(group.members)}{learners}{leaving}"


def describe(message):
    """Return a message in a few words."""
    term = f"term {message.term}"
    if isinstance(message, VoteRequest):
        kind = "asks before a vote" if message.pre else "asks for a vote"
        end = f"end {message.ledger_end_index} of term {message.ledger_end_term}"
        return f"{kind} in {term}, {end}{', transfer' if message.transfer else ''}"
    if isinstance(message, VoteResponse):
        pre = "before a vote " if message.pre else ""
        removed = ""
        if message.removed is not None:
            index, _, members = message.removed
            removed = f", you are removed: members {_names(members)} at {index}"
        answer = f"answers {pre}in term {message.request_term}: {message.result.value}, {term}"
        return answer + removed
    if isinstance(message, HeartBeatRequest):
        prefer = "".join(f", {one} prefers {other}" for one, other in message.preferences)
        beat = f"beats in {term}, round {message.round}, committed {message.committed_index}"
        return f"{beat}{prefer}"
    if isinstance(message, HeartBeatResponse):
        prefers = f", prefers {message.preferred}" if message.preferred else ""
        answer = f"answers round {message.round}: {message.code.name}, {term}"
        return f"{answer}{_memory(message)}{prefers}"
    if isinstance(message, CompareRequest):
        return f"COMPARE in {term}: is {message.index} of term {message.index_term}?"
    if isinstance(message, TruncateRequest):
        after = f"after term {message.prev_term}"
        return f"TRUNCATE in {term}: from {message.index} {after}, mine has {message.index_term}"
    if isinstance(message, AppendRequest):
        runs = ", ".join(f"{count} of term {one}" for one, count in message.runs)
        lists = "".join(f", members {_group(one)} at {at}" for at, one in message.member_sets())
        prev = f"after {message.prev_index} of term {message.prev_term}"
        return f"APPEND in {term} {prev}: {runs}{lists}; committed {message.committed_index}"
    if isinstance(message, CommitRequest):
        recall = f", recall at {message.recall_index}" if message.recall_index >= 0 else ""
        return f"COMMIT in {term}: {message.committed_index}{recall}"
    if isinstance(message, InstallRequest):
        group = MemberSet(message.members, message.learners, message.leaving)
        after = f"after term {message.prev_term}, members {_group(group)}"
        return f"INSTALL in {term}: begin at {message.index} {after}"
    if isinstance(message, TakeLeadership):
        return f"TAKE LEADERSHIP in {term}"
    assert isinstance(message, PushResponse)
    log = f"log {message.begin_index} to {message.end_index}"
    hint = ""
    if message.hint_term >= 0:
        hint = f", mine is of term {message.hint_term} from {message.hint_index} on"
    answer = f"answers {message.push.name} at {message.index}: {message.code.name}"
    return f"{answer}, {term}, {log}{hint}{_memory(message)}"


def _memory(message):
    forgotten = "" if message.remembers else ", remembers nothing before"
    return forgotten + ("" if message.able else ", cannot serve")


class Runner:
    """Runs the commands of one file."""

    def __init__(self):
        self.world = World()

    def run(self, command):
        """Run a command; return its output."""
        world = self.world
        world.lines, world.indent = [], ""
        quiet = command.startswith("quiet ")
        words = command.removeprefix("quiet ").split()
        getattr(self, f"do_{words[0]}")(words[1:])
        if quiet:
            messages = sum(bool(re.match(r"\d+>\d+ ", line)) for line in world.lines)
            return [f"{messages} messages"]
        return world.lines

    def do_nodes(self, words):
        world = self.world
        world.members = _numbers(words[0])
        keys = dict(one.split("=") for one in words[1:])
        start = keys.pop("start", "yes")
        world.settings = Settings(**{key: int(value) for key, value in keys.items()})
        for node in world.members:
            world.disks[node] = Disk()
        if start == "yes":
            self.do_start([words[0]])

    def do_log(self, words):
        world = self.world
        disk = world.disks.setdefault(int(words[0]), Disk())
        options = dict(one.split("=") for one in words[2:])
        disk.begin = int(options.get("begin", 0))
        disk.prev_term = int(options.get("prev_term", -1))
        disk.terms = []
        for run in words[1].split(","):
            term, count = run.split("x")
            disk.terms += [int(term)] * int(count)
        vote = options.get("vote")
        term = int(options.get("term", disk.terms[-1]))
        disk.hard_state = HardState(term, None if vote is None else int(vote))
        disk.committed = int(options.get("committed", disk.begin - 1))
        disk.persisted = disk.end

    def do_prefer(self, words):
        self.world.preferred[int(words[0])] = int(words[1])

    def do_start(self, words):
        world = self.world
        for node in _numbers(words[0]):
            disk = world.disks.setdefault(node, Disk())
            disk.remembers = disk.remembers and "remembers=no" not in words
            settings = world.settings
            if node in world.preferred:
                settings = replace(settings, preferred_leader=world.preferred[node])
            world.cores[node] = DLedgerCore(node, settings, FixedDelay(node))
            start = Start(
                *(world.now_ms, disk.hard_state, disk.log_state(), disk.committed, world.members),
                *(disk.remembers, disk.member_lists, disk.removed),
                alone=world.members == (node,),
            )
            update = world.cores[node].step(start)
            world.due_ms[node] = update.deadline_ms
            world.save(node, update)
            core = world.cores[node]
            if core.role is Role.LEADER:
                world.say(f"{node} is LEADER of term {core.term}, leader {node}")
                world.persist(node, disk.end)

    def do_campaign(self, words):
        world, node = self.world, int(words[0])
        world.now_ms = max(world.now_ms, world.due_ms[node])
        world.step(node, Tick(world.now_ms))

    def do_wait(self, words):
        self.world.pass_time(float(words[0]), deliver=False)

    def do_run(self, words):
        self.world.pass_time(float(words[0]), deliver=True)

    def do_deliver(self, words):
        pairs = [_pair(one) for one in words if ">" in one]
        counts = [int(one) for one in words if ">" not in one]
        self.world.deliver(pairs or None, *counts)

    def do_drop(self, words):
        pairs = [_pair(one) for one in words] or list(self.world.queues)
        for pair in pairs:
            for message in self.world.queues.pop(pair, []):
                self.world.say(f"{pair[0]}>{pair[1]} {describe(message)} (lost)")

    def do_repeat(self, words):
        queue = self.world.queues[_pair(words[0])]
        queue += list(queue)

    def do_reverse(self, words):
        self.world.queues[_pair(words[0])].reverse()

    def do_queue(self, words):
        for (sender, to), messages in self.world.queues.items():
            for message in messages:
                self.world.say(f"{sender}>{to} {describe(message)}")

    def do_partition(self, words):
        sides = [_numbers(one) for one in " ".join(words).split("|")]
        self.world.cut = {
            (one, other)
            for side in sides
            for one in side
            for far in sides
            if far is not side
            for other in far
        }

    def do_heal(self, words):
        self.world.cut = set()

    def do_link(self, words):
        one, other = _numbers(words[0].replace("-", ","))
        for pair in ((one, other), (other, one)):
            if pair[0] in self.world.cores:
                event = LinkChanged(self.world.now_ms, pair[1], words[1] == "up")
                self.world.step(pair[0], event)

    def do_propose(self, words):
        world, node, count = self.world, int(words[0]), int(words[1])
        refusal = world.cores[node].refusal()
        if refusal is not None:
            world.say(f"{node} refuses {words[3]}: {refusal}")
            return
        world.disks[node].terms += [world.cores[node].term] * count
        world.step(node, Propose(world.now_ms, count, words[3]))

    def do_read(self, words):
        self.world.step(int(words[0]), ReadIndex(self.world.now_ms, words[2]))

    def do_transfer(self, words):
        event = Transfer(self.world.now_ms, int(words[2]), words[4])
        self.world.step(int(words[0]), event)

    def do_members(self, words):
        signs = dict(zip(words[3:-2:2], words[4:-2:2], strict=True))
        learners, leaving = (_numbers(signs.get(sign, "")) for sign in "+-")
        event = ChangeMembers(self.world.now_ms, _numbers(words[2]), words[-1], learners, leaving)
        self.world.step(int(words[0]), event)

    def do_hold(self, words):
        self.world.held.add(int(words[0]))

    def do_persist(self, words):
        node = int(words[0])
        index = int(words[1]) if len(words) > 1 else self.world.disks[node].end
        if len(words) == 1:
            self.world.held.discard(node)
        self.world.persist(node, index)

    def do_crash(self, words):
        world, node = self.world, int(words[0])
        disk = world.disks[node]
        del world.cores[node]
        del disk.terms[disk.persisted - disk.begin + 1 :]
        world.held.discard(node)

    def do_wipe(self, words):
        self.do_crash(words)
        self.world.disks[int(words[0])] = Disk()
        self.world.disks[int(words[0])].remembers = False

    def do_full(self, words):
        self.world.step(int(words[0]), DiskFull(self.world.now_ms, words[1] == "yes"))

    def do_blocked(self, words):
        self.world.step(int(words[0]), ReplayBlocked(self.world.now_ms, words[1] == "yes"))

    def do_hangs(self, words):
        self.world.step(int(words[0]), SyncHangs(self.world.now_ms, words[1] == "yes"))

    def do_retain(self, words):
        world, node, index = self.world, int(words[0]), int(words[1])
        disk = world.disks[node]
        world.step(node, Retained(world.now_ms, index))
        disk.prev_term = disk.terms[index - 1 - disk.begin]
        del disk.terms[: index - disk.begin]
        disk.begin = index

    def do_send(self, words):
        names = {name: getattr(protocol, name) for name in dir(protocol) if name[0].isupper()}
        message = eval(" ".join(words[1:]), names)  # noqa: S307 - of this repository
        self.world.queues.setdefault(_pair(words[0]), []).append(message)

    def do_show(self, words):
        nodes = _numbers(words[0]) if words else tuple(sorted(self.world.disks))
        for node in nodes:
            core = self.world.cores.get(node)
            if core is None:
                self.world.say(f"{node} is down")
                continue
            runs = " ".join(f"{term}@{first}" for term, first in core.terms) or "empty"
            log = f"{core.ledger_begin_index} to {core.ledger_end_index} ({runs})"
            role = f"{core.role.value} of term {core.term}, leader {core.leader}"
            self.world.say(f"{node} is {role}, log {log}, committed {core.committed_index}")
            for peer, state in core.dispatcher_states.items():
                mark = core.water_marks.get(peer)
                self.world.say(f"  {peer}: {state.value}, water mark {mark}")
            for learner in core.group.learners if core.role is Role.LEADER else ():
                self.world.say(f"  {learner} is a learner: {core.learner_waits(learner)}")


def _numbers(text):
    return tuple(int(one) for one in text.split(",") if one.strip())


def _pair(text):
    one, other = text.split(">")
    return int(one), int(other)


def run(path: pathlib.Path) -> str:
    """Run the scenario of a file; return the file as it should be."""
    runner = Runner()
    blocks = []
    for block in path.read_text().split("\n\n"):
        command, _, _ = block.strip("\n").partition("\n----")
        lines = command.split("\n")
        if all(line.startswith("#") or not line for line in lines):
            blocks.append(command)
            continue
        output = []
        for line in lines:
            if not line.startswith("#"):
                output += runner.run(line)
        blocks.append("\n".join([command, "----", *(output or ["(nothing)"])]))
    return "\n\n".join(blocks) + "\n"
