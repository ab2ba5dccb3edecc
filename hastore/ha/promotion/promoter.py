"""Carry out a promotion: survey, promise, count the answers, catch up, open the epoch.

docs/failover.md, "Promotion", has the rules; ha/rules/promotion.py decides by them. RoleService
calls the Promoter from its thread.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from hastore.config.model import Config
from hastore.errors import GroupDisagrees, HastoreError, PromotionRefused
from hastore.ha.hello.survey import SurveyReply, ask_all
from hastore.ha.node.member import Member
from hastore.ha.promotion.catch_up import catch_up
from hastore.ha.replica.rewind import cut_back
from hastore.ha.rules.epochs import EpochEntry, History, last_epoch, next_epoch
from hastore.ha.rules.promotion import PeerAnswer, Requirements, judge, most_advanced, new_entry
from hastore.protocol.hello import Promised, Purpose, Refused

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flags:
    """What the operator allows for this one promotion."""

    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False


class Promoter:
    """Attempts to promote this node.

    Only one thread uses it. The write gate keeps all other writers out of the log.
    """

    def __init__(
        self,
        member: Member,
        on_open: Callable[[EpochEntry], None],
        say: Callable[[str], None],
        stopping: Callable[[], bool],
    ) -> None:
        self._member = member
        self._on_open = on_open  # called under the gate's lock, right before the gate opens
        self._say = say  # receives the progress, for the status
        self._stopping = stopping
        self._tried_epoch = 0  # the last epoch for which this promotion asked for promises

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
        required = self._requirements(config)
        replies = ask_all(member, Purpose.SURVEY)
        self._check_overtaken(replies)
        self._check_no_refusal(replies, flags)
        answers = [
            self._own_answer(),
            *(_survey_answer(reply) for reply in replies if reply.hello is not None),
        ]
        self._require_enough(required, answers, replies, flags)
        best = most_advanced(answers, member.config.node)
        if flags.no_catch_up and best.node != member.config.node:
            raise PromotionRefused(
                f"node {best.node} is ahead (epoch {best.last_epoch}, end {best.log_end}) and "
                "--no-catch-up was given; promote it, or leave the flag out",
                final=True,
            )
        epoch = next_epoch(self._greatest_seen(replies), member.config.node)
        before_promise()
        self._tried_epoch = epoch
        replies = self._collect(epoch, required)
        answers = [
            self._own_answer(),
            *(_promised_answer(reply) for reply in replies if _promised(reply)),
        ]
        if required.fresh:
            required = _with_known(required, replies)
        self._require_enough(required, answers, replies, flags)
        self._catch_up(epoch, answers, replies, flags)
        # The catch-up may add epochs to the history. Their `acks` or node lists may need more
        # answers.
        self._require_enough(_widest(required, self._requirements(config)), answers, replies, flags)
        return self._open(epoch, required)

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

    def begin(self) -> None:
        """Start a new promotion: earlier attempts no longer count."""
        self._tried_epoch = 0

    def _check_overtaken(self, replies: list[SurveyReply]) -> None:
        """Refuse for good when another node has opened a higher epoch since the last attempt."""
        for reply in replies:
            if (
                self._tried_epoch
                and reply.hello is not None
                and reply.hello.open_epoch > self._tried_epoch
            ):
                raise PromotionRefused(
                    f"node {reply.node} has opened epoch {reply.hello.open_epoch} since this "
                    "promotion began; to supersede it run `hastore promote` again",
                    final=True,
                )

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
            fresh=not data.history,
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
        problems = "; ".join(
            f"node {reply.node} at {reply.address}: {problem}"
            for reply in replies
            if (problem := reply.problem or getattr(reply.answer, "reason", None)) is not None
        )
        reason = verdict.reason + (f" ({problems})" if problems else "")
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
            catch_up(
                self._member,
                epoch,
                source.node,
                source.address,
                _history(source),
                best.log_end,
                source_min=source.hello.min_offset if source.hello is not None else 0,
                accept_loss=flags.accept_loss,
                on_progress=lambda done, due: self._go_on(
                    f"catching up from node {best.node}: {done} of {due} bytes"
                ),
            )
        except OSError as error:
            raise PromotionRefused(f"the copy from node {best.node} failed: {error}") from error
        except PromotionRefused:
            raise
        except GroupDisagrees as error:  # a retry would fence other nodes and fail again
            raise PromotionRefused(str(error), final=True) from error
        except HastoreError as error:
            raise PromotionRefused(f"the copy from node {best.node} failed: {error}") from error

    def _open(self, epoch: int, required: Requirements) -> EpochEntry:
        member = self._member
        store, state = member.store, member.state
        with member.gate.lock:
            self._check_promise(epoch)
            if store.whole_offset < store.max_offset:  # an epoch starts where a record may start
                cut_back(
                    store,
                    state,
                    store.whole_offset,
                    len(state.history),
                    accept_loss=False,
                    why="a partial record at the log's end",
                )
        self._say("syncing the log")
        store.flush()
        self.wait_replayed()
        with member.gate.lock:
            self._check_promise(epoch)
            entry = new_entry(epoch, store.max_offset, required.acks, required.nodes)
            state.open_epoch(entry)
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

    def wait_replayed(self) -> None:
        """Wait until replay has read the log to its end."""
        store = self._member.store
        while not store.wait_dispatched(store.max_offset, 0.5):
            self._go_on(f"replaying the log: {store.dispatched_offset} of {store.max_offset}")

    def _go_on(self, progress: str) -> None:
        """Publish the progress; raises PromotionRefused when the node stops."""
        if self._stopping():
            raise PromotionRefused("the node stops")
        self._say(progress)


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


def _promised(reply: SurveyReply) -> bool:
    return isinstance(reply.answer, Promised)


def _history(reply: SurveyReply) -> History:
    assert isinstance(reply.answer, Promised)
    return reply.answer.history


def _survey_answer(reply: SurveyReply) -> PeerAnswer:
    assert reply.hello is not None
    hello = reply.hello
    return PeerAnswer(reply.node, last_epoch(hello.history), hello.max_offset, hello.unclean)


def _promised_answer(reply: SurveyReply) -> PeerAnswer:
    assert isinstance(reply.answer, Promised)
    answer = reply.answer
    return PeerAnswer(reply.node, last_epoch(answer.history), answer.max_offset, answer.unclean)
