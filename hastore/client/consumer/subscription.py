"""What a consumer that shares queues is told: its topics, by name or by pattern, and its queues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hastore.client.arguments import refusal, text
from hastore.errors import UsageError

MAX_TOPIC = 127  # characters
MAX_TOPICS = 1_000  # that are named, or that patterns match, in all
_NAME = re.compile(r"[A-Za-z0-9_%|-]+")
# Topics that RocketMQ and hastore keep for themselves: a pattern matches none of them.
_OWN = ("HASTORE_", "%RETRY%", "%DLQ%", "RMQ_SYS_", "SCHEDULE_TOPIC_XXXX", "TRANS_CHECK_MAX_TIME")
_EXPECTED = "a topic, a prefix with * at its end, a compiled pattern, or a sequence of these"

Topics = str | re.Pattern[str] | Sequence[str | re.Pattern[str]]


class TopicQueue(NamedTuple):
    """A queue of a topic."""

    topic: str
    queue_id: int


class RebalanceListener:
    """What a consumer with `share=True` calls when its queues change; override what is needed.

    `poll`, an iteration and `close` call these methods, in the thread that has called them. Those
    of a listener of `hastore.aio` may be coroutines. A method may use the consumer: commit, seek,
    ask for positions. If it raises, so does `poll`; what has changed stays changed.
    """

    def on_assigned(self, queues: list[TopicQueue]) -> Any:
        """These queues are the consumer's from now on; the next `poll` may return their messages.

        A `seek` here says where to begin.
        """

    def on_revoked(self, queues: list[TopicQueue]) -> Any:
        """These queues leave the consumer after this call, so a `commit` here still counts."""

    def on_fenced(self, queues: list[TopicQueue]) -> Any:
        """These queues were lost: another member may read them already. No commit counts.

        It happens if `poll` was not called for long, or no master that can confirm was reached.
        """


class Wanted:
    """The topics that a consumer wants: names, and patterns over the names of all topics."""

    def __init__(self, names: frozenset[str], prefixes: tuple[str, ...],
                 patterns: tuple[re.Pattern[str], ...]) -> None:  # fmt: skip
        self.names = names
        self._prefixes = prefixes
        self._patterns = patterns

    @property
    def has_patterns(self) -> bool:
        """Whether topics that come into being may be wanted."""
        return bool(self._prefixes or self._patterns)

    def matches(self, topic: str) -> bool:
        """Whether a topic is wanted."""
        if topic in self.names:
            return True
        if any(topic.startswith(each) for each in self._prefixes if each.startswith(_OWN)):
            return True
        if topic.startswith(_OWN):
            return False
        if any(topic.startswith(each) for each in self._prefixes):
            return True
        return any(each.fullmatch(topic) for each in self._patterns)

    def __str__(self) -> str:
        """Return the topics as they were given."""
        shown = [*sorted(self.names), *(f"{each}*" for each in self._prefixes)]
        return ", ".join([*shown, *(f"/{each.pattern}/" for each in self._patterns)])


def wanted_of(given: object) -> Wanted:
    """Check the topics that a consumer was given; raises UsageError."""
    each: Iterable[object] = [given]
    if not isinstance(given, str | re.Pattern | bytes) and isinstance(given, Iterable):
        each = list(given)
    names: set[str] = set()
    prefixes: list[str] = []
    patterns: list[re.Pattern[str]] = []
    for one in each:
        if isinstance(one, re.Pattern):
            if not isinstance(one.pattern, str):
                raise refusal("topic", one, "a pattern of str, not of bytes")
            patterns.append(one)
            continue
        if not isinstance(one, str):
            raise refusal("topic", one, _EXPECTED)
        name = text("topic", one, MAX_TOPIC + 1)
        is_prefix = name.endswith("*")
        name = name.removesuffix("*")
        if len(name) > MAX_TOPIC or (name and not _NAME.fullmatch(name)):
            raise refusal("topic", one, f"1 to {MAX_TOPIC} characters of A-Za-z0-9_%|-, or a "
                          "prefix with * at its end")  # fmt: skip
        if is_prefix:
            prefixes.append(name)
        else:
            names.add(name)
    if not names and not prefixes and not patterns:
        raise UsageError("topic: expected at least one topic or pattern")
    if len(names) > MAX_TOPICS:
        raise UsageError(f"topic: {len(names)} topics; at most {MAX_TOPICS}")
    return Wanted(frozenset(names), tuple(prefixes), tuple(patterns))
