"""What an operator's command reads and changes in ZooKeeper: the object of one node, and where
all nodes of its group are.
"""

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from hastore.addresses import SCHEME, group_path, node_path, parse_servers
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, NodeAddress, Role
from hastore.errors import RegistryError
from hastore.fs.filesystem import REAL
from hastore.registry.entry import NodeEntry, Once, others_wrote, parse_entry, siblings_of
from hastore.registry.group_watch import read_entries
from hastore.registry.remembered import read_credentials
from hastore.registry.session import (
    Session,
    Unreachable,
    Znode,
    registry_contexts,
)

_ATTEMPTS = 5  # the node may write its own object at the same time


class RegistryEditor:
    """The object of the node of a configuration; used with `open_editor`."""

    def __init__(self, session: Session, config: Config) -> None:
        self._session = session
        self._config = config
        self.path = node_path(config.cluster, config.group, config.node)

    def role(self) -> Role | None:
        """Return the node's role there; None without a znode. Raises RegistryError, also if others
        may have written it, so that the node does not follow it.
        """
        found = self._session.get(self.path)
        if found is None:
            return None
        entry = parse_entry(found.data, self.path)
        if not found.ours:
            raise RegistryError(others_wrote(self.path, entry.role))
        return entry.role

    def addresses(self) -> dict[int, NodeAddress]:
        """Return the addresses that nodes of the configuration state there."""
        config = self._config
        group = group_path(config.cluster, config.group)
        entries = read_entries(self._session, group, config.nodes, lambda _refused: None)
        return siblings_of(entries, config.cluster, config.group)

    def change(self, role: Role, once: Once | None) -> None:
        """Set the role, with options for this one change. An object that is invalid, or that others
        may have written, is replaced.

        Raises RegistryError, also if the object is that of another node.
        """
        for _ in range(_ATTEMPTS):
            found = self._session.get(self.path)
            entry = msgspec.structs.replace(self._entry(found, role), role=role, once=once)
            try:
                written = self._session.write(self.path, entry.encode(), found)
            except Unreachable as failure:
                raise RegistryError(
                    f"{failure}: it is not known whether the role was written to {self.path}; look "
                    "at the node's status, and run the command again"
                ) from failure
            if written is not None:
                return
        raise RegistryError(
            f"{self.path} was changed by others {_ATTEMPTS} times meanwhile; run the command again"
        )

    def _entry(self, found: Znode | None, role: Role) -> NodeEntry:
        config = self._config
        own = config.nodes[config.node]
        made = NodeEntry(role=role, api=own.api, ha=own.ha, http=own.http)
        if found is None or not found.ours:
            return made
        try:
            entry = parse_entry(found.data, self.path)
        except RegistryError:
            return made
        theirs = (entry.cluster, entry.group, entry.node)
        ours = (config.cluster, config.group, config.node)
        if any(a is not None and a != b for a, b in zip(theirs, ours, strict=True)):
            raise RegistryError(
                f"{self.path} holds the object of node {entry.node} of {entry.cluster}/"
                f"{entry.group}; delete the znode, and the node writes its own"
            )
        if entry.address != made.address:
            raise RegistryError(
                f"{self.path} has other addresses (api {entry.api}) than this file ({made.api}): "
                "start the node with this file first, or delete the znode"
            )
        return entry


def new_once(
    command: str,
    epoch: int,
    *,
    no_catch_up: bool,
    force_unclean: bool,
    accept_loss: bool,
    needed_node: int | None = None,
) -> Once:
    """Return options for one promotion or demotion, which are valid from now on."""
    return Once(
        id=secrets.token_hex(16),
        command=command,
        epoch=epoch,
        wall_ms=SYSTEM_CLOCK.wall_ms(),
        no_catch_up=no_catch_up,
        force_unclean=force_unclean,
        accept_loss=accept_loss,
        needed_node=needed_node,
    )


@contextmanager
def open_editor(config: Config) -> Iterator[RegistryEditor]:
    """Lend an editor of the node's object.

    Raises RegistryError if ZooKeeper is out of reach, ConfigError for the files of its TLS.
    """
    assert config.registry is not None, "the configuration has no registry"
    servers = parse_servers(config.registry)
    try:
        session = Session(
            servers,
            read_credentials(config, REAL),
            SYSTEM_CLOCK,
            tls=registry_contexts(
                config.registry_ca, config.registry_certificate, config.registry_key
            ),
            stopping=threading.Event(),
            on_event=lambda: None,
        )
        try:
            yield RegistryEditor(session, config)
        finally:
            session.close()
    except Unreachable as failure:
        raise RegistryError(
            f"the registry {SCHEME}{servers} is out of reach: {failure}; nothing was changed. "
            "Roles stay as they are until it is back"
        ) from failure
