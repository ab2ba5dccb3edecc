"""The group `hastore keys`."""

import click

from hastore.cli.lazy import LazyGroup

_COMMANDS = {
    "ca": "hastore.cli.keys.certificates:ca_command",
    "cert": "hastore.cli.keys.certificates:cert_command",
    "new": "hastore.cli.keys.identities:new_command",
    "list": "hastore.cli.keys.identities:list_command",
    "revoke": "hastore.cli.keys.identities:revoke_command",
}


@click.group(
    "keys", cls=LazyGroup, places=_COMMANDS, short_help="Make certificates, identities and keys."
)
def keys_group() -> None:
    """Make the certificates of a group; manage the identities of clients and their keys.

    docs/security.md describes the whole.
    """
