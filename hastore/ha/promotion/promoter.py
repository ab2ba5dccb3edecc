"""Carry out one attempt at a promotion (docs/failover.md, "Promotion"): survey, promise,
count, catch up, open.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from hastore.config.model import Config
from hastore.errors import GroupDisagrees, HastoreError, PromotionRefused
from hastore.ha.hello.survey import Heard, ask_all
from hastore.ha.node.member import Member
from hastore.ha.node.rewind import cut_back
from hastore.ha.promotion.catch_up import catch_up
from hastore.ha.rules.epochs import EpochEntry, History, last_epoch, next_epoch
from hastore.ha.rules.promotion import Terms, Voice, greatest, judge, new_entry
from hastore.protocol.hello import Promised, Purpose, Refused

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Flags:
    """What the operator allows for this one promotion."""

    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False


class Promoter:
    """Attempts at a promotion of this node. One thread uses it; the gate keeps others out of
    the log.
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
        self._say = say  # the progress, for status
        self._stopping = stopping
        self._tried_epoch = 0  # of the last attempt in this promotion that raised its promise

    def attempt(
        self, config: Config, flags: Flags, *, before_promise: Callable[[], None]
    ) -> EpochEntry:
        """Try once; return the opened epoch's entry. PromotionRefused says why not, and if finally.

        `config` proposes the epoch's `acks` and node list. Nothing is changed before the survey
        suffices; then `before_promise` stops what follows a master, and the promises begin.
        """
        member = self._member
        terms = self._terms(config)
        heard = ask_all(member, Purpose.SURVEY)
        self._check_overtaken(heard)
        self._check_welcome(heard, flags)
        voices = [self._own_voice(), *(_voice(h) for h in heard if h.hello is not None)]
        self._demand(terms, voices, heard, flags)
        best = greatest(voices, member.config.node)
        if flags.no_catch_up and best.node != member.config.node:
            raise PromotionRefused(
                f"node {best.node} is ahead (epoch {best.last_epoch}, end {best.log_end}) and "
                "--no-catch-up was given; promote it, or leave the flag out",
                final=True,
            )
        epoch = next_epoch(self._greatest_seen(heard), member.config.node)
        before_promise()
        self._tried_epoch = epoch
        answers = self._collect(epoch, terms)
        voices = [self._own_voice(), *(_promised_voice(h) for h in answers if _promised(h))]
        if terms.fresh:
            terms = _merged(terms, answers)
        self._demand(terms, voices, answers, flags)
        self._catch_up(epoch, voices, answers, flags)
        # Entries taken over may bring other `acks` and lists: then more answers are needed.
        self._demand(_widest(terms, self._terms(config)), voices, answers, flags)
        return self._open(epoch, terms)

    def _check_welcome(self, heard: list[Heard], flags: Flags) -> None:
        """A node that answers a survey by a refusal does not take this one for what it says it is:
        its number is known with another store, say. An empty disk must not open under an old name.
        """
        for h in heard:
            if isinstance(h.answer, Refused) and not flags.force_unclean:
                raise PromotionRefused(f"node {h.node} at {h.address} refuses: {h.answer.reason}")

    def begin(self) -> None:
        """Forget earlier attempts: the operator asks for a new promotion."""
        self._tried_epoch = 0

    def _check_overtaken(self, heard: list[Heard]) -> None:
        """End a promotion that somebody else's overtook: one that opened since the last attempt."""
        for h in heard:
            if self._tried_epoch and h.hello is not None and h.hello.open_epoch > self._tried_epoch:
                raise PromotionRefused(
                    f"node {h.node} has opened epoch {h.hello.open_epoch} since this "
                    "promotion began; "
                    "to supersede it run `hastore promote` again",
                    final=True,
                )

    def _terms(self, config: Config) -> Terms:
        data = self._member.state.data
        acks, nodes = config.effective_acks, tuple(sorted(config.nodes))
        return Terms(
            node=config.node,
            nodes=nodes,
            acks=acks,
            acks_min=acks if data.acks_min is None else min(acks, data.acks_min),
            acks_max=acks if data.acks_max is None else max(acks, data.acks_max),
            old_nodes=tuple(old for old in data.node_lists if old != nodes),
            fresh=not data.history,
        )

    def _own_voice(self) -> Voice:
        state, store = self._member.state, self._member.store
        return Voice(
            self._member.config.node, state.last_epoch, store.max_offset, state.data.unclean
        )

    def _greatest_seen(self, heard: list[Heard]) -> int:
        seen = max(self._member.state.data.promised_epoch, self._member.state.last_epoch)
        for h in heard:
            if h.hello is not None:
                seen = max(seen, h.hello.promised_epoch, last_epoch(h.hello.history))
        return seen

    def _demand(self, terms: Terms, voices: list[Voice], heard: list[Heard], flags: Flags) -> None:
        verdict = judge(terms, voices)
        if verdict.enough:
            return
        problems = "; ".join(
            f"node {h.node} at {h.address}: {h.problem or getattr(h.answer, 'reason', '')}"
            for h in heard
            if h.problem is not None or isinstance(h.answer, Refused)
        )
        reason = verdict.reason + (f" ({problems})" if problems else "")
        if not flags.force_unclean:
            raise PromotionRefused(reason)
        log.error(
            "--force-unclean: going on although %s; what those nodes alone acknowledged is lost",
            reason,
        )

    def _collect(self, epoch: int, terms: Terms) -> list[Heard]:
        """Promise to itself, then ask every node. Only what they answer after their promise
        counts.
        """
        member = self._member
        self._say(f"asking for promises of epoch {epoch}")
        with member.gate.lock:
            if member.state.data.promised_epoch >= epoch:
                raise PromotionRefused(
                    f"epoch {member.state.data.promised_epoch} is promised already"
                )
            member.gate.close()
            member.open_epoch = 0
            member.state.promise(epoch, terms.acks, terms.nodes)
        heard = ask_all(member, Purpose.PROMISE, acks=terms.acks, nodes=terms.nodes)
        for h in heard:
            if _promised(h) and h.hello is not None:
                member.state.learn_store(h.node, h.hello.store_id)
        return heard

    def _catch_up(
        self, epoch: int, voices: list[Voice], answers: list[Heard], flags: Flags
    ) -> None:
        best = greatest(voices, self._member.config.node)
        if best.node == self._member.config.node:
            return
        source = next(h for h in answers if h.node == best.node)
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
        except GroupDisagrees as error:  # asking again would only supersede everybody again
            raise PromotionRefused(str(error), final=True) from error
        except HastoreError as error:
            raise PromotionRefused(f"the copy from node {best.node} failed: {error}") from error

    def _open(self, epoch: int, terms: Terms) -> EpochEntry:
        member = self._member
        store, state = member.store, member.state
        with member.gate.lock:
            self._check_promise(epoch)
            if store.whole_offset < store.max_offset:  # every epoch starts at a record
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
            entry = new_entry(epoch, store.max_offset, terms.acks, terms.nodes)
            state.open_epoch(entry)
            self._on_open(entry)
            member.open_epoch = epoch
            member.gate.open(epoch)
        return entry

    def _check_promise(self, epoch: int) -> None:
        promised = self._member.state.data.promised_epoch
        if promised != epoch:
            raise PromotionRefused(f"epoch {promised} was promised to another node meanwhile")

    def wait_replayed(self) -> None:
        """Wait until queues, index and the idempotence window have reached the log's end."""
        store = self._member.store
        while not store.wait_dispatched(store.max_offset, 0.5):
            self._go_on(f"replaying the log: {store.dispatched_offset} of {store.max_offset}")

    def _go_on(self, progress: str) -> None:
        """Say how far it is; what may take long ends here when the node stops."""
        if self._stopping():
            raise PromotionRefused("the node stops")
        self._say(progress)


def _merged(terms: Terms, answers: list[Heard]) -> Terms:
    """Add what the others know to be in force: a fresh node alone knows nothing."""
    for h in answers:
        if isinstance(h.answer, Promised) and h.answer.acks_min is not None:
            low, high = h.answer.acks_min, h.answer.acks_max
            known = replace(
                terms,
                acks_min=low,
                acks_max=low if high is None else high,
                old_nodes=tuple(old for old in h.answer.node_lists if old != terms.nodes),
            )
            terms = _widest(terms, known)
    return terms


def _widest(terms: Terms, other: Terms) -> Terms:
    """Return the terms with whatever either side says may be in force."""
    return replace(
        terms,
        acks_min=min(terms.acks_min, other.acks_min),
        acks_max=max(terms.acks_max, other.acks_max),
        old_nodes=tuple(dict.fromkeys(terms.old_nodes + other.old_nodes)),
    )


def _promised(heard: Heard) -> bool:
    return isinstance(heard.answer, Promised)


def _history(heard: Heard) -> History:
    assert isinstance(heard.answer, Promised)
    return heard.answer.history


def _voice(heard: Heard) -> Voice:
    assert heard.hello is not None
    hello = heard.hello
    return Voice(heard.node, last_epoch(hello.history), hello.max_offset, hello.unclean)


def _promised_voice(heard: Heard) -> Voice:
    assert isinstance(heard.answer, Promised)
    answer = heard.answer
    return Voice(heard.node, last_epoch(answer.history), answer.max_offset, answer.unclean)
