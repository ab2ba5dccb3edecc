"""Promoter: one attempt at a promotion; CatchUp: its step 4, the copy of what this log lacks.

    survey -> could this node take puts? -> promises -> enough answers? -> catch up from the most
    advanced log -> open the epoch

A promise makes the old master read-only. So what can be known before is checked before; and after
the promises no step waits for something that may never come.

docs/failover.md, "Promotion", has the rules; ha/rules/promotion.py decides by them. RoleService
calls the Promoter from its thread.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from hastore.config.model import Config
from hastore.errors import (
    GroupDisagrees,
    HastoreError,
    PromotionRefused,
    ProtocolError,
    StoreFullError,
)
from hastore.ha.hello.peer import (
    Call,
    SurveyReply,
    ask_all,
    call,
    check_peer,
    telling_of_tampering,
)
from hastore.ha.node.member import Member
from hastore.ha.replica.digests import digest_fields
from hastore.ha.replica.receiver import Receiver
from hastore.ha.replica.rewind import cut_back, entries_at, finish_cut, refuse_loss
from hastore.ha.rules.epochs import (
    EpochEntry,
    History,
    WrittenOver,
    common_point,
    epoch_node,
    forgotten_end,
    last_epoch,
    next_epoch,
    nothing_to_compare,
)
from hastore.ha.rules.following import diverged, kept_log, refused_log, with_written_over
from hastore.ha.rules.promotion import (
    PeerAnswer,
    Requirements,
    judge,
    kept_apart,
    most_advanced,
    new_entry,
    opened_history,
    overtaking,
    replay_refusal,
)
from hastore.protocol.ha_link import Data, FrameStart, StreamDecoder
from hastore.protocol.hello import CopyFrom, Hello, Promised, Purpose, Refused
from hastore.security.tls_socket import LinkSocket

log = logging.getLogger(__name__)

BUFFER_BYTES = 1024 * 1024
REPLAY_GAP_BYTES = 64 * 1024 * 1024  # replay of so much takes a second or less
REPLAY_WAIT_S = 0.5  # until it is looked whether waiting for replay still makes sense


@dataclass(frozen=True, slots=True)
class Flags:
    """What the operator allows for this one promotion."""

    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False
    # A node without whose answer nothing is promoted: the master of a planned flip. So this node
    # copies all that it has, also what no slave has confirmed.
    needed_node: int | None = None
    # The order may be old, or the clocks differ: it means no later epoch than this one.
    meant_epoch: int | None = None


class Promoter:
    """Attempts to promote this node.

    Only one thread uses it. The write gate keeps all other writers out of the log.
    """

    def __init__(
        self,
        member: Member,
        on_open: Callable[[EpochEntry], None],
        say: Callable[[str], None],
        called_off: Callable[[], str | None],
    ) -> None:
        self._member = member
        self._on_open = on_open  # called under the gate's lock, right before the gate opens
        self._say = say  # receives the progress, for the status
        self._called_off = called_off  # why to leave a promotion that waits; None: go on
        # The greatest epoch that this promotion may supersede; None: all that the survey finds.
        self._known_epoch: int | None = None
        self._is_old = False  # the order to become master may be
        self._fenced: list[int] = []  # the masters that this promotion has asked for promises

    def attempt(
        self, config: Config, flags: Flags, *, before_promise: Callable[[], None]
    ) -> EpochEntry:
        """Try once; return the opened epoch's entry.

        `config` has the new epoch's `acks` and node list. Nothing changes before the survey has
        enough answers. After the survey this calls `before_promise`, which makes the node stop
        following a master. After that, this asks for the promises. Raises PromotionRefused when the
        attempt failed, with `final` if further attempts would fail too.
        """
        member = self._member
        required, own = self._requirements(config), member.hello(Purpose.SURVEY)
        replies = ask_all(member, Purpose.SURVEY)
        self._check_overtaken(replies)
        self._check_no_refusal(replies, flags)
        hellos = with_written_over([own, *(r.hello for r in replies if r.hello is not None)])
        kept = self._kept(hellos, flags)
        problem = diverged(hellos, None if kept is None else own.node)
        if problem is not None and not flags.force_unclean:
            raise PromotionRefused(problem)
        _require_needed(flags, replies, [r.node for r in replies if r.hello is not None])
        masters = [r.node for r in replies if r.hello is not None and r.hello.open_epoch]
        answers = [
            self._own_answer(),
            *surveyed_answers(replies),
        ]
        self._require_enough(required, answers, replies, flags)
        best = most_advanced(self._sources(answers, hellos, kept), member.config.node)
        if flags.no_catch_up and best.node != member.config.node:
            raise PromotionRefused(
                f"node {best.node} is ahead (epoch {best.last_epoch}, end {best.log_end}) and "
                "--no-catch-up was given; promote it, or leave the flag out",
                final=True,
            )
        self._require_room(best, self._require_common(best, replies, answers[0], flags))
        self._require_able()
        epoch = next_epoch(self._greatest_seen(replies), member.config.node)
        if kept is not None:
            epoch = next_epoch(epoch, member.config.node)  # the one before is for what it keeps
        before_promise()
        self._fenced = masters or self._fenced
        self._known_epoch = epoch
        replies = self._collect(epoch, required)
        _require_needed(flags, replies, [reply.node for reply in replies if _promised(reply)])
        answers = [
            self._own_answer(),
            *(_promised_answer(reply) for reply in replies if _promised(reply)),
        ]
        if required.fresh:
            required = _with_known(required, replies)
        self._require_enough(required, answers, replies, flags)
        own = member.hello(Purpose.SURVEY)
        # One that has refused the promise is copied by nobody: what it has does not count here.
        promised = [r.hello for r in replies if _promised(r) and r.hello is not None]
        hellos = with_written_over([own, *promised])
        if self._kept(hellos, flags) != kept:
            raise PromotionRefused("this log has changed during the survey; trying again")
        self._catch_up(epoch, self._sources(answers, hellos, kept), replies, flags)
        # The catch-up may add epochs to the history. Their `acks` or node lists may need more
        # answers.
        self._require_enough(_widest(required, self._requirements(config)), answers, replies, flags)
        return self._open(epoch, required, kept)

    def _check_no_refusal(self, replies: list[SurveyReply], flags: Flags) -> None:
        """Refuse the promotion when a node refuses the survey, unless `force_unclean` is set.

        Such a node does not accept this node's identity. For example, this node may have lost its
        disk: it must then not become master under its old number.
        """
        for reply in replies:
            if isinstance(reply.answer, Refused) and not flags.force_unclean:
                raise PromotionRefused(
                    f"node {reply.node} at {reply.address} refuses: {reply.answer.reason}"
                )

    def _kept(self, hellos: list[Hello], flags: Flags) -> WrittenOver | None:
        """Return what this node keeps although its master has replaced it, which needs
        `accept_loss`. Without that, refuse a promotion that would open or copy such a log.
        """
        own = hellos[0]
        kept = kept_log(own, hellos) if flags.accept_loss else None
        problem = refused_log(hellos, own.node) if kept is None else None
        if problem is not None:
            raise PromotionRefused(problem)
        return kept

    def _sources(
        self, answers: list[PeerAnswer], hellos: list[Hello], kept: WrittenOver | None
    ) -> list[PeerAnswer]:
        """Return the answers of those whose logs this promotion may open or copy: none that its
        master has refused, and if this node keeps such a log, no other.
        """
        own = self._member.config.node
        others = {one.node for one in hellos if kept is None and one.written_over is None}
        return [one for one in answers if one.node == own or one.node in others]

    def begin(self, known_epoch: int | None = None) -> None:
        """Start a new promotion: earlier attempts no longer count.

        `known_epoch` is the greatest epoch that this node knew when it got the order to become
        master, None if the order is of this moment.
        """
        self._known_epoch = known_epoch
        self._is_old = known_epoch is not None
        self._fenced = []

    def grow_old(self) -> None:
        """Note that the order waits: somebody else may be promoted meanwhile, where this node does
        not see it.
        """
        self._is_old = True

    def _check_overtaken(self, replies: list[SurveyReply]) -> None:
        """Refuse for good when a node has opened an epoch that the order to this node did not mean.

        An order of this moment means every epoch that its first survey finds. An older one may be
        older than a master that does not answer, too.
        """
        if self._known_epoch is None:
            self._known_epoch = self._greatest_seen(replies)
        hellos = [reply.hello for reply in replies if reply.hello is not None]
        opened = [(hello.open_epoch, hello.node) for hello in hellos]
        if self._is_old:
            opened += self._opened_by_silent(hellos)
        later = overtaking(self._known_epoch, opened)
        if later is not None:
            epoch, node = later
            silent = "" if node in {hello.node for hello in hellos} else (
                ", or before that without its knowledge, and does not answer now: it may be the "
                "master"
            )  # fmt: skip
            raise PromotionRefused(
                f"node {node} has opened epoch {epoch} since this node was told to become "
                f"master{silent}; to supersede it run `hastore promote` again",
                final=True,
            )

    def _opened_by_silent(self, hellos: list[Hello]) -> list[tuple[int, int]]:
        """Return the last epochs of all logs whose master does not answer, each with that node: it
        may be cut off from this node alone, and serve.
        """
        told = {self._member.config.node, *(hello.node for hello in hellos)}
        lasts = {self._member.state.last_epoch, *(last_epoch(hello.history) for hello in hellos)}
        owned = [(epoch, epoch_node(epoch)) for epoch in lasts]
        return [(epoch, node) for epoch, node in owned if node and node not in told]

    def _require_common(
        self, best: PeerAnswer, replies: list[SurveyReply], own: PeerAnswer, flags: Flags
    ) -> int:
        """Refuse for good, before the promises, a catch-up that could not begin.

        Return how many bytes it would cut of this log as it was surveyed: `own`. It may have grown
        since, because this node still follows.
        """
        source = next((reply for reply in replies if reply.node == best.node), None)
        if source is None or source.hello is None:
            return 0  # no other node is ahead
        catch_up = CatchUp(
            self._member, 0, source.node, source.address, source.hello.history,
            source.hello.min_offset, best.log_end, flags.accept_loss, lambda _done, _due: None,
        )  # fmt: skip
        member = self._member
        with member.gate.lock:
            if member.state.last_epoch != own.last_epoch or member.store.max_offset < own.log_end:
                raise PromotionRefused("this log has changed during the survey; trying again")
            try:
                return own.log_end - catch_up.common(own.log_end)[0]
            except GroupDisagrees as error:
                raise PromotionRefused(str(error), final=True) from error

    def _require_room(self, best: PeerAnswer, tail: int) -> None:
        """Refuse before the promises if the catch-up would fill the disk.

        The last `tail` bytes of this log are archived first. Without a catch-up that is a part of a
        record, if one is at the log's end. The log grows by whole files.
        """
        store = self._member.store
        if best.node == self._member.config.node:
            part, free = store.max_offset - store.whole_offset, store.free_bytes()
            if part > free:
                raise PromotionRefused(
                    f"a part of a record is at the log's end, and this node's disk has {free:,} "
                    f"bytes free of the {part:,} that its copy in rescued/ needs: make room; the "
                    "promotion then goes on"
                )
            return
        size, spare = store.file_size, store.spare_bytes
        files = -(-best.log_end // size) - -(-store.max_offset // size)  # rounded up, each
        needed, free = max(0, files * size - spare) + tail, store.free_bytes()
        if needed > free:
            raise PromotionRefused(
                f"node {best.node} is ahead, and this node's disk has {free:,} bytes free of the "
                f"{needed:,} that the catch-up needs: make room; the promotion then goes on"
                f"{self._fenced_text()}"
            )
        # The disk may refuse a file all the same, for which there seems to be room.
        if files > 0 and not spare and store.no_room is not None:
            raise PromotionRefused(
                f"node {best.node} is ahead, and the catch-up needs another log file here: "
                f"{store.no_room}{self._fenced_text()}"
            )

    def _require_able(self) -> None:
        """Refuse before the promises if the store is closed, or replay blocked or far behind."""
        store = self._member.store
        if store.broken_reason is not None:
            raise PromotionRefused(
                f"the store is closed: {store.broken_reason}; before its restart this node could "
                f"take no puts as master, so it asks for no promises{self._fenced_text()}"
            )
        # While somebody waits for it, replay does not rest.
        store.wait_dispatched(max(store.max_offset - REPLAY_GAP_BYTES, 0), REPLAY_WAIT_S)
        refusal = replay_refusal(
            store.replay_problem, store.dispatched_offset, store.max_offset, REPLAY_GAP_BYTES
        )
        if refusal is not None:
            raise PromotionRefused(refusal)

    def _requirements(self, config: Config) -> Requirements:
        data = self._member.state.data
        acks, nodes = config.effective_acks, tuple(sorted(config.nodes))
        return Requirements(
            node=config.node,
            nodes=nodes,
            acks=acks,
            acks_min=acks if data.acks_min is None else min(acks, data.acks_min),
            acks_max=acks if data.acks_max is None else max(acks, data.acks_max),
            old_nodes=tuple(old for old in data.node_lists if old != nodes),
            fresh=not data.history or (data.restored and data.unclean),
        )

    def _own_answer(self) -> PeerAnswer:
        state, store = self._member.state, self._member.store
        return PeerAnswer(
            self._member.config.node, state.last_epoch, store.max_offset, state.data.unclean
        )

    def _greatest_seen(self, replies: list[SurveyReply]) -> int:
        seen = max(self._member.state.data.promised_epoch, self._member.state.last_epoch)
        for reply in replies:
            if reply.hello is not None:
                seen = max(seen, reply.hello.promised_epoch, last_epoch(reply.hello.history))
        return seen

    def _require_enough(
        self,
        required: Requirements,
        answers: list[PeerAnswer],
        replies: list[SurveyReply],
        flags: Flags,
    ) -> None:
        verdict = judge(required, answers)
        if verdict.enough:
            return
        problems = _problems(replies)
        asked = {reply.node for reply in replies}
        problems += [
            f"node {node} is in the list in force, but not in `nodes` of this node's file, so its "
            "address is not known: put it there again until a promotion has succeeded"
            for node in verdict.missing
            if node not in asked
        ]
        reason = verdict.reason + (f" ({'; '.join(problems)})" if problems else "")
        if not flags.force_unclean:
            raise PromotionRefused(reason)
        log.error(
            "--force-unclean: continuing although %s; records that only those nodes acknowledged "
            "may be lost",
            reason,
        )

    def _collect(self, epoch: int, required: Requirements) -> list[SurveyReply]:
        """Make this node's promise, durably, then ask every other node; return their replies."""
        member = self._member
        self._say(f"asking for promises of epoch {epoch}")
        with member.gate.lock:
            if member.state.data.promised_epoch >= epoch:
                raise PromotionRefused(
                    f"epoch {member.state.data.promised_epoch} is promised already"
                )
            member.gate.close()
            member.open_epoch = 0
            finish_cut(member.store, member.state)  # one whose last write failed
            member.state.promise(epoch, required.acks, required.nodes)
        replies = ask_all(member, Purpose.PROMISE, acks=required.acks, nodes=required.nodes)
        for reply in replies:
            if _promised(reply) and reply.hello is not None:
                member.state.learn_store(reply.node, reply.hello.store_id)
        return replies

    def _catch_up(
        self, epoch: int, answers: list[PeerAnswer], replies: list[SurveyReply], flags: Flags
    ) -> None:
        best = most_advanced(answers, self._member.config.node)
        if best.node == self._member.config.node:
            return
        source = next(reply for reply in replies if reply.node == best.node)
        try:
            CatchUp(
                self._member,
                epoch,
                source.node,
                source.address,
                _history(source),
                source.hello.min_offset if source.hello is not None else 0,
                best.log_end,
                flags.accept_loss,
                lambda done, due: self._go_on(
                    epoch, f"catching up from node {best.node}: {done} of {due} bytes"
                ),
            ).complete()
        except OSError as error:
            raise PromotionRefused(f"the copy from node {best.node} failed: {error}") from error
        except PromotionRefused:
            raise
        except GroupDisagrees as error:  # a retry would fence other nodes and fail again
            raise PromotionRefused(str(error), final=True) from error
        except HastoreError as error:
            raise PromotionRefused(f"the copy from node {best.node} failed: {error}") from error

    def _open(self, epoch: int, required: Requirements, kept: WrittenOver | None) -> EpochEntry:
        member = self._member
        store, state = member.store, member.state
        with member.gate.lock:
            self._check_promise(epoch)
            if store.whole_offset < store.max_offset:  # an epoch starts where a record may start
                try:
                    cut_back(
                        store, state, store.whole_offset, len(state.history),
                        accept_loss=False, why="a partial record at the log's end",
                    )  # fmt: skip
                except StoreFullError as full:  # not final: other nodes are fenced already
                    raise PromotionRefused(f"{full}; the promotion then goes on") from full
        self._say("syncing the log")
        store.flush()
        self.wait_replayed(epoch)
        with member.gate.lock:
            self._check_promise(epoch)
            entry = new_entry(epoch, store.max_offset, required.acks, required.nodes)
            history = state.history
            if kept is not None and store.max_offset > kept.offset:
                history = kept_apart(history, kept, entry)
                log.error(
                    "--accept-loss: what node %d, the master of epoch %d, has written from %d on is"
                    " given up; this node's own messages there stay",
                    *(kept.node, kept.epoch, kept.offset),
                )
            state.open_epoch(opened_history(history, store.min_offset, entry))
            self._on_open(entry)
            member.open_epoch = epoch
            member.gate.open(epoch)
        return entry

    def _check_promise(self, epoch: int) -> None:
        promised = self._member.state.data.promised_epoch
        if promised != epoch:
            raise PromotionRefused(
                f"this node has promised epoch {promised} to another node meanwhile"
            )

    def wait_replayed(self, epoch: int) -> None:
        """Wait until replay has read the log to its end, before this node opens `epoch`.

        Raises PromotionRefused as soon as the wait is in vain: another epoch is promised, the
        operator has changed the role, replay is blocked, or the node stops.
        """
        store = self._member.store
        while not store.wait_dispatched(store.max_offset, REPLAY_WAIT_S):
            self._go_on(
                epoch, f"replaying the log: {store.dispatched_offset} of {store.max_offset}"
            )
            blocked = store.replay_problem
            if blocked is not None:
                raise PromotionRefused(self._blocked_text(blocked))
        history = self._member.state.history
        self._member.on_opening([(entry.epoch, entry.start) for entry in history])

    def _blocked_text(self, blocked: str) -> str:
        """Say what an operator can do if replay has stopped after the promises."""
        text = (
            f"{blocked}; this node takes no puts before that is mended: make room, or repair the "
            "folder or the disk; then it goes on by itself"
        )
        return f"{text}{self._fenced_text()}"

    def _fenced_text(self) -> str:
        """Say how the master that this promotion has fenced takes puts again; "" without one."""
        if not self._fenced:
            return ""
        nodes = ", ".join(map(str, self._fenced))
        epoch = self._known_epoch
        return (
            f"; node {nodes} has been read-only since the promise of epoch {epoch}: "
            "`hastore promote` there lets it take puts again, and this node then follows it"
        )

    def _go_on(self, epoch: int, progress: str) -> None:
        """Publish the progress; raises PromotionRefused when it is in vain to go on."""
        why = self._called_off()
        if why is not None:
            raise PromotionRefused(why)
        self._check_promise(epoch)
        self._say(progress)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Makes this log equal to that of `node`, as that node described it with its promise.

    The log is cut to the common point, then bytes and entries are copied up to `end`. `source_min`
    is the source's first byte. `on_progress(done, due)` is called with numbers of bytes.
    """

    member: Member
    epoch: int
    node: int
    address: str
    history: History
    source_min: int
    end: int
    accept_loss: bool
    on_progress: Callable[[int, int], None]

    def complete(self) -> None:
        """Cut, copy, and check that nothing is missing.

        Raises PromotionRefused when the source has changed since it answered. The refusal is
        `final` when the source lacks bytes that this log needs, when the logs share no known
        history, or when bytes that no epoch vouches for differ. Raises GroupDisagrees when a
        confirmed record would be cut and `accept_loss` is False.
        """
        member, store, state = self.member, self.member.store, self.member.state
        self._compare()
        with member.gate.lock:
            if state.data.promised_epoch != self.epoch:
                raise PromotionRefused(f"epoch {state.data.promised_epoch} was promised meanwhile")
            self._cut()
            member.gate.open(self.epoch)
        log.info("catching up from node %d: bytes %d to %d", self.node, store.max_offset, self.end)
        try:
            receiver = Receiver(member, self.epoch, self.history)
            receiver.begin()
            if store.max_offset < self.end:
                self._copy(receiver)
        finally:
            member.gate.close()
        if store.max_offset != self.end or state.last_epoch != last_epoch(self.history):
            raise PromotionRefused(f"the copy from node {self.node} ended early; trying again")

    def _cut(self) -> None:
        """Cut this log to the common point; the caller holds the gate's lock."""
        store, state = self.member.store, self.member.state
        common, kept = self.common(store.max_offset)
        if common < store.max_offset:
            cut_back(
                store, state, common, entries_at(state.history, common, kept),
                accept_loss=self.accept_loss, why=f"node {self.node} is ahead",
            )  # fmt: skip

    def common(self, my_end: int) -> tuple[int, int]:
        """Return the common point, and how many own entries are shared; changes nothing.

        This log ends at `my_end`, or did so when the source described itself.
        Raises PromotionRefused, final, and GroupDisagrees as `complete` does.
        """
        store, mine = self.member.store, self.member.state.history
        node, history, end = self.node, self.history, self.end
        common, kept = common_point(mine, my_end, history, end)
        over = self.member.written_over
        if over is not None:
            common = min(common, over.offset)
        foreign = not mine and my_end > 0
        if not kept and forgotten_end(mine, my_end, history, end):
            raise PromotionRefused(
                f"node {node} is ahead, and the two logs diverged more epochs ago than a history "
                f"holds; promote node {node}; this node then copies its log",
                final=True,
            )
        # A common point of 0 alone is no reason to refuse: all of this log is then cut as a tail.
        if common < store.min_offset or foreign:
            raise PromotionRefused(
                f"node {node} is ahead and shares no history with this node's log; promote "
                f"node {node}",
                final=True,
            )
        blind = nothing_to_compare(
            mine, store.min_offset, my_end, history, self.source_min, end
        )
        if blind or common < min(self.source_min, end):
            raise PromotionRefused(
                f"node {node} is ahead and its log begins at {self.source_min}, beyond this node's "
                f"common point {common}; promote node {node}",
                final=True,
            )
        if common < my_end and not self.accept_loss:
            refuse_loss(store, common, f"node {node} is ahead")
        return common, kept

    def _digest(self) -> dict[str, Any]:
        return digest_fields(self.member, self.history, self.source_min, self.end)

    def _compare(self) -> None:
        """Compare the bytes that no epoch vouches for, before anything is cut or copied.

        This asks for a COPY of zero bytes and sends the digest with it. Raises PromotionRefused
        when the source refuses: final when the bytes differ, not final when retention has changed
        the range of either log meanwhile.
        """
        digest = self._digest()
        if digest:
            at = digest["digest_to"]
            hello = self.member.hello(Purpose.COPY, copy_from=at, copy_to=at, **digest)
            self._ask(hello, final_from=self.source_min).close()

    def _ask(self, hello: Hello, *, final_from: int | None = None) -> Call:
        """Ask for a copy. Raises PromotionRefused when the source refuses.

        The refusal is final when the digest was sent and the source's log still begins at
        `final_from`.
        """
        member, node = self.member, self.node
        timeout_ms = member.config.ha.hello_timeout_ms
        with telling_of_tampering(member.on_refused, self.address):
            opened = call(
                self.address, hello, member.secret, member.clock, timeout_ms, member.tls,
                may_be_old=member.may_be_old(node),
            )  # fmt: skip
        try:
            check_peer(member, opened, node, self.address)
            if isinstance(opened.answer, Refused):
                reason = f"node {node} refuses the copy: {opened.answer.reason}"
                final = bool(hello.digest) and opened.hello.min_offset == final_from
                raise PromotionRefused(reason, final=final)
            if not isinstance(opened.answer, CopyFrom):
                raise ProtocolError(f"node {node} answered a COPY with {opened.answer!r}")
        except (HastoreError, OSError):
            opened.close()
            raise
        return opened

    def _copy(self, receiver: Receiver) -> None:
        member = self.member
        hello = member.hello(
            Purpose.COPY,
            copy_from=member.store.max_offset,
            copy_to=self.end,
            expect_epoch=last_epoch(self.history),
            expect_end=self.end,
            **self._digest(),
        )
        opened = self._ask(hello)
        try:
            opened.sock.settimeout(member.config.ha.housekeeping_interval_ms / 1000)
            with telling_of_tampering(member.on_refused, self.address):
                self._receive(receiver, opened.sock)
        finally:
            opened.close()

    def _receive(self, receiver: Receiver, sock: LinkSocket) -> None:
        store, node, end = self.member.store, self.node, self.end
        decoder = StreamDecoder(control_frames=False)
        buffer = memoryview(bytearray(BUFFER_BYTES))
        start = store.max_offset
        while store.max_offset < end:
            try:
                size = sock.recv_into(buffer)
            except TimeoutError as error:
                raise ProtocolError(
                    f"node {node} has stopped sending the copy; its log may say why"
                ) from error
            if not size:
                return
            for event in decoder.feed(buffer[:size]):
                if isinstance(event, FrameStart) and event.offset != store.max_offset:
                    raise ProtocolError(
                        f"the copy continues at {event.offset}, the log at {store.max_offset}"
                    )
                if isinstance(event, Data):
                    if event.offset + len(event.data) > end:
                        raise ProtocolError(
                            f"node {node} sends bytes beyond {end}, the end that it has answered"
                        )
                    receiver.append(event.offset, event.data, _refuse_full)
            self.on_progress(store.max_offset - start, end - start)


def _refuse_full() -> None:
    raise PromotionRefused("the disk became full during the catch-up; make room")


def _with_known(required: Requirements, replies: list[SurveyReply]) -> Requirements:
    """Add the `acks` and node lists that other nodes know. A fresh node knows none itself."""
    for reply in replies:
        if isinstance(reply.answer, Promised) and reply.answer.acks_min is not None:
            low, high = reply.answer.acks_min, reply.answer.acks_max
            known = replace(
                required,
                acks_min=low,
                acks_max=low if high is None else high,
                old_nodes=tuple(old for old in reply.answer.node_lists if old != required.nodes),
            )
            required = _widest(required, known)
    return required


def _widest(required: Requirements, other: Requirements) -> Requirements:
    """Return requirements with every `acks` and node list of either argument."""
    return replace(
        required,
        acks_min=min(required.acks_min, other.acks_min),
        acks_max=max(required.acks_max, other.acks_max),
        old_nodes=tuple(dict.fromkeys(required.old_nodes + other.old_nodes)),
    )


def _problems(replies: Iterable[SurveyReply]) -> list[str]:
    """Say of each node without an answer, or that has refused, why."""
    return [
        f"node {reply.node} at {reply.address}: {problem}"
        for reply in replies
        if (problem := reply.problem or getattr(reply.answer, "reason", None)) is not None
    ]


def _require_needed(flags: Flags, replies: list[SurveyReply], answered: Collection[int]) -> None:
    """Refuse the promotion for now while the node that the operator names has not answered."""
    node = flags.needed_node
    if node is not None and node not in answered:
        problems = _problems(reply for reply in replies if reply.node == node)
        raise PromotionRefused(
            f"waiting for node {node}, which may have acknowledged messages that no other node "
            "has; if it is gone for good, `hastore promote` goes on without it"
            + (f" ({problems[0]})" if problems else "")
        )


def _promised(reply: SurveyReply) -> bool:
    return isinstance(reply.answer, Promised)


def _history(reply: SurveyReply) -> History:
    assert isinstance(reply.answer, Promised)
    return reply.answer.history


def surveyed_answers(replies: list[SurveyReply]) -> list[PeerAnswer]:
    """Return the state of each node that has answered a survey."""
    hellos = [(reply.node, reply.hello) for reply in replies if reply.hello is not None]
    return [
        PeerAnswer(node, last_epoch(hello.history), hello.max_offset, hello.unclean)
        for node, hello in hellos
    ]


def _promised_answer(reply: SurveyReply) -> PeerAnswer:
    assert isinstance(reply.answer, Promised)
    answer = reply.answer
    return PeerAnswer(reply.node, last_epoch(answer.history), answer.max_offset, answer.unclean)
