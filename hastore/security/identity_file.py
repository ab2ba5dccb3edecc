"""The text of an identities file: read it into identities, with the line of each error. Pure.

    challenge_secret: BASE64           # for challenges to names that do not exist
    identities:
      NAME:
        produce: ["orders-*"]          # patterns of topics
        consume: ["*"]
        groups: ["orders-*"]           # patterns of consumer groups; default: see `Identity`
        admin: true                    # default: false
        certificate: true              # default: false; a client certificate of this name proves it
        keys:
          - verifier: "SCRAM-SHA-256$4096:SALT$STORED_KEY:SERVER_KEY"
            made: "2026-11-22T18:30:00Z"
            until: "2026-11-23T18:30:00Z"        # optional: counts no longer from then on
        quota:                         # default: none
          requests_per_s: 1000
          bytes_per_s: 10MiB
          topics: 50
          positions: 1000
        secrets:                       # for RocketMQ's clients, whose AccessKey is NAME
          - secret: "..."              # as it is: they sign with it
            made: ...
            until: ...

An error never quotes a verifier or the secret.
"""

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated

import yaml

from hastore.config.checks import Places, read_value
from hastore.config.model import Range, Unit
from hastore.errors import ConfigError, UsageError
from hastore.security.identity import (
    MAX_KEYS,
    MAX_PATTERNS,
    Identity,
    Key,
    Quota,
    Secret,
    group_problem,
    hidden,
    name_problem,
    pattern_problem,
    secret_problem,
    short,
)
from hastore.security.scram import (
    KEY_BYTES,
    MAX_ITERATIONS,
    MECHANISM,
    MIN_ITERATIONS,
    SALT_BYTES,
    Credentials,
    Verifier,
)

MAX_FILE_BYTES = 1024 * 1024
SECRET_BYTES = 32
MAX_DEPTH = 16  # a file needs 6
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads a large file much faster
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_VERIFIER = re.compile(rf"{MECHANISM}\$([1-9][0-9]{{0,8}}):([^$:]+)\$([^$:]+):([^$:]+)", re.ASCII)
_TRUTH = {"true": True, "false": False}
_MADE_BY = "it is made by `hastore keys new`"
_IDENTITY_KEYS = (
    *("produce", "consume", "groups", "admin", "certificate", "keys", "secrets", "quota"),
)
_MOST = 10**12
_QUOTAS = {
    "requests_per_s": Annotated[int, Range(Unit.ITEMS, 1, _MOST)],
    "bytes_per_s": Annotated[int, Range(Unit.BYTES, 1, _MOST)],
    "topics": Annotated[int, Range(Unit.ITEMS, 0, _MOST)],
    "positions": Annotated[int, Range(Unit.ITEMS, 0, _MOST)],
}


@dataclass(frozen=True, slots=True)
class IdentityFile:
    """The content of an identities file."""

    challenge_secret: bytes = field(repr=False)
    identities: Mapping[str, Identity]


def parse_identities(data: bytes, path: str) -> IdentityFile:
    """Return the content of the file `path`; raises ConfigError with line, key and remedy."""
    return _Parser(path).file(_compose(data, path))


def parse_quota(name: str, text: str) -> int:
    """Return a number of `quota` from its text, as in 10MiB; raises UsageError."""
    kind = _QUOTAS.get(name)
    if kind is None:
        raise UsageError(f"{short(name)} is not a quota; use one of {', '.join(_QUOTAS)}")
    try:
        node = yaml.ScalarNode("tag:yaml.org,2002:str", text)
        return int(read_value(Places("a quota"), name, node, kind))
    except ConfigError as wrong:
        raise UsageError(str(wrong)) from None


def format_verifier(credentials: Credentials, verifier: Verifier) -> str:
    """Return a verifier as the file has it."""
    salt, stored, server = (
        base64.b64encode(part).decode()
        for part in (credentials.salt, verifier.stored_key, verifier.server_key)
    )
    return f"{MECHANISM}${credentials.iterations}:{salt}${stored}:{server}"


def format_time(wall_ms: int) -> str:
    """Return a wall time as the file has it, in UTC, whole seconds."""
    return datetime.fromtimestamp(wall_ms // 1000, UTC).strftime(_TIME)


def parse_time(text: str) -> int | None:
    """Return the milliseconds since 1970 of a time such as 2026-11-22T18:30:00Z; None if bad."""
    try:
        if len(text) != len("2026-11-22T18:30:00Z"):
            return None
        at = datetime.strptime(text, _TIME).replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(at.timestamp()) * 1000 if at.year >= 1970 else None


def _compose(data: bytes, path: str) -> yaml.Node:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as broken:
        line = data[: broken.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8; save it as UTF-8") from broken
    try:
        _check_depth(text, path)
        root = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as broken:
        mark = broken.problem_mark or broken.context_mark
        line = mark.line + 1 if mark is not None else 1
        # What is quoted may be a secret that somebody put in the wrong place.
        problem = re.sub(r"'[^']*'|\"[^\"]*\"", "...", broken.problem or "")
        raise ConfigError(f"{path}:{line}: is not valid YAML: {problem}; correct it") from None
    except (yaml.YAMLError, RecursionError, ValueError):
        raise ConfigError(f"{path}: is not valid YAML; correct it") from None
    if root is None:
        raise ConfigError(f"{path}: is empty; `hastore keys new` makes an identities file")
    return root


def _check_depth(text: str, path: str) -> None:
    """Raise ConfigError for deep nesting: libyaml's composer recurses, and the node would crash."""
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                line = event.start_mark.line + 1 if event.start_mark is not None else 1
                raise ConfigError(f"{path}:{line}: is nested too deeply; see docs/security.md")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


class _Parser:
    """Turn YAML nodes into identities, and remember the line of each key."""

    def __init__(self, path: str) -> None:
        self.places = Places(path)
        self._seen: set[int] = set()  # mappings and lists, by id

    def file(self, root: yaml.Node) -> IdentityFile:
        top = self._entries(root, "", ("challenge_secret", "identities"))
        for key in ("challenge_secret", "identities"):
            if key not in top:
                raise self.places.error(key, "is missing", _MADE_BY)
        secret = self._bytes(
            "challenge_secret",
            self._text(top["challenge_secret"], "challenge_secret"),
            SECRET_BYTES,
        )
        identities: dict[str, Identity] = {}
        folded: dict[str, str] = {}
        for name, node in self._entries(top["identities"], "identities", None).items():
            key = f"identities.{hidden(name[:64])}"
            problem = name_problem(name)
            if problem is not None:
                raise self.places.error("identities", problem, "rename it")
            same = folded.setdefault(name.lower(), name)
            if same != name:
                raise self.places.error(
                    key, f"differs from {same} only by capitals", "give it another name"
                )
            identities[name] = self._identity(name, key, node)
        return IdentityFile(secret, identities)

    def _identity(self, name: str, key: str, node: yaml.Node) -> Identity:
        given = self._entries(node, key, _IDENTITY_KEYS)
        keys, credentials = self._keys(f"{key}.keys", given.get("keys"))
        secrets = self._secrets(f"{key}.secrets", given.get("secrets"))
        certificate = self._truth(f"{key}.certificate", given.get("certificate"))
        if not keys and not certificate and not secrets:
            raise self.places.error(
                key,
                "has neither a key nor certificate: true nor a secret, so nobody can prove it",
                f"set certificate: true, or remove it and run `hastore keys new {name}`",
            )
        return Identity(
            name,
            produce=self._patterns(f"{key}.produce", given.get("produce")),
            consume=self._patterns(f"{key}.consume", given.get("consume")),
            is_admin=self._truth(f"{key}.admin", given.get("admin")),
            by_certificate=certificate,
            salt=credentials.salt if credentials else b"",
            iterations=credentials.iterations if credentials else 0,
            keys=keys,
            groups=self._groups(f"{key}.groups", given.get("groups")),
            secrets=secrets,
            quota=self._quota(f"{key}.quota", given.get("quota")),
        )

    def _quota(self, key: str, node: yaml.Node | None) -> Quota | None:
        if node is None:
            return None
        given = self._entries(node, key, tuple(_QUOTAS))
        return Quota(**{
            name: read_value(self.places, f"{key}.{name}", one, _QUOTAS[name])
            for name, one in given.items()
        })  # fmt: skip

    def _groups(self, key: str, node: yaml.Node | None) -> tuple[str, ...] | None:
        return None if node is None else self._patterns(key, node, group_problem)

    def _secrets(self, key: str, node: yaml.Node | None) -> tuple[Secret, ...]:
        found: list[Secret] = []
        for place, one in enumerate(self._items(key, node, MAX_KEYS, "secrets"), 1):
            at = f"{key}.{place}"
            given = self._entries(one, at, ("secret", "made", "until"))
            if "secret" not in given:
                raise self.places.error(at, "has no secret", _MADE_BY)
            where = f"{at}.secret"
            text = self._text(given["secret"], where)
            problem = secret_problem(text)
            if problem is not None:
                raise self.places.error(where, *problem.split("; ", 1))
            if any(other.text == text for other in found):
                raise self.places.error(where, "is given twice", "keep one of them")
            found.append(Secret(text, *self._times(at, given)))
        return tuple(found)

    def _keys(self, key: str, node: yaml.Node | None) -> tuple[tuple[Key, ...], Credentials | None]:
        found: list[Key] = []
        common: Credentials | None = None
        for place, one in enumerate(self._items(key, node, MAX_KEYS, "keys"), 1):
            at = f"{key}.{place}"
            given = self._entries(one, at, ("verifier", "made", "until"))
            if "verifier" not in given:
                raise self.places.error(at, "has no verifier", _MADE_BY)
            where = f"{at}.verifier"
            credentials = self._verifier(where, self._text(given["verifier"], where))
            if common is not None and (common.salt, common.iterations) != (
                credentials.salt,
                credentials.iterations,
            ):
                raise self.places.error(
                    where,
                    "has another salt or other iterations than the first key",
                    "all keys of one identity share them; make the key anew",
                )
            common = common or credentials
            verifier = credentials.verifiers[0]
            if any(other.verifier == verifier for other in found):
                raise self.places.error(where, "is given twice", "keep one of them")
            found.append(Key(verifier, *self._times(at, given)))
        return tuple(found), common

    def _verifier(self, key: str, text: str) -> Credentials:
        match = _VERIFIER.fullmatch(text)
        if match is None:
            problem = f"is not {MECHANISM}$ITERATIONS:SALT$STORED_KEY:SERVER_KEY"
            raise self.places.error(key, problem, _MADE_BY)
        iterations = int(match[1])
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise self.places.error(
                key,
                f"{iterations} iterations are out of range",
                f"use {MIN_ITERATIONS} to {MAX_ITERATIONS}",
            )
        salt = self._bytes(key, match[2], SALT_BYTES)
        stored, server = (self._bytes(key, match[at], KEY_BYTES) for at in (3, 4))
        return Credentials(salt, iterations, (Verifier(stored, server),))

    def _bytes(self, key: str, text: str, size: int) -> bytes:
        try:
            data = base64.b64decode(text.encode("ascii"), validate=True)
        except (UnicodeEncodeError, binascii.Error):
            raise self.places.error(key, "is not base64", _MADE_BY) from None
        if len(data) != size:
            problem = f"has {len(data)} bytes where {size} belong"
            raise self.places.error(key, problem, _MADE_BY)
        return data

    def _patterns(
        self,
        key: str,
        node: yaml.Node | None,
        problem_of: Callable[[str], str | None] = pattern_problem,
    ) -> tuple[str, ...]:
        patterns = []
        for one in self._items(key, node, MAX_PATTERNS, "patterns"):
            pattern = self._text(one, key)
            problem = problem_of(pattern)
            if problem is not None:
                self.places.note(key, one.start_mark)
                raise self.places.error(key, *problem.split("; ", 1))
            patterns.append(pattern)
        return tuple(patterns)

    def _items(self, key: str, node: yaml.Node | None, most: int, what: str) -> list[yaml.Node]:
        if node is None:
            return []
        if not isinstance(node, yaml.SequenceNode):
            raise self.places.error(key, "must be a list", f"write a list of {what}, or []")
        self._once(key, node)
        if len(node.value) > most:
            problem = f"has {len(node.value)} {what}"
            raise self.places.error(key, problem, f"at most {most} are allowed")
        return list(node.value)

    def _truth(self, key: str, node: yaml.Node | None) -> bool:
        if node is None:
            return False
        text = self._text(node, key)
        if text not in _TRUTH:
            raise self.places.error(
                key, f"{short(text)} is neither true nor false", "write true or false"
            )
        return _TRUTH[text]

    def _times(
        self, key: str, given: Mapping[str, yaml.Node]
    ) -> tuple[int | None, int | None]:
        """Return since when a key or a secret counts, and until when."""
        made = self._time(f"{key}.made", given.get("made"))
        return made, self._time(f"{key}.until", given.get("until"))

    def _time(self, key: str, node: yaml.Node | None) -> int | None:
        if node is None:
            return None
        text = self._text(node, key)
        wall_ms = parse_time(text)
        if wall_ms is None:
            raise self.places.error(
                key, f"{short(text)} is not a time", "write one in UTC like 2026-11-22T18:30:00Z"
            )
        return wall_ms

    def _text(self, node: yaml.Node, key: str) -> str:
        """Return a scalar's text; a tag, a mapping, a list or null is refused."""
        plain = ("str", "int", "float", "bool", "timestamp")
        if not isinstance(node, yaml.ScalarNode) or (
            node.tag.removeprefix("tag:yaml.org,2002:") not in plain
        ):
            raise self.places.error(key, "must be a single plain value", "see docs/security.md")
        return str(node.value)

    def _once(self, key: str, node: yaml.CollectionNode) -> None:
        """Refuse a YAML alias: a change at one place would change the other too."""
        if id(node) in self._seen:
            raise self.places.error(key, "is an alias of another place", "write it out")
        self._seen.add(id(node))

    def _entries(
        self, node: yaml.Node, name: str, known: tuple[str, ...] | None
    ) -> dict[str, yaml.Node]:
        """Return a mapping's values by key; raises ConfigError for unknown or repeated keys."""
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
            return {}
        if not isinstance(node, yaml.MappingNode):
            where = name or "the file"
            raise self.places.error(where, "is not a mapping of keys", "see docs/security.md")
        self._once(name, node)
        entries: dict[str, yaml.Node] = {}
        for key_node, below in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            shown = hidden(key) if len(key) <= 64 and key.isprintable() else short(key)
            dotted = f"{name}.{shown}" if name else shown
            if key in entries:
                first = self.places.line(dotted)
                self.places.note(dotted, key_node.start_mark)
                raise self.places.error(
                    dotted, f"is given twice (also line {first})", "keep one of them"
                )
            self.places.note(dotted, key_node.start_mark)
            if known is None:
                self.places.note(name, key_node.start_mark)  # for a name that is not valid
                if key_node.tag != "tag:yaml.org,2002:str":
                    problem = f"{short(key)} is no text in YAML"
                    raise self.places.error(name, problem, "write the name in quotes")
            elif key not in known:
                raise self.places.error(
                    dotted, "is unknown", f"the keys here are {', '.join(known)}"
                )
            entries[key] = below
        return entries
