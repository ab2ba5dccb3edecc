"""An identities file with known keys."""

import base64
import os
import secrets

import pytest

from hastore.security.identity_file import format_verifier
from hastore.security.scram import Credentials, derive

SALT = b"0123456789abcdef"
ITERATIONS = 4096


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now_ms = 1_000_000.0
        self.wall = 1_800_000_000_000

    def monotonic_ms(self):
        return self.now_ms

    def wall_ms(self):
        return self.wall

    def pass_ms(self, ms):
        self.now_ms += ms
        self.wall += ms


def verifier_of(key):
    """Return the line of a key in the file."""
    credentials = Credentials(SALT, ITERATIONS, ())
    return format_verifier(credentials, derive(key, SALT, ITERATIONS))


class IdentitiesText:
    """Makes the text of a file."""

    def __init__(self):
        self.secret = base64.b64encode(secrets.token_bytes(32)).decode()
        self.entries = {}

    def add(self, name, *keys, until=None, **rights):
        lines = [f"  {name}:"]
        lines += [f"    {right}: {value}" for right, value in rights.items()]
        if keys:
            lines.append("    keys:")
        for key in keys:
            lines.append(f'      - verifier: "{verifier_of(key)}"')
            if until and key in until:
                lines.append(f'        until: "{until[key]}"')
        self.entries[name] = "\n".join(lines) + "\n"
        return self

    def drop(self, name):
        del self.entries[name]
        return self

    def text(self):
        entries = "".join(self.entries.values()) or "  {}\n"
        return f"challenge_secret: {self.secret}\nidentities:\n{entries}"

    def write(self, path):
        """Replace the file, as the commands do."""
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(self.text())
        os.chmod(temporary, 0o600)
        os.replace(temporary, path)
        return str(path)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def content():
    return IdentitiesText()


@pytest.fixture
def key():
    return secrets.token_hex(32)
