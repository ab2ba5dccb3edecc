"""Groups whose nodes ask RocketMQ's clients for the signatures of identities."""

from __future__ import annotations

import pathlib
import secrets
from typing import Any

from hastore.clock import SYSTEM_CLOCK
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from tests.process.harness import Group

OPS = Identity("ops", ("*",), ("*",), is_admin=True, groups=("*",))


class Identified:
    """The identities of a group: each has a secret, and the administrator a key too."""

    def __init__(self, folder: pathlib.Path, *identities: Identity) -> None:
        self.path = folder / "identities.yaml"
        self.secrets: dict[str, str] = {}
        self.key = secrets.token_hex(32)
        editor = IdentityEditor(str(self.path), create=True)
        for one in (OPS, *identities):
            self.secrets[one.name] = secret = secrets.token_hex(32)
            key = self.key if one is OPS else None
            editor.add(one, key, SYSTEM_CLOCK.wall_ms(), secret=secret)
        editor.save()

    def of(self, name: str) -> dict[str, Any]:
        """Return the options of a client that is an identity."""
        return {"access_key": name, "secret_key": self.secrets[name]}

    def tools(self, name: str) -> str:
        """Return the text of mqadmin's tools.yml."""
        return f"accessKey: {name}\nsecretKey: '{self.secrets[name]}'\n"

    def asked_by(self, group: Group) -> Group:
        """Let the nodes of a group ask for these identities; returns it."""
        for node in group:
            node.token = f"ops:{self.key}"
            node.write(security={"identities": str(self.path)})
        return group
