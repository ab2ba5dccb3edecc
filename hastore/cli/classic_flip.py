"""A planned flip in mode classic: the master's role goes to another node, and nothing is lost.

It does what docs/operations.md, "The flip", says, in this order:

    look        every node's status; which of their files, or which registry, is here
    call off    promotions of other nodes, which an interrupted flip has left
    wait        until the wanted node follows the master closely, so that the flip is short
    promote     the wanted node, which needs the answer of the present master (`needed_node`): so it
                copies all that the master has acknowledged, also what no slave has confirmed
    demote      the other nodes in their files
    wait        until all nodes follow the new master closely

Until the wanted node asks for promises the old master takes puts. A command that is interrupted
leaves a state from which the same command, or one with the old master's number, goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from hastore.cli.flip import REFUSED_AFTER_S, TELL_AFTER_S, Notes, OneShotFlags, told_reason
from hastore.cli.group_files import NOTHING, STATELESS, Flip, Status, slave_of
from hastore.cli.own_node import RolePlace, has_closed_store
from hastore.client.messages import next_file_lack, replay_stop
from hastore.config.model import Role
from hastore.errors import HastoreError, PromotionRefused

CALL_OFF_S = 5.0  # how long a flip that has failed waits until it is called off
NEAR_BYTES = 4 * 1024 * 1024  # what the wanted node may lack when its promotion begins


class ClassicFlip(Flip):
    """One planned flip in mode classic; `run` returns the new master's status."""

    _epoch = 0  # that of node `to` as the master; before that, the greatest that was seen

    def run(self, *, only_check: bool) -> Status:
        """Do the steps; raises HastoreError or UsageError, which say what the state is."""
        group, to = self._group, self._to
        before = group.look()
        target = before.get(to)
        if target is None:
            raise HastoreError(f"{group.name(to)} does not answer; {NOTHING}: start it first")
        self.master = self._find_master(before)
        place = group.needed_place(to)
        others = self._promoting(before)
        if only_check:
            self._tell_plan(before, others)
            return target
        self._epoch = max(int(one["epoch"]) for one in before.values())
        for number in others:
            self._call_off(number)
        if others:  # one may have opened its epoch in that moment
            before = group.look()
            self.master = self._find_master(before)
        if self.master == to:
            self._is_asked = True
            self._say("found", f"node {to} is the {target['role']} already")
        elif self.master is not None:
            self._wait_close(self.master)
        try:
            if self.master != to:
                self._promote(place, before)
            else:
                self._epoch = int(before[to]["epoch"])
            for number in sorted(before):
                if number != to:
                    self._demote(number)
            status = self._wait_whole(self._expected(before))
            self._check_cuts(before)
        except STATELESS as failure:
            if not self._is_asked:
                raise
            raise HastoreError(f"{failure}; {self._state()}") from failure
        return status

    def _state(self) -> str:
        """Say how far the flip is once the wanted node was asked, and how to go on."""
        back = "" if self.master in (None, self._to) else f", or with --to {self.master} to undo it"
        return (
            f"node {self._to} is the master, or becomes it once it can: run {self._again} again to "
            f"complete the flip{back}; see `hastore status`"
        )

    def _find_master(self, seen: Mapping[int, Status]) -> int | None:
        """Return the master; None after an interrupted flip. Raises HastoreError if none can be."""
        group, target = self._group, seen[self._to]
        silent = sorted(set(group.config.nodes) - set(seen))
        text = ", ".join(map(str, silent))
        if target.get("classic_master"):
            raise HastoreError(
                f"node {self._to} follows the RocketMQ master {target['classic_master']}; "
                f"{NOTHING}: docs/migrate-from-rocketmq.md says how to take over from it"
            )
        if target["unclean"]:
            raise HastoreError(
                f"node {self._to} is unclean: it may lack messages that it acknowledged; {NOTHING}:"
                " let it follow the master first"
            )
        masters = [n for n, one in seen.items() if one["role_state"] == "master"]
        if self._to not in masters:
            self._check_able(target, serves=any(seen[n]["writable"] for n in masters))
        if masters:
            master = max(masters, key=lambda number: int(seen[number]["epoch"]))
            self._say("found", _found_text(seen, master, self._to))
            if silent:
                text = f"node {text} does not answer; the flip goes on if enough others do, and "
                self._say("found", f"{text}waits for it for a moment, without a master")
            return master
        for number, one in seen.items():
            if one["role_state"] == "resuming" or one["writable"]:
                raise HastoreError(
                    f"node {number} is not settled ({one['reason'] or 'it begins a new epoch'}); "
                    f"{NOTHING}: try again in a moment, or see `hastore status`"
                )
        if silent:
            raise HastoreError(
                f"no node that answers is the master, and node {text} does not answer: a flip "
                f"needs the master's answer; {NOTHING}: `hastore status` says what to do"
            )
        self._say("found", "no node is the master now; all nodes answer, so the flip goes on")
        return None

    def _check_able(self, target: Status, *, serves: bool) -> None:
        """Raise HastoreError if the wanted node could take no puts; tell its other problems.

        While a master `serves` and takes puts, a node whose disk is full is not to take its place:
        it could take puts only until its log's last file is full.
        """
        stop, lack = replay_stop(target), next_file_lack(target) if serves else None
        for text in target["problems"]:
            if text == lack:
                raise HastoreError(
                    f"node {self._to} could soon take no puts as the master, because it has no "
                    f"room for its log's next file: {text}; {NOTHING}: make room there, and run "
                    "this again"
                )
            if text == stop:
                raise HastoreError(
                    f"node {self._to} could take no puts as the master: {text}; {NOTHING}: make "
                    "room, or repair its folder or disk, and run this again"
                )
            if text != target["reason"]:  # the reason of an interrupted flip is told as it waits
                self._say("found", f"node {self._to} has a problem: {text}")

    def _promoting(self, seen: Mapping[int, Status]) -> list[int]:
        """Return the other nodes that wait to become master; raises UsageError as needed_place."""
        found = [
            number
            for number, one in seen.items()
            if number != self._to and one["role_state"] == "promoting"
        ]
        for number in found:
            self._group.needed_place(number)
        return found

    def _tell_plan(self, seen: Mapping[int, Status], others: list[int]) -> None:
        for number in others:
            self._say("would", f"would call off the promotion of node {number}")
        if self.master != self._to:
            self._say("would", f"would make node {self._to} the master")
        for number in sorted(set(seen) - {self._to}):
            place = self._group.place(number)
            role = None if place is None else place.role()
            if place is not None and role is not None and role.is_master:
                self._say("would", f"would then make node {number} a slave in {place.what}")

    def _call_off(self, number: int) -> None:
        """End the promotion of another node, which an earlier flip has left.

        It tries again each second, with a promise of another epoch each time. If it has become the
        master meanwhile, the flip begins with that one.
        """
        status = self._group.ask(number)
        if status is not None and status["role_state"] != "promoting":
            return
        self._group.needed_place(number).change(Role.SLAVE)
        self._wait(
            lambda: (one := self._group.ask(number)) is None or one["role_state"] != "promoting",
            lambda: f"node {number} does not call off its promotion; see its reason",
        )
        self._say("called off", f"the promotion of node {number} is called off")

    def _wait_close(self, master: int) -> None:
        """Wait until the wanted node lacks little of the master's log: the flip is then short."""
        last: list[Any] = [None]
        began, told = time.monotonic(), False

        def near() -> bool:
            nonlocal told
            status = self._group.ask(master)
            superseded = self._superseded(status, master)
            if superseded is not None:
                raise PromotionRefused(f"{superseded}; {NOTHING}")
            last[0] = None if status is None else slave_of(status, self._to)
            slave = last[0]
            if slave is not None and slave["in_sync"] and slave["lag_bytes"] <= NEAR_BYTES:
                return True
            if not told and time.monotonic() - began >= TELL_AFTER_S:
                told = True
                self._say("waits", f"{lacks()}; the flip goes on once it follows closely")
            return False

        def lacks() -> str:
            if last[0] is not None:
                return f"node {self._to} is {last[0]['lag_bytes']:,} bytes behind node {master}"
            reason = (self._group.ask(self._to) or {}).get("reason")
            return f"node {self._to} does not follow node {master}, the master ({reason})"

        def late() -> str:
            remedy = "see `hastore status`"
            if last[0] is not None:
                remedy = "wait until it is in sync (`hastore status --wait 600`)"
            return f"{lacks()}; {NOTHING}: {remedy}"

        self._wait(near, late)
        lag = last[0]["lag_bytes"]
        self._say("in sync", f"node {self._to} follows node {master}, {lag:,} bytes behind")

    # -- the promotion ---------------------------------------------------------------------------

    def _promote(self, place: RolePlace, before: Mapping[int, Status]) -> None:
        began = time.monotonic()
        status = self._group.ask(self._to) or before[self._to]
        needed = self.master if self.master is not None else _most_advanced(before, self._to)
        epoch = max(int(one["epoch"]) for one in before.values())
        role = self._new_role(place, before)
        flags = {**asdict(OneShotFlags()), "needed_node": needed}
        place.change_once(role, "promote", flags, status)
        self._is_asked = True
        back = "" if self.master is None else (
            f"; it becomes that once it can, also if this command is killed: to call it off, run "
            f"`hastore flip -c {self._group.given} --to {self.master}`"
        )  # fmt: skip
        text = f"node {self._to} is to be the {role.value} ({place.what} says so now{back})"
        self._say("asked", text)
        reason: list[str | None] = [None]
        notes = Notes(f"node {self._to}", lambda text: self._say("waits", text))

        def done() -> bool:
            now = self._group.ask(self._to)
            if now is None:
                reason[0] = "it does not answer"
                return False
            if now["role_state"] == "master" and now["epoch"] > epoch and now["writable"]:
                self._epoch = int(now["epoch"])
                text = f"node {self._to} is the {now['role']} of epoch {now['epoch']}"
                self._say("promoted", f"{text}, after {time.monotonic() - began:.1f} s")
                return True
            reason[0] = told_reason(now, str(now["reason"]))
            if time.monotonic() - began >= TELL_AFTER_S:
                notes.tell(now, role)
            ended = now["role_state"] == "following" and now["reason"] != status["reason"]
            if ended and time.monotonic() - began > REFUSED_AFTER_S:
                self._failed(place, str(reason[0]))
            return False

        self._wait(done, lambda: self._failed(place, str(reason[0])))

    def _new_role(self, place: RolePlace, before: Mapping[int, Status]) -> Role:
        """Return the role of the present master; without one, that in the files."""
        if self.master is not None:
            return Role(before[self.master]["role"])
        places = [place, *map(self._group.place, sorted(set(before) - {self._to}))]
        roles = [each.role() for each in places if each is not None]
        return next((role for role in roles if role is not None and role.is_master),
                    Role.SYNC_MASTER)  # fmt: skip

    def _failed(self, place: RolePlace, reason: str) -> NoReturn:
        """Call the flip off if the old master still takes puts; raise, with the state."""
        text = f"node {self._to} has not become the master: {reason}"
        old, now = self.master, self._group.ask(self._to)
        if now is not None and now["role_state"] == "following":
            other = now.get("master")
            if other not in (None, old):
                raise PromotionRefused(f"{text}; {_overruled_text(other)}")
        if old is not None and self._is_master(old):
            try:
                place.change(Role.SLAVE)
            except HastoreError as failure:
                raise PromotionRefused(
                    f"{text}. It could not be called off: {failure}. Node {old} is still the "
                    f"master, and node {self._to} takes over as soon as it can, if {place.what} "
                    f"says so: run {self._again} to go on, or, once it answers, `hastore flip -c "
                    f"{self._group.given} --to {old}` to call it off"
                ) from failure
            self._wait_until(
                lambda: (self._group.ask(self._to) or {}).get("role_state") == "following",
                time.monotonic() + CALL_OFF_S,
            )
            if self._is_master(old):
                raise PromotionRefused(
                    f"{text}. The flip is called off: node {old} goes on as the master. To try "
                    f"again, run {self._again}"
                )
            raise PromotionRefused(
                f"{text}. It was called off too late: no node may be the master now. To go on, run "
                f"{self._again}; to go back, the same with --to {old}"
            )
        back = "" if old is None else f"; to go back, run it with --to {old}"
        raise PromotionRefused(
            f"{text}. Perhaps no node takes puts now. Node {self._to} tries again each second as "
            f"long as {place.what} says so: do what the reason names, and run {self._again} to "
            f"complete the flip{back}"
        )

    def _is_master(self, number: int) -> bool:
        status = self._group.ask(number)
        return status is not None and status["role_state"] == "master"

    # -- afterwards ------------------------------------------------------------------------------

    def _demote(self, number: int) -> None:
        """Make another node a slave in its file too, if that says master and is here."""
        place = self._group.place(number)
        if place is None:
            status = self._group.ask(number)
            if status is not None and status["reason"] in status["problems"]:
                file = status.get("config") or "FILE"
                self._say(
                    "left", f"node {number} follows, but its file still says master: run `hastore "
                    f"demote -c {file}` on its machine",
                )  # fmt: skip
            return
        try:
            role = place.role()
            if role is None or not role.is_master:
                return
            self._refuse_overruled(number)
            place.change(Role.SLAVE)
        except PromotionRefused:
            raise
        except HastoreError as failure:
            if not self._group.remote:
                raise
            self._say("left", f"the file of node {number} may still say master: {failure}")
            return

        unread = f"node {number} has not read its changed role"
        late = [unread]

        def settled() -> bool:
            status = self._group.ask(number)
            if status is None:
                return False
            late[0] = told_reason(status, unread)
            return status["role"] == Role.SLAVE.value and status["reason"] not in status["problems"]

        self._wait(settled, lambda: self._after(late[0]))
        self._say("demoted", f"node {number} is a slave, also in {place.what}")

    def _refuse_overruled(self, number: int) -> None:
        """Raise PromotionRefused if this node has become the master since, or is about to.

        To make it a slave then would leave the group without a master.
        """
        one = self._group.ask(number)
        if one is None:
            return
        opens = one["role_state"] == "promoting" and one.get("promised_epoch", 0) > self._epoch
        if opens or one["role_state"] == "master" and int(one["epoch"]) > self._epoch:
            raise PromotionRefused(_overruled_text(number))

    def _superseded(self, status: Status | None, number: int) -> str | None:
        """Return who is the master in place of this node, whose `status` it is; None: it is."""
        if status is None or status["role_state"] != "following":
            return None
        other = status.get("master")
        if other is not None:
            return _overruled_text(other)
        return f"node {number} is not the master any more: {status['reason']}; see `hastore status`"

    def _expected(self, before: Mapping[int, Status]) -> list[int]:
        """Return the nodes that must follow in the end: the old master, and those that did.

        Not a master whose store is closed: it takes nothing until a restart.
        """
        if self.master is None:
            return sorted(set(before) - {self._to})
        slaves = before[self.master]["slaves"]
        near = {one["node"] for one in slaves if one["in_sync"] and one["node"] in before}
        if has_closed_store(before[self.master]):
            self._say("left", f"node {self.master} follows once it is restarted, because its store "
                      "is closed: look at its disk first")  # fmt: skip
            return sorted(near - {self._to})
        return sorted({self.master, *near} - {self._to})

    def _wait_whole(self, others: list[int]) -> Status:
        """Wait until the new master takes puts, and all others follow it closely."""
        last: list[Status] = [{}]

        def whole() -> bool:
            status = self._group.ask(self._to)
            if status is None:
                return False
            superseded = self._superseded(status, self._to)
            if superseded is not None:
                raise PromotionRefused(superseded)
            last[0] = status
            near = {one["node"] for one in status["slaves"] if one["in_sync"]}
            return bool(status["takes_default"]) and near.issuperset(others)

        def late() -> str:
            near = {one["node"] for one in last[0].get("slaves", []) if one["in_sync"]}
            behind = ", ".join(str(one) for one in others if one not in near)
            if behind:
                return self._after(f"node {behind} is not in sync with it yet")
            return self._after(str(last[0].get("default_refused") or "it does not answer"))

        self._wait(whole, late)
        listed = ", ".join(map(str, others))
        if others:
            verb = "follows" if len(others) == 1 else "follow"
            self._say("whole", f"node {listed} {verb} node {self._to}, in sync")
        return last[0]

    def _check_cuts(self, before: Mapping[int, Status]) -> None:
        """Look whether messages were cut off a log, which `needed_node` rules out."""
        for number, was in before.items():
            known = {one["id"] for one in was.get("cuts") or []}
            now = self._group.ask(number) or was
            new = [one for one in now.get("cuts") or [] if one["id"] not in known]
            if new:
                raise HastoreError(self._after(
                    f"{sum(one['messages'] for one in new):,} messages were cut off the log of "
                    f"node {number} and kept: see `hastore rescued list -c {now.get('config')}`"
                ))  # fmt: skip

    def _after(self, problem: str) -> str:
        status = self._group.ask(self._to)
        superseded = self._superseded(status, self._to)
        if superseded is not None:
            return superseded
        is_master = "is the master" if status is not None else "was made the master"
        return (
            f"node {self._to} {is_master}, but {problem}; run {self._again} again, or see "
            "`hastore status`"
        )

    def _wait(self, done: Callable[[], bool], late: Callable[[], str]) -> None:
        """Wait until `done()`; raise HastoreError with `late()` at the command's deadline."""
        if not self._wait_until(done):
            raise HastoreError(f"{late()} (after {self._timeout_s:g} s)")


def _found_text(seen: Mapping[int, Status], master: int, to: int) -> str:
    one = seen[master]
    text = f"node {master} is the {one['role']} of epoch {one['epoch']}"
    if master == to:
        return text
    slave = slave_of(one, to)
    if slave is None:
        return f"{text}; node {to} does not follow it yet"
    sync = "in sync" if slave["in_sync"] else "not in sync"
    return f"{text}; node {to} follows it, {sync}, {slave['lag_bytes']:,} bytes behind"


def _most_advanced(seen: Mapping[int, Status], to: int) -> int | None:
    """Return the node whose log is ahead of that of `to`; None if there is none."""
    best = max(seen, key=lambda number: (seen[number]["epoch"], seen[number]["max_offset"]))
    ahead = (seen[best]["epoch"], seen[best]["max_offset"])
    return best if ahead > (seen[to]["epoch"], seen[to]["max_offset"]) else None


def _overruled_text(number: int) -> str:
    return f"another operator has made node {number} the master; see `hastore status`"
