"""What the transactions of both producers have in common: arguments, requests, decisions.

    begin --half message is stored--> OPEN --commit, rollback--> COMMITTED, ROLLED_BACK
                                       |
                                       +-- left open: some producer of the group is asked

The half message is a record of the topic RMQ_SYS_TRANS_HALF_TOPIC, as RocketMQ's broker stores it
(record/transactions.py), put like any other message: numbered, confirmed, repeated at another
master. An EndTransaction ends it, by the same connection.

When the block of a `with` ends, its transaction is committed. An exception rolls it back. But a
KeyboardInterrupt, SystemExit or CancelledError leaves it open: it may have come while the block's
own commit was under way, and only the database knows. So does an end that nobody has confirmed:
the block of a `with` does not send the other one after it.
"""

from __future__ import annotations

import inspect
import logging
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from hastore.client.arguments import SendOptions, integer, refusal, text
from hastore.client.messages import Message, SendResult, Status, decode_messages
from hastore.client.producer.master_calls import POLL_MS
from hastore.client.producer.preparer import Draft, Preparer
from hastore.client.producer.window import Half
from hastore.errors import (
    ClientError,
    DurabilityError,
    HastoreError,
    NotStoredError,
    OutcomeUnknown,
    UsageError,
)
from hastore.protocol.api import AskChecks, Checks, EndTransaction, PutDone, Request
from hastore.record.transactions import (
    CHECK_TIMES,
    HALF_TOPIC,
    IMMUNITY,
    IMMUNITY_MAX_S,
    NAME_MAX,
    half_pairs,
    is_key,
)

log = logging.getLogger(__name__)

AGAIN_S = 1.0  # after a poll that has failed
_GROUP = re.compile(r"[%|a-zA-Z0-9_-]{1,255}")
_OWN = frozenset({
    "PGROUP", "UNIQ_KEY", "__transactionId__", "REAL_TOPIC", "REAL_QID", CHECK_TIMES, IMMUNITY,
})  # fmt: skip


class Decision(Enum):
    """How a transaction shall end, as a check says. UNKNOWN: it is not known yet; ask again."""

    COMMIT = "commit"
    ROLLBACK = "roll back"
    UNKNOWN = "unknown"


Check = Callable[[Message], Any]  # returns a Decision; of an asyncio producer also an awaitable


class Running:
    """The transactions of one producer whose work goes on: their ids.

    Only that work knows how they shall end, and only once it has ended. One that is dropped without
    an end is not among them any more: then a check decides.
    """

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[str, object] = WeakValueDictionary()

    def __contains__(self, unique: str) -> bool:
        return unique in self._owners

    def add(self, unique: str, owner: object) -> None:
        """Note that a transaction goes on, as long as its owner exists."""
        self._owners[unique] = owner

    def end(self, unique: str) -> None:
        """Note that its work has ended."""
        self._owners.pop(unique, None)

    @contextmanager
    def sending(self, unique: str) -> Iterator[None]:
        """Note that a half message is being sent, by the block; it then has another owner."""
        owner = _Owner()
        self.add(unique, owner)
        try:
            yield
        except BaseException:
            self.end(unique)
            raise


class _Owner:
    """Can be referred to weakly, as a bare object cannot."""


@dataclass(frozen=True)
class TransactionOptions:
    """How a producer takes part in transactions, and which of its own go on; times in ms."""

    group: str
    check: Check | None
    acks: int | None
    sync_flush: bool
    attempt_ms: int
    running: Running = field(default_factory=Running)


def make_transactions(
    group: object, check: object, options: SendOptions, *, awaits: bool
) -> TransactionOptions | None:
    """Check a producer's arguments; None without a group. Raises UsageError."""
    if group is None:
        if check is not None:
            raise UsageError("check: without transaction_group nobody is asked: give both")
        return None
    name = text("transaction_group", group, NAME_MAX)
    if not _GROUP.fullmatch(name):
        raise refusal("transaction_group", group, "1 to 255 characters of A-Za-z0-9_%|-")
    if check is not None and not callable(check):
        raise refusal("check", check, "a function that takes a Message and returns a Decision")
    if not awaits and inspect.iscoroutinefunction(check):
        raise refusal("check", check, "a plain function, or use hastore.aio.Producer")
    if options.acks == 0:
        raise UsageError('acks: with 0 no node answers, which transactions need: give 1 or "all"')
    attempt_ms = int(max(1.0, min(3_000.0, options.delivery_timeout_ms)))
    return TransactionOptions(name, check, options.acks, options.sync_flush, attempt_ms)


def immunity_of(check_after_s: object) -> list[tuple[str, str]]:
    """Return the property that lets nobody be asked before so many seconds; raises UsageError."""
    if check_after_s is None:
        return []
    return [(IMMUNITY, str(integer("check_after_s", check_after_s, 1, IMMUNITY_MAX_S)))]


def check_draft(draft: Draft) -> None:
    """Raise UsageError for properties that the transaction sets itself."""
    taken = sorted(_OWN.intersection(name for name, _ in draft.pairs))
    if taken:
        raise UsageError(
            f"properties: {', '.join(taken)} are set by the transaction: leave them out when you"
            " send a received message again"
        )


class Begun(NamedTuple):
    """A half message that is about to be sent, or is stored."""

    topic: str
    unique: str  # its UNIQ_KEY, the transaction's id
    group: str
    offset: int = 0
    queue_offset: int = 0

    def stored(self, result: SendResult) -> Begun:
        """Return it with the place that the master has given it."""
        if result.offset is None or result.queue_offset is None:
            raise ClientError("the node does not say where it has stored the half message")
        return self._replace(offset=result.offset, queue_offset=result.queue_offset)


def begin(topic: str, options: TransactionOptions) -> Begun:
    """Return a new transaction, with an id as RocketMQ's clients make them: 32 hex digits."""
    # Plain, since it becomes the text of a property: that of a member of an Enum is its name.
    return Begun(str.__str__(topic), secrets.token_hex(16).upper(), options.group)


def half_in(
    queue_id: int, begun: Begun, draft: Draft, preparer: Preparer, seq: int, born_ms: int
) -> Half:
    """Return how the half message of a checked message is encoded; its own queue is 0."""

    def encode(queue: int) -> bytes:
        pairs = half_pairs(begun.topic, queue, begun.group, begun.unique, draft.pairs)
        body, flag = draft.body, draft.sys_flag
        return preparer.encoder.encode(HALF_TOPIC, body, 0, pairs, seq, born_ms, flag)

    return Half(queue_id, encode)


def end_request(
    begun: Begun, options: TransactionOptions, *, commit: bool
) -> Callable[[int], EndTransaction]:
    """Return what makes the request that ends a transaction."""

    def make(rid: int) -> EndTransaction:
        return EndTransaction(
            rid, commit, begun.offset, begun.queue_offset, begun.group, begun.unique,
            options.acks, options.sync_flush, options.attempt_ms,
        )  # fmt: skip

    return make


def poll_request(options: TransactionOptions) -> Callable[[int], AskChecks]:
    """Return what makes the request for half messages to decide."""
    return lambda rid: AskChecks(rid, options.group, POLL_MS)


class Refusals:
    """Logs that a group is not asked, and why: once, until it is asked or the reason changes.

    A node's refusal may stay, as without the right to end the group's transactions.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._told = ""

    def note(self, failure: BaseException) -> None:
        """Note a poll that has failed."""
        if str(failure) != self._told:
            self._told = str(failure)
            log.warning("transactions: group %s is not asked: %s", self._group, failure)

    def end(self) -> None:
        """Note a poll that was answered."""
        self._told = ""


def asked_in(
    reply: Checks, payload: bytes, options: TransactionOptions
) -> Iterator[tuple[Message, Begun]]:
    """Yield the half messages of an answer that a check can decide, each with its transaction.

    Those of the producer's own work that still goes on stay open: a check would not find it yet.
    """
    messages, damage = decode_messages(payload, [])
    if damage is not None or len(messages) != len(reply.halves):
        log.error("transactions: the node asks for messages that cannot be read: %s", damage)
    for message, (offset, queue_offset, _) in zip(messages, reply.halves, strict=False):
        unique = message.properties.get("UNIQ_KEY", "")
        if not is_key(unique.encode("utf-8", "surrogateescape")):  # no request could carry it
            unique = message.message_id
        if unique not in options.running:
            yield message, Begun(message.topic, unique, options.group, offset, queue_offset)


def decided(decision: object, begun: Begun) -> Decision:
    """Return what a check has returned; anything but a Decision is UNKNOWN, and logged."""
    if isinstance(decision, Decision):
        return decision
    log.error(
        "transactions: the check of transaction %s (topic %s) returned %.60r, no hastore.Decision;"
        " it stays open",
        begun.unique, begun.topic, decision,
    )  # fmt: skip
    return Decision.UNKNOWN


def note_failed_check(begun: Begun, failure: BaseException) -> None:
    """Log that a check has raised."""
    log.error(
        "transactions: the check of transaction %s (topic %s) failed; it stays open",
        begun.unique, begun.topic, exc_info=failure,
    )  # fmt: skip


def note_answer(begun: Begun, ended: Any) -> None:
    """Take the Future, of either kind, of the answer to a check; log if it did not end it."""
    failure = None if ended.cancelled() else ended.exception()
    if failure is not None:
        note_lost_answer(begun, failure)


def note_lost_answer(begun: Begun, failure: BaseException) -> None:
    """Log that the answer to a check did not end its transaction."""
    log.warning(
        "transactions: transaction %s (topic %s) was not ended after its check: %s",
        begun.unique, begun.topic, failure,
    )  # fmt: skip


class Caller(Protocol):
    """Sends requests to the master: the driver of either producer."""

    @property
    def takes_polls(self) -> bool:
        """Whether `call` still takes polls."""
        ...

    def call(self, make: Callable[[int], Request], *, is_poll: bool = False) -> Any:
        """Send a request; return the driver's kind of Future. Raises ClientError once closed."""
        ...


class TransactionState:
    """One transaction of a producer: what it is, and how it has ended as far as is known."""

    def __init__(
        self, begun: Begun, producer: object, driver: Caller, options: TransactionOptions
    ) -> None:
        self._begun = begun
        self._producer = producer  # kept alive: a producer that is dropped ends nothing more
        self._driver = driver
        self._options = options
        self._ended: Decision | None = None
        self._asked: Decision | None = None  # the end that was sent last; it may have arrived
        self._result: SendResult | None = None
        options.running.add(begun.unique, self)

    @property
    def topic(self) -> str:
        """The message's topic."""
        return self._begun.topic

    @property
    def transaction_id(self) -> str:
        """The id that the half message and the committed message carry as UNIQ_KEY."""
        return self._begun.unique

    @property
    def outcome(self) -> Decision | None:
        """How it has ended. UNKNOWN: it is left open, a check decides; None: it goes on."""
        return self._ended

    @property
    def result(self) -> SendResult | None:
        """Where the committed message is; None if it is not committed.

        Its offsets are None if an earlier attempt had committed it already.
        """
        return self._result

    def leave_open(self) -> None:
        """Send no outcome: a check decides. Use it if you cannot know whether to commit.

        Raises UsageError if the transaction has ended.
        """
        self._may_end(Decision.UNKNOWN)
        self._leave_open()

    def _leave_open(self) -> None:
        self._ended = Decision.UNKNOWN
        self._options.running.end(self.transaction_id)

    def __repr__(self) -> str:
        how = "open" if self._ended is None else self._ended.name
        return f"Transaction({self.topic!r}, {self.transaction_id}, {how})"

    def _may_end(self, how: Decision) -> bool:
        """Whether an end is to be sent; raises UsageError if it has ended otherwise."""
        ended = self._ended
        if ended in (None, Decision.UNKNOWN):
            return True
        if ended is how:
            return False
        raise UsageError(f"transaction {self.transaction_id} has ended: {ended.name}")

    def _committed(self, reply: PutDone) -> SendResult:
        self._ended = Decision.COMMIT
        if reply.offsets:
            self._result = SendResult(
                Status.PUT_OK, self.topic, reply.queue_ids[0], reply.level, reply.offsets[0],
                reply.queue_offsets[0], reply.epoch, reply.host,
            )  # fmt: skip
        else:
            self._result = SendResult(Status.PUT_OK, self.topic, 0, reply.level, epoch=reply.epoch)
        return self._result

    def _send_end(self, *, commit: bool) -> Any:
        """Send the end to the master; return the Future of the reply."""
        self._asked = Decision.COMMIT if commit else Decision.ROLLBACK
        self._options.running.end(self.transaction_id)  # what it was for is done
        return self._driver.call(end_request(self._begun, self._options, commit=commit))

    @contextmanager
    def _end_of_block(
        self, kind: type[BaseException] | None, failure: BaseException | None
    ) -> Iterator[Decision]:
        """Yield how a block's end shall end the transaction; the caller then does so.

        If that is not confirmed, the transaction is left open, with a warning. Other errors are
        raised, unless the block was ended by an exception, which goes on.
        """
        how = self._wants(kind)
        try:
            yield how
        except UNSETTLED as unsettled:
            self._not_sent(how, unsettled)
        except HastoreError as lost:
            if failure is None:
                raise
            self._not_sent(how, lost)  # the block's own exception goes on

    def _wants(self, kind: type[BaseException] | None) -> Decision:
        """Return how the end of a block ends its transaction, by the exception that ends it."""
        if self._ended is not None:
            return Decision.UNKNOWN
        if kind is None or issubclass(kind, Exception):
            how = Decision.COMMIT if kind is None else Decision.ROLLBACK
            if self._asked is None or self._asked is how:
                return how
            why = f"its {self._asked.value} was not confirmed before"
        else:
            why = f"its block was ended by {kind.__name__}"
        self._leave_open()
        log.warning("%r is left open: %s", self, why)
        return Decision.UNKNOWN

    def _not_sent(self, how: Decision, failure: HastoreError) -> None:
        """Note that an end is not known to have arrived; the transaction is left open."""
        self._ended = Decision.UNKNOWN
        log.warning(
            "%r is left open, a check decides: its %s is not confirmed: %s",
            self, how.value, failure,
        )  # fmt: skip


# An end that failed with one of these may come again by a check.
UNSETTLED = (OutcomeUnknown, NotStoredError, DurabilityError)
