"""Dead letters: the messages that a group has given up. They are listed, and sent again.

    for letter in read_dead_letters("billing", nodes):
        print(letter.topic, letter.message.key, letter.attempts)
    resend_dead_letters(read_dead_letters("billing", nodes), nodes)

They are in the topic %DLQ%<group>, where they stay. What is sent again is a new message: a copy. It
names its dead letter in the property RESENT_FROM, and has the UNIQ_KEY of the message, or one that
follows from the dead letter. So the key index says whether there is a copy already.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, get_args

from hastore.client.arguments import flag, one_of, refusal, seconds, text
from hastore.client.connections.bootstrap import parse_bootstrap
from hastore.client.consumer.admin import Admin
from hastore.client.consumer.consumer import Consumer
from hastore.client.lifecycle import Closable
from hastore.client.messages import Message, SendResult
from hastore.client.producer.preparer import plain_properties
from hastore.client.producer.producer import Producer
from hastore.client.security import SecurityLike
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import (
    ClientError,
    HastoreError,
    MessageIllegalError,
    NotStoredError,
    UnreachableError,
    UsageError,
)
from hastore.record.delays import DLQ_PREFIX, RETRY_PREFIX
from hastore.record.properties import MAX_GROUP_TOPIC, NODE_PROPERTIES, check_topic

To = Literal["topic", "group"]
RESENT_FROM = "RESENT_FROM"
PART = 256  # messages that are sent together
_UNIQUE = "UNIQ_KEY"
_RETRY_TOPIC = "RETRY_TOPIC"
FOUND_MAX = 64  # messages of a search
_POLL_S = 1.0
_PAUSE_S = 0.02
_EARLIER_MS = 3_600_000  # the search for a copy begins so long before: a master's clock may be late
_ALL = 2**63 - 1
# What the message has got on its way to the dead letters: of nodes, and of RocketMQ's clients.
_OF_ITS_WAY = NODE_PROPERTIES | {
    *("DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "MAX_RECONSUME_TIMES", "RECONSUME_TIME"),
    *("CONSUME_START_TIME", "1ST_POP_TIME", "POP_CK", "PGROUP", "__transactionId__"),
    *("CHECK_IMMUNITY_TIME_IN_SECONDS", "TRANSACTION_CHECK_TIMES", "TRAN_PREPARED_QUEUE_OFFSET"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group has given up."""

    group: str
    message: Message  # as it is in %DLQ%<group>

    @property
    def topic(self) -> str | None:
        """The topic that it came from; None if the message does not say it."""
        properties = self.message.properties
        return properties.get(_RETRY_TOPIC) or properties.get("DLQ_ORIGIN_TOPIC")

    @property
    def attempts(self) -> int:
        """How often the group's members have got it."""
        return self.message.reconsume_times

    @property
    def origin_id(self) -> str | None:
        """The id of the message that the group had got first; None if it is not known."""
        return self.message.properties.get("ORIGIN_MESSAGE_ID")

    @property
    def name(self) -> str:
        """What its copies have in RESENT_FROM."""
        one = self.message
        return f"{one.topic} {one.queue_id} {one.queue_offset} {one.store_timestamp_ms}"

    @property
    def unique(self) -> str:
        """The UNIQ_KEY of its copies."""
        known = self.message.properties.get(_UNIQUE)
        return known or blake2b(self.name.encode(), digest_size=16).hexdigest().upper()


class Resent(NamedTuple):
    """What became of a dead letter that was to be sent again: one of the last three is set.

    None of them is, with `dry_run`, if it would be sent.
    """

    letter: DeadLetter
    result: SendResult | None = None  # of the copy that was sent now
    copy: Message | None = None  # that was sent earlier; nothing is sent now
    error: HastoreError | None = None  # why it was not sent, or is not known to be


def read_dead_letters(
    group: str,
    bootstrap: str | Sequence[str] | None = None,
    *,
    timeout_s: float = 10.0,
    security: SecurityLike = None,
) -> Iterator[DeadLetter]:
    """Yield the dead letters of a group that there are now, of each queue the oldest first.

    What retention has removed is not there any more. Raises UsageError at once, and while it reads
    what Consumer.poll does; UnreachableError if nothing comes for `timeout_s`.
    """
    topic = dead_letter_topic(group)
    addresses = parse_bootstrap(bootstrap)
    timeout_s = seconds("timeout_s", timeout_s, positive=True)
    return _read(group, topic, addresses, timeout_s, security)


def _read(
    group: str, topic: str, addresses: Sequence[str], timeout_s: float, security: SecurityLike
) -> Iterator[DeadLetter]:
    with Consumer(
        topic, addresses, read_from="master", on_lost="earliest", timeout_s=timeout_s,
        security=security,
    ) as consumer:  # fmt: skip
        ends = consumer.end_offsets()
        places, moved_ms = consumer.positions(), SYSTEM_CLOCK.monotonic_ms()
        while any(place.queue_offset < ends.get(queue, 0) for queue, place in places.items()):
            found = consumer.poll(timeout_s=min(_POLL_S, timeout_s))
            for message in found:
                if message.queue_offset < ends.get(message.queue_id, 0):
                    yield DeadLetter(group, message)
            before, places = places, consumer.positions()
            if found or places != before:
                moved_ms = SYSTEM_CLOCK.monotonic_ms()
            elif SYSTEM_CLOCK.monotonic_ms() - moved_ms > timeout_s * 1000.0:
                raise UnreachableError(
                    f"no message came for {timeout_s:g} s before the end of topic {topic}; try "
                    "again"
                )


def resend_dead_letters(
    letters: Iterable[DeadLetter],
    bootstrap: str | Sequence[str] | None = None,
    *,
    to: To = "topic",
    dry_run: bool = False,
    timeout_s: float = 30.0,
    security: SecurityLike = None,
) -> list[Resent]:
    """Send dead letters again, in their order; return what became of each.

    `to`: "topic", from which each came, for all groups that read it; "group", for this group alone,
    in its topic of retries, which only members that share its queues read. One of which there is a
    copy in either topic is not sent. But a copy whose outcome is not known yet, of an earlier run
    that was killed or of one that runs at the same time, may not be found, and one that retention
    has removed is not: then the message comes twice. Raises UsageError.
    """
    with Resender(
        bootstrap, to=to, dry_run=dry_run, timeout_s=timeout_s, security=security
    ) as resender:
        return list(resender.send(letters))


class Resender(Closable):
    """Sends dead letters again; a context manager. For the arguments see `resend_dead_letters`."""

    def __init__(
        self,
        bootstrap: str | Sequence[str] | None = None,
        *,
        to: To = "topic",
        dry_run: bool = False,
        timeout_s: float = 30.0,
        security: SecurityLike = None,
    ) -> None:
        """Start to connect; raises UsageError."""
        self._to = one_of("to", to, get_args(To))
        timeout_s = seconds("timeout_s", timeout_s, positive=True)
        self._timeout_s = timeout_s
        addresses = parse_bootstrap(bootstrap)
        self._gone: UnreachableError | None = None  # each further message would wait as long
        self._known: set[str] = set()  # names, of this run
        with contextlib.ExitStack() as clients:
            self._admin = clients.enter_context(
                Admin(addresses, timeout_s=timeout_s, security=security)
            )
            self._producer: Producer | None = None
            if not flag("dry_run", dry_run):
                self._producer = clients.enter_context(
                    Producer(addresses, delivery_timeout_s=timeout_s, security=security)
                )
            self._clients = clients.pop_all()

    def close(self) -> None:
        """Close the connections."""
        self._clients.close()

    def send(self, letters: Iterable[DeadLetter]) -> Iterator[Resent]:
        """Send some, PART at a time, and yield what became of each.

        A dead letter that an earlier call has had is left out.
        """
        remaining = iter(letters)
        while part := list(itertools.islice(remaining, PART)):
            yield from self._send_part(part)

    def _send_part(self, letters: Sequence[DeadLetter]) -> list[Resent]:
        looked = []
        for letter in letters:  # all before the first is sent: a search waits for what was put
            if not isinstance(letter, DeadLetter):
                raise refusal("letters", letter, "DeadLetters, as `read_dead_letters` returns them")
            if letter.name not in self._known:
                self._known.add(letter.name)
                looked.append(self._look(letter))
        begun = [self._begin(one) for one in looked]
        return [_ended(*one) for one in begun]

    def _look(self, letter: DeadLetter) -> Resent:
        """Look whether there is a copy of it."""
        try:
            return Resent(letter, copy=self._copy_of(letter))
        except HastoreError as failure:
            return self._failed(letter, failure)

    def _begin(self, one: Resent) -> tuple[Resent, Future[SendResult] | None]:
        """Begin to send it, if that is still to be done."""
        if self._producer is None or one.copy is not None or one.error is not None:
            return one, None
        try:
            self._refuse_gone()
            return one, self._producer.send(**self._outgoing(one.letter))
        except HastoreError as failure:
            return self._failed(one.letter, failure), None

    def _refuse_gone(self) -> None:
        if self._gone is not None:
            raise self._gone

    def _failed(self, letter: DeadLetter, failure: HastoreError) -> Resent:
        if isinstance(failure, UnreachableError):
            self._gone = failure
        return Resent(letter, error=failure)

    def _copy_of(self, letter: DeadLetter) -> Message | None:
        """Return a copy that was sent before; raises HastoreError."""
        self._refuse_gone()
        if letter.topic is None:
            raise MessageIllegalError(
                f"message {letter.message.queue_offset} in queue {letter.message.queue_id} of "
                f"{letter.message.topic} does not say from which topic it came; send its body by "
                "`hastore produce`"
            )
        topics = dict.fromkeys((letter.topic, RETRY_PREFIX + letter.group))
        deadline_ms = SYSTEM_CLOCK.monotonic_ms() + self._timeout_s * 1000.0
        while True:
            found = (one for topic in topics for one in self._with_key(letter, topic))
            copies = (one for one in found if one.properties.get(RESENT_FROM) == letter.name)
            try:
                return next(copies, None)
            except NotStoredError:  # BUSY: the replay of what was put before has not ended
                if SYSTEM_CLOCK.monotonic_ms() >= deadline_ms:
                    raise
            threading.Event().wait(_PAUSE_S)

    def _with_key(self, letter: DeadLetter, topic: str) -> Iterator[Message]:
        """Yield a topic's messages that have the UNIQ_KEY of the copies, the newest first."""
        since_ms, before = max(0, letter.message.store_timestamp_ms - _EARLIER_MS), _ALL
        while True:
            found = self._admin.query_key(
                topic, letter.unique, max_messages=FOUND_MAX, begin_ms=since_ms, before=before
            )
            yield from found
            if found.damaged or (found.cut_ms is not None and found.cut_offset is None):
                raise ClientError(
                    f"whether it was sent again already is not known: not all of topic {topic} "
                    "could be searched for a copy; see `hastore log verify`, or try again"
                )
            if found.cut_offset is None and len(found) < FOUND_MAX:
                return
            before = found[-1].offset if found.cut_offset is None else found.cut_offset

    def _outgoing(self, letter: DeadLetter) -> dict[str, Any]:
        """Return the arguments of the copy's `send`."""
        message = letter.message
        plain = plain_properties(message.properties)
        properties = {name: value for name, value in plain.items() if name not in _OF_ITS_WAY}
        properties |= {_UNIQUE: letter.unique, RESENT_FROM: letter.name}
        topic, queue = letter.topic, None
        assert topic is not None
        if self._to == "group":
            properties[_RETRY_TOPIC] = topic
            topic, queue = RETRY_PREFIX + letter.group, 0  # a topic of retries has one
        return {
            "topic": topic, "body": message.body, "key": message.key, "tags": message.tags,
            "properties": properties, "queue": queue,
        }  # fmt: skip


def _ended(one: Resent, future: Future[SendResult] | None) -> Resent:
    """Wait for a send; return what became of it."""
    if future is None:
        return one
    try:
        return one._replace(result=future.result())
    except HastoreError as failure:
        return one._replace(error=failure)


def dead_letter_topic(group: object) -> str:
    """Return the topic of a group's dead letters; raises UsageError."""
    name = DLQ_PREFIX + text("group", group)
    try:
        check_topic(name)
    except MessageIllegalError as failure:
        raise UsageError(
            f"the group {str(group)[:40]!r} has no dead letters: for these its name has 1 to "
            f"{MAX_GROUP_TOPIC - len(RETRY_PREFIX)} characters of A-Za-z0-9_%|-"
        ) from failure
    return name
