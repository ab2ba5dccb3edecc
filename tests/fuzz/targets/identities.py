"""Files of identities, and the files that say who a client is."""

from __future__ import annotations

import pathlib
from unittest import mock

from hastore.client.security import Security, read_security
from hastore.errors import ConfigError
from hastore.security import identity_file
from hastore.security.identity import (
    group_problem,
    key_problem,
    matches,
    name_problem,
    pattern_problem,
)
from hastore.security.identity_file import (
    format_time,
    format_verifier,
    parse_identities,
    parse_time,
)
from hastore.security.scram import MIN_ITERATIONS, Credentials, derive
from tests.fuzz import kit

REACHES = (
    parse_identities, identity_file._check_depth, identity_file._Parser._keys, parse_time,
    identity_file._Parser._secrets, identity_file._Parser._quota, read_security, matches,
    identity_file._Parser._patterns,
)  # fmt: skip
LEAST = kit.Least(0.1, 15)
TOKENS = (
    *(
        b"identities:\n",
        b"challenge_secret: ",
        b"  app:\n",
        b"keys:\n",
        b"- verifier: ",
        b"secrets:\n",
    ),
    *(
        b"- secret: ",
        b"until: 2026-11-22T18:30:00Z",
        b"produce: [a*]",
        b"groups: ['*']",
        b"admin: true",
    ),
    *(b"certificate: true", b"quota: {requests: 5}", b"&a ", b"*a", b"!!int "),
)
SALT = b"s" * 16
VERIFIER = format_verifier(
    Credentials(SALT, MIN_ITERATIONS, ()), derive("ab" * 32, SALT, MIN_ITERATIONS)
)
FILE = f"""\
challenge_secret: {"QUFB" * 10}QUE=
identities:
  app:
    keys:
    - verifier: {VERIFIER}
      made: 2026-11-22T18:30:00Z
      until: 2027-11-22T18:30:00Z
    secrets:
    - secret: 0123456789abcdef
    produce: [orders, 'a*']
    consume: ['*']
    groups: ['g?']
  admin: {{certificate: true, admin: yes, quota: {{requests: 100, topics: 5}}}}
""".encode()


def seeds() -> list[bytes]:
    """Return files of identities, and settings of clients; the first byte says which."""
    changes = [
        (b"QUFB", b""),
        (b"  app:", b"  admin:"),
        (b"  app:", b"  App:"),
        (b"  app:", b"  'a b':"),
        (b"4096", b"5"),
        (b"SCRAM", b"PLAIN"),
        (b"2026-11", b"2026-31"),
        (b"yes", b"perhaps"),
        (b"0123456789abcdef", b"short"),
        (b"'a*'", b"'a b'"),
        (b"[orders", b"{orders"),
        (b"admin: {", b"x: {"),
        (b"certificate: true, ", b""),
        (b"requests: 100", b"requests: -1"),
        (b"requests", b"wishes"),
        (b"app:", b"app: &a"),
        (b"['g?']", b"&a ['g?']\n    produce: *a"),
        (b"orders", b"\xff"),
        (b"orders", b"[" * 90 + b"]" * 90),
        (b"identities:", b"x:"),
        (b"    made", b"    - made"),
    ]
    clients = [
        b"tls_ca: ca.pem\nidentity: app\nkey_file: app.key\n",
        b"identity: app\n",
        b"tls_ca: 5\n",
        b"a: 2024-13-45\n",
        b"a: !!int ''",
        b"a: !!timestamp x",
        b"a: !!bool x",
        b"a: " + b"[" * 400,
        b"- a\n",
        b"",
        b"tls_ca: [\n",
        b"x: 1\n",
        b"identity: 'a b'\nkey_file: k\n",
        b"tls_certificate: c\ntls_key: k\ntls_ca: ca\n",
        b"registry_ca: a\n",
        b"{1: 2}",
        b"\xff",
    ]
    names = [
        b"na",
        b"n" + b"ab" * 32,
        b"n*",
        b"ka*c?",
        b"t2026-11-22T18:30:00Z",
        b"t2026-02-30T00:00:00Z",
    ]
    return [
        b"i" + FILE, b"i", b"i[]", *(b"i" + FILE.replace(*one, 1) for one in changes),
        *(b"c" + one for one in clients), *names,
    ]  # fmt: skip


def one(data: bytes) -> None:
    """Read a file of identities or of a client; check names, patterns and times."""
    kind, raw = data[:1], data[1:]
    text = kit.text_of(raw)
    if kind == b"i":
        with kit.documented(ConfigError):
            found = parse_identities(raw, "identities.yaml")
        for name, identity in found.identities.items():
            assert name == identity.name and name_problem(name) is None
            identity.rights, identity.may_produce("T"), identity.may_join("g")  # noqa: B018
    elif kind == b"c":
        with (
            mock.patch.object(pathlib.Path, "read_text", lambda *_: raw.decode("utf-8")),
            kit.documented(ConfigError),
        ):
            assert isinstance(read_security("security.yaml"), Security)
    elif kind == b"t":
        at = parse_time(text)
        kit.refuse(at is not None, "no time")
        assert at is not None and format_time(at) == text
    else:
        problems = [
            check(text) for check in (name_problem, pattern_problem, group_problem, key_problem)
        ]
        assert matches((text,), "x") in (True, False)
        kit.refuse(None in problems, "neither a name nor a pattern")
