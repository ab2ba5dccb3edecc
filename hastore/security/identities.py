"""Identities: the identities of a node's clients, read again when their file changes.

A thousand identities take a quarter of a second to parse. The thread of the client API must not
spend that time, because no client would be answered meanwhile: `IdentityReader` parses a large file
on a thread of its own.

`Tokens` checks an identity that is proved by its key sent whole, `NAME:KEY`, as HTTP needs it. That
costs some milliseconds of CPU, once: a good token is remembered by its HMAC under a secret of this
process, and costs microseconds from then on. Wrong tokens are bounded in all, so that a flood costs
at most ALL_PER_S checks a second, and nobody whose token is remembered waits for it. They are
bounded per source too, unless the caller lets the sources take turns (server/http_server.py).
"""

import collections
import hmac
import logging
import secrets
import threading
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.errors import AuthenticationError, ConfigError
from hastore.fs.private_files import PrivateFile, load_private
from hastore.security.identity import Identity, Secret, differences, key_problem
from hastore.security.identity_file import MAX_FILE_BYTES, IdentityFile, parse_identities
from hastore.security.scram import (
    NAME,
    Credentials,
    ScramServer,
    Verifier,
    mock_credentials,
    verifies,
)
from hastore.service import OnFailure, Service

Result = TypeVar("Result")


class IdentityReader(Service, Generic[Result]):
    """Parse the content that was asked for last. Any thread may ask."""

    def __init__(
        self,
        parse: Callable[[bytes], Result],
        on_parsed: Callable[[], object],
        *,
        on_failure: OnFailure,
    ) -> None:
        """`on_parsed` is called by this thread; it fetches the result by `result_of`."""
        super().__init__("IdentityReader", on_failure=on_failure)
        self._parse = parse
        self._on_parsed = on_parsed
        self._asked = threading.Event()
        self._wanted: bytes | None = None
        self._parsed: tuple[bytes, Result] | None = None

    def result_of(self, data: bytes) -> Result | None:
        """Return what came of `data`; None if it is not parsed yet: then the thread does it."""
        parsed = self._parsed
        if parsed is not None and parsed[0] == data:
            return parsed[1]
        self._wanted = data
        self._asked.set()
        return None

    def run(self) -> None:
        """Parse until the service is stopped."""
        while not self.stopping.is_set():
            self._asked.wait()
            self._asked.clear()
            data, self._wanted = self._wanted, None
            if data is not None and not self.stopping.is_set():
                self._parsed = data, self._parse(data)
                self._on_parsed()
                self._parsed = None  # it is in force, or the file has changed meanwhile

    def wake(self) -> None:
        """Let the thread see that it is to stop."""
        self._asked.set()


log = logging.getLogger(__name__)

CHECK_MS = 1_000.0  # between two looks at the file while nobody proves anything
LARGE_BYTES = 32 * 1024  # about 150 identities: less is parsed within some 20 ms
SETTLE_MS = 1_000.0  # so long a file that was changed in place must stay the same


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of the identities: names, sorted. `problem`: why the file was not taken."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()  # other rights, another key, or a key that ran out
    revoked: tuple[str, ...] = ()
    problem: str | None = None
    what: Mapping[str, str] = field(default_factory=dict, compare=False)  # by name, in words


@dataclass(frozen=True, slots=True)
class Proof:
    """That a client is `identity`: by the key of `verifier`, by `secret`, or by its certificate."""

    identity: Identity
    verifier: Verifier | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)

    @property
    def by_certificate(self) -> bool:
        """Whether a certificate is the proof."""
        return self.verifier is None and self.secret is None


@dataclass(frozen=True, slots=True)
class _State:
    file: IdentityFile
    next_end_ms: int | None  # the wall time at which the next key runs out
    at_ms: int  # the wall time of which that was said


@dataclass(frozen=True, slots=True)
class _Look:
    """What the file was at the last look, and what came of it.

    A state, or why the file is not valid, or None while it is parsed.
    """

    found: PrivateFile
    in_place: bool  # the same file had another content before
    since_ms: float  # when it was first seen so
    result: _State | str | None


def load_identities(path: str) -> PrivateFile:
    """Return the file of identities at `path`, unparsed; raises what `load_private` raises."""
    remedy = "make it with `hastore keys new`, or correct the path"
    return load_private(path, MAX_FILE_BYTES, missing=remedy)


class Identities:
    """The identities in the file at `path`. Any thread may call it.

    The constructor raises ConfigError if the file is not valid. Later `refresh` reads it again, and
    so does whoever is about to prove something; a file that is not valid then changes nothing, and
    `problem` says why. A file that is written in place may be met half-written, and be valid all
    the same: it takes nothing away before it has stayed the same for SETTLE_MS. A file that
    replaces another one counts at once. With `reader` a file of LARGE_BYTES or more is parsed on
    that thread, and counts once it is.
    `version` rises with each change, also when a key runs out: whoever keeps a Proof asks `still`
    then. `on_change` is called by the thread that found a change, or a new problem.
    """

    def __init__(
        self,
        path: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        on_change: Callable[[Changes], None] = lambda _changes: None,
    ) -> None:
        self.path = path
        self.version = 1
        self.problem: str | None = None
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_ms = clock.monotonic_ms()
        found = load_identities(path)
        self._state = self._read(found.data)
        self._look = _Look(found, False, self._checked_ms, self._state)
        self._reader: IdentityReader[_State | str] | None = None
        self._checksum: tuple[IdentityFile, int] | None = None

    def reader(self, *, on_failure: OnFailure) -> Service:
        """Return the thread that parses large files from now on; the caller starts and stops it."""
        self._reader = IdentityReader(self._parse, lambda: self.refresh(0), on_failure=on_failure)
        return self._reader

    @property
    def count(self) -> int:
        """How many identities are in force."""
        return len(self._state.file.identities)

    @property
    def checksum(self) -> int:
        """Return a CRC of the identities in force: names, rights, when their keys were made.

        Two nodes with the same file have the same one, whatever changed before. No key is in it.
        """
        file = self._state.file
        known = self._checksum
        if known is None or known[0] is not file:
            crc = 0
            for name in sorted(file.identities):
                crc = zlib.crc32(repr(file.identities[name]).encode(), crc)
            self._checksum = known = file, crc
        return known[1]

    def refresh(self, after_ms: float = CHECK_MS) -> int:
        """Read the file again if the last time is `after_ms` ago; return `version`."""
        if self._clock.monotonic_ms() - self._checked_ms >= after_ms:
            with self._lock:
                changes = self._refresh()
            if changes is not None:
                self._on_change(changes)
        return self.version

    def find(self, name: str) -> Identity | None:
        """Return the identity of that name, or None."""
        return self._state.file.identities.get(name)

    def exchange(self) -> ScramServer:
        """Return the server's side of a new SCRAM exchange."""
        return ScramServer(self.credentials, secrets.token_urlsafe(18))

    def credentials(self, name: str) -> Credentials:
        """Return what a challenge for `name` needs; for an unknown name, mock credentials."""
        self.refresh(0)  # a new key counts at once, and a revoked one no more
        state = self._state
        identity = state.file.identities.get(name)
        real = identity.credentials(self._clock.wall_ms()) if identity is not None else None
        mock = mock_credentials(state.file.challenge_secret, name)  # always: it takes time
        return real or mock

    def proved(self, exchange: ScramServer) -> Proof:
        """Return the proof of an exchange that has ended well; AuthenticationError if it is void.

        It is void if the key was revoked while the exchange went on.
        """
        if exchange.name is None or exchange.verifier is None:
            raise AuthenticationError("the exchange has proved nothing")
        proof = self.still_key(exchange.name, exchange.verifier)
        if proof is None:
            raise AuthenticationError(f"the key of identity {exchange.name} was revoked")
        return proof

    def still_key(self, name: str, verifier: Verifier) -> Proof | None:
        """Return the proof by a key of `name`; None if it does not count."""
        return self.still(Proof(Identity(name), verifier))

    def by_certificate(self, common_name: str) -> Proof | None:
        """Return the proof by a verified certificate; None if no identity is proved by it."""
        self.refresh(0)  # a new key counts at once, and a revoked one no more
        return self.still(Proof(Identity(common_name)))

    def secrets(self, name: str) -> tuple[Identity | None, tuple[Secret, ...]]:
        """Return the identity of that name, and its secrets that count now."""
        identity = self.find(name)
        if identity is None or not identity.secrets:
            return None, ()
        if len(identity.secrets) == 1 and identity.secrets[0].until_ms is None:
            return identity, identity.secrets
        now = self._clock.wall_ms()
        return identity, tuple(one for one in identity.secrets if one.counts(now))

    def still(self, proof: Proof) -> Proof | None:
        """Return the proof with the identity's present rights; None if it counts no longer."""
        identity = self.find(proof.identity.name)
        if identity is None:
            return None
        if proof.by_certificate:
            return Proof(identity) if identity.by_certificate else None
        now = self._clock.wall_ms()
        if proof.secret is not None:
            if any(one.text == proof.secret and one.counts(now) for one in identity.secrets):
                return Proof(identity, None, proof.secret)
            return None
        if any(key.verifier == proof.verifier and key.counts(now) for key in identity.keys):
            return Proof(identity, proof.verifier)
        return None

    def _refresh(self) -> Changes | None:
        self._checked_ms = self._clock.monotonic_ms()
        before = self._state
        problem, after = None, before
        try:
            found = load_identities(self.path)
        except ConfigError as broken:
            problem = str(broken)
            nowhere = replace(self._look.found, place=(0, 0))  # what comes next is another file
            self._look = replace(self._look, found=nowhere)
        else:
            look = self._look_at(found)
            if look.result is None:
                problem = self.problem
            elif isinstance(look.result, str):
                problem = look.result
            elif look.result.file is not before.file and not self._must_settle(look, look.result):
                after = look.result
        news = problem is not None and problem != self.problem
        self.problem = problem
        if news:
            log.warning("identities: %s; the last good ones stay in force", problem)
        now = self._clock.wall_ms()
        if after is not before:
            changes = _compare(before.file, after.file, problem)
            self._state = after
        elif before.next_end_ms is not None and now >= before.next_end_ms:
            ended = _ended(before, now)
            changes = Changes(
                changed=ended, problem=problem, what=dict.fromkeys(ended, "a key ran out")
            )
            self._state = _state(before.file, now)
        else:
            if now < before.at_ms:  # the clock was set back: keys that had run out count again
                self._state = _state(before.file, now)
            return Changes(problem=problem) if news else None
        self.version += 1
        return changes

    def _look_at(self, found: PrivateFile) -> _Look:
        """Return what came of the file. Only a new content is parsed: strangers cause looks."""
        look, now = self._look, self._checked_ms
        if found.place != look.found.place:
            same = found.data == look.found.data
            look = _Look(found, False, now, look.result if same else None)
        elif found.data != look.found.data:
            look = _Look(found, True, now, None)
        if look.result is None:
            reader = self._reader if len(found.data) >= LARGE_BYTES else None
            parsed = reader.result_of(found.data) if reader is not None else self._parse(found.data)
            look = replace(look, result=parsed)
        self._look = look
        return look

    def _must_settle(self, look: _Look, after: _State) -> bool:
        """Whether the file may be half-written, so that it would take away what it will have."""
        is_young = self._checked_ms - look.since_ms < SETTLE_MS
        return look.in_place and is_young and _takes_away(self._state.file, after.file)

    def _parse(self, data: bytes) -> _State | str:
        """Return the state in a file, or why it is not valid. Changes nothing; any thread."""
        try:
            state = self._read(data)
        except ConfigError as broken:
            return str(broken)
        # With another comment, say. Later looks then compare one object with itself.
        in_force = self._state
        return in_force if state.file == in_force.file else state

    def _read(self, data: bytes) -> _State:
        return _state(parse_identities(data, self.path), self._clock.wall_ms())


def _state(file: IdentityFile, wall_ms: int) -> _State:
    ends = (
        key.until_ms
        for identity in file.identities.values()
        for key in identity.timed
        if key.until_ms is not None and key.until_ms > wall_ms
    )
    return _State(file, min(ends, default=None), wall_ms)


def _ended(state: _State, wall_ms: int) -> tuple[str, ...]:
    """Return the names of which a key ran out since the last look."""
    start = state.next_end_ms or 0
    ended = {
        identity.name
        for identity in state.file.identities.values()
        for key in identity.timed
        if key.until_ms is not None and start <= key.until_ms <= wall_ms
    }
    return tuple(sorted(ended))


def _takes_away(before: IdentityFile, after: IdentityFile) -> bool:
    """Whether an identity, or a right, a key or a key's end is not there any more."""
    new = after.identities
    return any(
        name not in new or not _has_all(old, new[name]) for name, old in before.identities.items()
    )


def _has_all(old: Identity, new: Identity) -> bool:
    return (
        set(old.produce) <= set(new.produce)
        and set(old.consume) <= set(new.consume)
        and _has_groups(old.groups, new.groups)
        and old.is_admin <= new.is_admin
        and old.by_certificate <= new.by_certificate
        and {(key.verifier, key.until_ms) for key in old.keys}
        <= {(key.verifier, key.until_ms) for key in new.keys}
        and {(one.text, one.until_ms) for one in old.secrets}
        <= {(one.text, one.until_ms) for one in new.secrets}
    )


def _has_groups(old: tuple[str, ...] | None, new: tuple[str, ...] | None) -> bool:
    if old is None or new is None:  # both take something away from the other
        return old == new
    return set(old) <= set(new)


def _compare(before: IdentityFile, after: IdentityFile, problem: str | None) -> Changes:
    old, new = before.identities, after.identities
    changed = tuple(sorted(name for name in new.keys() & old.keys() if new[name] != old[name]))
    added = tuple(sorted(new.keys() - old.keys()))
    return Changes(
        added=added,
        changed=changed,
        revoked=tuple(sorted(old.keys() - new.keys())),
        problem=problem,
        what={
            name: differences(old.get(name) or Identity(name), new[name])
            for name in (*added, *changed)
        },
    )


SOURCE_PER_S = 4  # checks of keys for one source
ALL_PER_S = 20
MAX_TOKEN = 256
MAX_REMEMBERED = 256
_WINDOW_MS = 1_000.0


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a token proves nothing; `again`: too many were checked, the same may be good later."""

    reason: str
    claimed: str | None = None  # the name in the token, if it can be one
    again: bool = False


class Tokens:
    """Check tokens against the identities. Thread-safe."""

    def __init__(self, identities: Identities, clock: Clock) -> None:
        self._identities = identities
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._remembered: dict[bytes, Proof] = {}
        self._since_ms = clock.monotonic_ms()
        self._checked: collections.Counter[str] = collections.Counter()

    def needs_check(self, token: str) -> bool:
        """Whether `prove` would check the token's key: it can be one, and is not remembered."""
        if not _can_be(token):
            return False
        with self._lock:
            return self._digest(token) not in self._remembered

    @property
    def has_room(self) -> bool:
        """Whether a key may be checked now."""
        with self._lock:
            self._begin_window()
            return self._checked.total() < ALL_PER_S

    def prove(self, token: str, source: str, *, in_turn: bool = False) -> Proof | Denied:
        """Return the proof of a token from `source`, a host.

        `in_turn`: the caller lets sources take turns, so no bound of one source is needed.
        """
        self._identities.refresh(0)
        if not _can_be(token):
            return Denied("the token is not NAME:KEY, with a key that `hastore keys new` made")
        name, _, key = token.partition(":")
        digest = self._digest(token)
        with self._lock:
            known = self._remembered.get(digest)
            if known is not None:
                still = self._identities.still(known)
                if still is not None:
                    return still
                del self._remembered[digest]
            if not self._may_check(source, in_turn):
                return Denied("too many keys were checked just now; try again", name, again=True)
        # An unknown name takes as long as a known one.
        verifier = verifies(key, self._identities.credentials(name))
        proof = None
        if verifier is not None:
            proof = self._identities.still_key(name, verifier)
        if proof is None:
            return Denied(
                f"identity {name} is unknown here or has another key; check its name and key", name
            )
        with self._lock:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[digest] = proof
        return proof

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._secret, token.encode(), "sha256")

    def _begin_window(self) -> None:
        now = self._clock.monotonic_ms()
        if now - self._since_ms >= _WINDOW_MS:
            self._since_ms = now
            self._checked.clear()

    def _may_check(self, source: str, in_turn: bool) -> bool:
        self._begin_window()
        least = ALL_PER_S if in_turn else SOURCE_PER_S
        if self._checked.get(source, 0) >= least or self._checked.total() >= ALL_PER_S:
            return False
        self._checked[source] += 1
        return True


def _can_be(token: str) -> bool:
    name, _, key = token.partition(":")
    return len(token) <= MAX_TOKEN and bool(NAME.fullmatch(name)) and key_problem(key) is None
