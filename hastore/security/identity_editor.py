"""Change an identities file; its comments stay. Whoever saves holds `folder_locked`.

ruamel.yaml edits the file. PyYAML's marks, by which config/file.py edits a role, would not do: keys
and identities are added and removed in nested lists, block or flow style, with comments among them.
"""

import base64
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from typing import Any

import yaml

from hastore.errors import ConfigError, UsageError
from hastore.fs.private_files import PRIVATE_MODE, replace_file
from hastore.security.identities import load_identities
from hastore.security.identity import (
    MAX_KEYS,
    Identity,
    Key,
    Quota,
    Secret,
    group_problem,
    name_problem,
    pattern_problem,
)
from hastore.security.identity_file import (
    MAX_FILE_BYTES,
    SECRET_BYTES,
    format_time,
    format_verifier,
    parse_identities,
    parse_quota,
)
from hastore.security.scram import DEFAULT_ITERATIONS, SALT_BYTES, Credentials, derive

_NEW_FILE = """\
# The identities of clients, with their rights and how each is proved (docs/security.md).
# Made by `hastore keys`, which keeps comments. Keep this file private: mode 0600.
# Whoever has one of its `secrets` is that client of RocketMQ's.
challenge_secret: {secret}
identities: {{}}
"""


class IdentityEditor:
    """The identities file at `path`, new if there is none and `create` is true.

    The constructor raises ConfigError for a file that is not valid. The methods change what `save`
    writes, and raise UsageError for what is not possible.
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        from ruamel.yaml import YAML  # a node that only reads its identities does not need it

        self.path = path
        is_new = create and not os.path.lexists(path)
        if is_new:
            secret = base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()
            data = _NEW_FILE.format(secret=secret).encode()
        else:
            data = load_identities(path).data
        self._parsed = parse_identities(data, path)
        self._revoked: set[str] = set()
        self._editor = YAML(typ="rt")
        self._editor.preserve_quotes = True
        self._editor.width = 4096
        try:
            self._tree: Any = self._editor.load(data.decode())
        except Exception:  # ruamel raises many types; none of their texts is safe to show
            raise ConfigError(f"{path}: is not valid YAML 1.2; correct it") from None

    @property
    def identities(self) -> list[Identity]:
        """Return the identities, sorted by name."""
        return [one for _, one in sorted(self._parsed.identities.items())]

    def find(self, name: str) -> Identity:
        """Return the identity of that name; UsageError if there is none."""
        found = self._parsed.identities.get(name)
        if found is None:
            problem = name_problem(name) or f"{self.path} has no identity {name}"
            raise UsageError(f"{problem}; see `hastore keys list`")
        return found

    def add(
        self, wanted: Identity, key: str | None, wall_ms: int, *, secret: str | None = None
    ) -> None:
        """Add an identity, proved by `key`, by `secret` and, if it says so, by a certificate."""
        problem = name_problem(wanted.name)
        if problem is not None:
            raise UsageError(problem)
        _check_patterns(wanted)
        for name in self._parsed.identities:
            if name.lower() == wanted.name.lower():
                raise UsageError(
                    f"identity {name} exists already; --rotate gives it another key, "
                    f"`hastore keys revoke` removes it"
                )
        entry: dict[str, Any] = {}
        for right, patterns in _patterns(wanted).items():
            if patterns:
                entry[right] = _flow(patterns)
        if wanted.is_admin:
            entry["admin"] = True
        if wanted.by_certificate:
            entry["certificate"] = True
        if key is not None:
            empty = Credentials(secrets.token_bytes(SALT_BYTES), DEFAULT_ITERATIONS, ())
            entry["keys"] = [_key_entry(empty, key, wall_ms)]
        if secret is not None:
            entry["secrets"] = [_secret_entry(secret, wall_ms)]
        if self._tree["identities"] is None or not len(self._tree["identities"]):
            from ruamel.yaml.comments import CommentedMap

            self._tree["identities"] = CommentedMap()
        # YAML 1.1 takes a name such as 007 or no for a number or a truth value, without quotes.
        plain = yaml.safe_load(wanted.name) == wanted.name
        self._tree["identities"][wanted.name if plain else _quoted(wanted.name)] = entry

    def set_rights(self, wanted: Identity, quota: Mapping[str, str]) -> Identity:
        """Give an identity the rights of `wanted`, else as `find` gives it; return what it is then.

        `quota` has texts by name; an empty one removes that bound.
        """
        before = self.find(wanted.name)
        _check_patterns(wanted)
        numbers = {one: parse_quota(one, text) if text else None for one, text in quota.items()}
        entry = self._entry(wanted.name)
        for right, patterns in _patterns(wanted).items():
            if patterns == _patterns(before)[right]:
                continue
            if patterns or (right == "groups" and patterns is not None):
                entry[right] = _flow(patterns)
            else:
                del entry[right]
        if wanted.is_admin != before.is_admin:
            entry["admin"] = wanted.is_admin
        bounds = before.quota
        if numbers:
            changed = replace(bounds or Quota(), **numbers)
            bounds = None if changed == Quota() else changed
            self._set_quota(entry, quota)
        after = replace(wanted, quota=bounds)
        self._parsed = replace(
            self._parsed, identities={**self._parsed.identities, wanted.name: after}
        )
        return after

    def _set_quota(self, entry: Any, quota: Mapping[str, str]) -> None:
        if entry.get("quota") is None:
            entry["quota"] = {}
        bounds = entry["quota"]
        for name, text in quota.items():
            if text:
                bounds[name] = int(text) if text.isdecimal() else text
            else:
                bounds.pop(name, None)
        if not bounds:
            del entry["quota"]

    def rotate(self, name: str, key: str, old_until_ms: int | None, wall_ms: int) -> int:
        """Give an identity another key; return how many older ones still count.

        They count until `old_until_ms`, or for ever if that is None. Keys that have run out go.
        """
        identity = self.find(name)
        credentials = Credentials(identity.salt, identity.iterations, ())
        if not identity.keys:
            credentials = Credentials(secrets.token_bytes(SALT_BYTES), DEFAULT_ITERATIONS, ())
        entry = _key_entry(credentials, key, wall_ms)
        return self._add_to("keys", name, entry, old_until_ms, wall_ms)

    def rotate_secret(self, name: str, secret: str, old_until_ms: int | None, wall_ms: int) -> int:
        """Give an identity another secret, for RocketMQ's clients; see `rotate`."""
        entry = _secret_entry(secret, wall_ms)
        return self._add_to("secrets", name, entry, old_until_ms, wall_ms)

    def _add_to(
        self, kind: str, name: str, entry: Any, old_until_ms: int | None, wall_ms: int
    ) -> int:
        """Add a key or a secret; return how many older ones still count."""
        keep = [one.counts(wall_ms) for one in self._proofs(kind, name)]
        kept = self._keep(kind, name, keep)
        if len(kept) >= MAX_KEYS:
            raise UsageError(
                f"identity {name} has {len(kept)} {kind}, which is the most; "
                f"run `hastore keys revoke {name} --old` first"
            )
        if old_until_ms is not None:
            for older, one in kept:
                if one.until_ms is None or one.until_ms > old_until_ms:
                    older["until"] = _quoted(format_time(old_until_ms))
        entries = self._entry(name)
        if entries.get(kind) is None:
            entries[kind] = []
        entries[kind].append(entry)
        return len(kept)

    def revoke(self, name: str) -> None:
        """Remove an identity."""
        self._entry(name)
        del self._tree["identities"][name]
        self._revoked.add(name)
        if not len(self._tree["identities"]):
            self._tree["identities"] = {}

    def revoke_old(self, name: str) -> int:
        """Remove all keys and secrets but the newest of each; return how many were removed."""
        removed = 0
        for kind in ("keys", "secrets"):
            count = len(self._proofs(kind, name))
            if count > 1:
                self._keep(kind, name, [place == count - 1 for place in range(count)])
                removed += count - 1
        return removed

    def save(self) -> None:
        """Write the file, atomically and durably; its mode becomes 0600."""
        text = StringIO()
        self._editor.dump(self._tree, text)
        data = text.getvalue().encode()
        if len(data) > MAX_FILE_BYTES:
            raise UsageError(f"{self.path}: would be larger than {MAX_FILE_BYTES} bytes")
        written = parse_identities(data, self.path)  # never write what a node would refuse
        for name, one in self._parsed.identities.items():
            found = written.identities.get(name)
            if name not in self._revoked and (found is None or _rights(found) != _rights(one)):
                raise self._unquoted(name)
        replace_file(self.path, data, PRIVATE_MODE)

    def _entry(self, name: str) -> Any:
        """Return what the file has of an identity; UsageError if there is none."""
        self.find(name)
        found = self._tree["identities"].get(name)
        if found is None:
            raise self._unquoted(name)
        return found

    def _unquoted(self, name: str) -> UsageError:
        """Return the error for what a node reads as text, by YAML 1.1, and an editor does not."""
        return UsageError(
            f"{self.path}: identity {name}: its name or a pattern is a number or a truth value in "
            "YAML 1.2, and would be changed; nothing was changed: write it in quotes"
        )

    def _proofs(self, kind: str, name: str) -> tuple[Key | Secret, ...]:
        identity = self.find(name)
        return identity.keys if kind == "keys" else identity.secrets

    def _keep(self, kind: str, name: str, keep: list[bool]) -> list[tuple[Any, Key | Secret]]:
        """Drop the keys, or secrets, that `keep` says no to; return entries and what they say."""
        entries = self._entry(name).get(kind) or []
        for place in reversed(range(len(keep))):
            if not keep[place]:
                del entries[place]
        proofs: tuple[Key | Secret, ...] = self._proofs(kind, name)
        kept = [one for one, stays in zip(proofs, keep, strict=True) if stays]
        return list(zip(entries, kept, strict=True))


def _patterns(identity: Identity) -> dict[str, tuple[str, ...] | None]:
    """Return the patterns of an identity by the name of their right."""
    return {
        "produce": identity.produce,
        "consume": identity.consume,
        "groups": identity.groups,
    }


def _check_patterns(identity: Identity) -> None:
    """Raise UsageError for a pattern that is none."""
    problems = [pattern_problem(one) for one in (*identity.produce, *identity.consume)]
    problems += [group_problem(one) for one in identity.groups or ()]
    for one in problems:
        if one is not None:
            raise UsageError(one)


def _rights(identity: Identity) -> tuple[Any, ...]:
    """Return what only `set_rights` changes."""
    return identity.rights, identity.by_certificate, identity.quota


def _secret_entry(secret: str, wall_ms: int) -> dict[str, Any]:
    return {"secret": _quoted(secret), "made": _quoted(format_time(wall_ms))}


def _key_entry(credentials: Credentials, key: str, wall_ms: int) -> dict[str, Any]:
    verifier = derive(key, credentials.salt, credentials.iterations)
    return {
        "verifier": _quoted(format_verifier(credentials, verifier)),
        "made": _quoted(format_time(wall_ms)),
    }


def _flow(patterns: tuple[str, ...]) -> Any:
    from ruamel.yaml.comments import CommentedSeq

    items = CommentedSeq(_quoted(one) for one in patterns)
    items.fa.set_flow_style()
    return items


def _quoted(text: str) -> Any:
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    return DoubleQuotedScalarString(text)
