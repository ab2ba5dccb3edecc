"""Identities: a name, its rights by topic, and how it is proved. Pure.

A pattern names topics: `*` stands for any characters, also none, `?` for one character, and every
other character for itself. The topics of hastore itself begin with HASTORE_; only a pattern that
begins with HASTORE_ too stands for them, so that `*` does not give the right to forge positions.
"""

import functools
import re
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from hastore.security.scram import NAME, Credentials, Verifier

MAX_PATTERN = 127
MAX_PATTERNS = 256  # for one right
MAX_KEYS = 8  # of one identity; the same for its secrets
OWN_TOPICS = "HASTORE_"
NAME_RULE = "1 to 64 of A-Z a-z 0-9 _ . @ -, with a letter or digit first"

_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SECRET = re.compile(r"[0-9A-Fa-f]{32,}|[A-Za-z0-9+/]{40,}={0,2}", re.ASCII)
_PATTERN = re.compile(rf"[A-Za-z0-9_%|*?-]{{1,{MAX_PATTERN}}}", re.ASCII)
_GROUP_PATTERN = re.compile(r"[!-~]{1,255}", re.ASCII)
_SHARED = re.compile(r"[!-~]{16,128}", re.ASCII)


class _Timed:
    """What counts until a wall time, if there is any."""

    __slots__ = ()
    until_ms: int | None

    def counts(self, wall_ms: int) -> bool:
        """Return whether it counts at that time."""
        return self.until_ms is None or wall_ms < self.until_ms


@dataclass(frozen=True, slots=True)
class Key(_Timed):
    """What is kept of a key; `until_ms` is the wall time at which it stops to count, if any."""

    verifier: Verifier = field(repr=False)
    made_ms: int | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Secret(_Timed):
    """What a client of RocketMQ signs its requests with. The node has it too, as it is."""

    text: str = field(repr=False)
    made_ms: int | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Quota:
    """How much an identity may ask of a node, and keep in a group; None: as much as it likes."""

    requests_per_s: int | None = None
    bytes_per_s: int | None = None
    topics: int | None = None
    positions: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a client is, and what it may do. `admin` implies neither produce nor consume.

    `groups` names consumer groups; None: none was said. Then a client of hastore's own protocol
    may move the positions of every group, as before there was this right, and one of RocketMQ's
    may be in none.
    """

    name: str
    produce: tuple[str, ...] = ()
    consume: tuple[str, ...] = ()
    is_admin: bool = False
    by_certificate: bool = False  # the common name of a verified client certificate proves it
    salt: bytes = field(default=b"", repr=False)
    iterations: int = 0
    keys: tuple[Key, ...] = ()
    groups: tuple[str, ...] | None = None
    secrets: tuple[Secret, ...] = ()
    quota: Quota | None = None

    def may_produce(self, topic: str) -> bool:
        """Return whether the identity may put messages into a topic."""
        return matches(self.produce, topic)

    def may_consume(self, topic: str) -> bool:
        """Return whether the identity may read a topic, and its groups' positions."""
        return matches(self.consume, topic)

    def may_move(self, group: str) -> bool:
        """Return whether the identity may read and commit a group's positions."""
        return self.groups is None or self.may_join(group)

    def may_join(self, group: str) -> bool:
        """Return whether the identity may be a member of a consumer group, by its own `groups`."""
        return self.groups is not None and matches(self.groups, group)

    def may_count(self, topic: str, group: str | None = None) -> bool:
        """Return whether the identity may know a topic's traffic, or how far a group is behind.

        An identity without any right is good for monitoring only, and may know all of them.
        """
        if self.is_admin or not (self.produce or self.consume or self.groups):
            return True
        if group is None:
            return self.may_consume(topic) or self.may_produce(topic)
        return self.may_consume(topic) and self.may_move(group)

    @property
    def rights(self) -> dict[str, Any]:
        """Return the rights as they are shown and sent: `produce`, `consume`, `groups`, `admin`."""
        return {
            "produce": list(self.produce),
            "consume": list(self.consume),
            "groups": None if self.groups is None else list(self.groups),
            "admin": self.is_admin,
        }

    @property
    def timed(self) -> tuple[Key | Secret, ...]:
        """Return the keys and secrets: each may run out."""
        return (*self.keys, *self.secrets)

    def credentials(self, wall_ms: int) -> Credentials | None:
        """Return what a challenge needs, with the keys that count; None if no key counts."""
        verifiers = tuple(key.verifier for key in self.keys if key.counts(wall_ms))
        return Credentials(self.salt, self.iterations, verifiers) if verifiers else None


def differences(old: Identity, new: Identity) -> str:
    """Return in words what has changed of an identity's rights and keys; names no key."""
    found = []
    if old.is_admin != new.is_admin:
        found.append("admin given" if new.is_admin else "admin taken")
    if old.by_certificate != new.by_certificate:
        found.append("certificate given" if new.by_certificate else "certificate taken")
    for right in ("produce", "consume", "groups"):
        before, after = getattr(old, right) or (), getattr(new, right) or ()
        signed = [f"-{one}" for one in before if one not in after]
        signed += [f"+{one}" for one in after if one not in before]
        if signed:
            found.append(f"{right} {' '.join(signed)}")
        elif getattr(old, right) != getattr(new, right):
            found.append(f"{right} {'not named' if getattr(new, right) is None else 'named'}")
    if old.quota != new.quota:
        found.append("quota")
    keys = [{one.verifier for one in each.keys} for each in (old, new)]
    secrets = [{one.text for one in each.secrets} for each in (old, new)]
    found += [*_counted("key", *keys), *_counted("secret", *secrets)]
    return ", ".join(found) or "until when a key counts"


def _counted(what: str, before: Set[object], after: Set[object]) -> list[str]:
    numbers = {"-": len(before - after), "+": len(after - before)}
    return [f"{sign}{n} {what}{'s' * (n > 1)}" for sign, n in numbers.items() if n]


def name_problem(name: str) -> str | None:
    """Return why a text cannot be the name of an identity, or None if it can."""
    if NAME.fullmatch(name):
        return None
    if _KEY.fullmatch(name.lower()):
        return "a key stands where a name belongs; replace this key, it was shown"
    return f"{short(name)} is not a valid name; use {NAME_RULE}"


def key_problem(key: str) -> str | None:
    """Return why a text cannot be a key, without quoting it; None if it can."""
    if _KEY.fullmatch(key):
        return None
    return "holds no key; a key is one line of 64 hex digits, made by `hastore keys new`"


def secret_problem(secret: str) -> str | None:
    """Return why a text cannot be a secret, without quoting it; None if it can."""
    if _SHARED.fullmatch(secret):
        return None
    return "is no secret; use 16 to 128 printable ASCII characters without blanks"


def group_problem(pattern: str) -> str | None:
    """Return why a text is not a pattern of groups, or None if it is."""
    if _GROUP_PATTERN.fullmatch(pattern):
        return None
    remedy = "use 1 to 255 printable ASCII characters, * for any, ? for one"
    return f"{short(pattern)} is not a pattern of groups; {remedy}"


def pattern_problem(pattern: str) -> str | None:
    """Return why a text is not a pattern of topics, or None if it is."""
    if _PATTERN.fullmatch(pattern):
        return None
    if len(pattern) > MAX_PATTERN:
        return f"{short(pattern)} is longer than {MAX_PATTERN} characters; no topic is"
    remedy = "use A-Z a-z 0-9 _ % | - as topics have them, * for any characters, ? for one"
    return f"{short(pattern)} is not a pattern of topics; {remedy}"


def hidden(text: str) -> str:
    """Return the text without what may be a key, a verifier or a secret."""
    return _SECRET.sub("(hidden)", text)


def short(text: str) -> str:
    """Return a text from outside as it may stand in an error.

    It is printable, has at most 80 characters, and shows no secret that is in a wrong place.
    """
    text = hidden(text[:4096])
    shown = ascii(text[:60])
    return (shown[:76] + "...'") if len(shown) > 80 or len(text) > 60 else shown


def matches(patterns: tuple[str, ...], topic: str) -> bool:
    """Return whether one of the patterns stands for a topic."""
    if not patterns:
        return False
    # The cache keeps no long names: a client may ask for topics of 32,767 characters.
    return (
        _matches_cached(patterns, topic) if len(topic) <= MAX_PATTERN else _matches(patterns, topic)
    )


@functools.lru_cache(maxsize=4096)
def _matches_cached(patterns: tuple[str, ...], topic: str) -> bool:
    return _matches(patterns, topic)


def _matches(patterns: tuple[str, ...], topic: str) -> bool:
    own = topic.startswith(OWN_TOPICS)
    return any(
        _compiled(one).fullmatch(topic) is not None
        for one in patterns
        if not own or one.startswith(OWN_TOPICS)
    )


@functools.lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the expression of a pattern; its time is bounded by both lengths multiplied."""
    pieces = [
        "".join("." if char == "?" else re.escape(char) for char in piece)
        for piece in re.sub(r"\*+", "*", pattern).split("*")
    ]
    if len(pieces) == 1:
        return re.compile(pieces[0], re.DOTALL)
    # Each piece in the middle takes its first place and never goes back: the last piece decides.
    middle = "".join(f"(?>.*?{piece})" for piece in pieces[1:-1])
    return re.compile(f"{pieces[0]}{middle}.*{pieces[-1]}", re.DOTALL)
