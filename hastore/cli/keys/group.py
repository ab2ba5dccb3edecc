"""The group `hastore keys`."""

import click

from hastore.cli.lazy import LazyGroup

_COMMANDS = {
    "new": "hastore.cli.keys.identities:new_command",
    "list": "hastore.cli.keys.identities:list_command",
    "revoke": "hastore.cli.keys.identities:revoke_command",
}


@click.group("keys", cls=LazyGroup, places=_COMMANDS, short_help="Manage identities and keys.")
def keys_group() -> None:
    """Manage the identities of clients and their keys (docs/security.md)."""
