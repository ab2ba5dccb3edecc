"""The role from ZooKeeper instead of the file, for RoleService.

RoleService asks `read` for changes, as it asks ConfigWatch in a node without a registry, and `take`
for the options of one command, as it asks OneShotFlags.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from hastore.addresses import KAZOO_MISSING
from hastore.clock import Clock
from hastore.config.checks import Places, check_config
from hastore.config.model import Config, Role
from hastore.errors import ConfigError, UsageError
from hastore.fs.filesystem import FileSystem
from hastore.ha.promoter import Flags
from hastore.registry.memory import RegistryMemory, read_credentials
from hastore.server.role_files import GOOD_FOR_MS
from hastore.service import OnFailure

if TYPE_CHECKING:
    from hastore.registry.node_registry import NodeRegistry

log = logging.getLogger(__name__)


def make_registry(
    config: Config,
    fs: FileSystem,
    store_id: Callable[[], str],
    memory: RegistryMemory,
    clock: Clock,
    on_failure: OnFailure,
) -> "NodeRegistry | None":
    """Return the registry of the node's configuration, None without one.

    Raises UsageError if kazoo is not installed, OSError if the ACL file cannot be read, ConfigError
    for the files of TLS.
    """
    if config.registry is None:
        return None
    try:
        from hastore.registry.node_registry import NodeRegistry
        from hastore.registry.session import registry_contexts
    except ImportError as missing:
        raise UsageError(KAZOO_MISSING) from missing
    tls = registry_contexts(config.registry_ca, config.registry_certificate, config.registry_key)
    credentials = read_credentials(config, fs)
    return NodeRegistry(
        config, credentials, store_id, memory, clock, tls=tls, on_failure=on_failure
    )


class RegistryRoles:
    """The node's file with the role that ZooKeeper has; used by RoleService's thread."""

    def __init__(
        self,
        config: Config,
        read_file: Callable[[], Config | None],
        registry: "NodeRegistry",
        memory: RegistryMemory,
        clock: Clock,
    ) -> None:
        self._file = config
        self._read_file = read_file
        self._registry = registry
        self._memory = memory
        self._clock = clock
        self._role = registry.wanted.role
        registry.refuses = self._refuses

    def first(self) -> Config:
        """Return the configuration with which the node starts."""
        self._role = self._registry.wanted.role
        return self._with_role(self._role)

    def read(self) -> Config | None:
        """Return the configuration once after each change of the file or of the role."""
        changed = self._read_file()
        if changed is not None:
            if changed.role is not self._file.role:
                log.warning(
                    "`role` in the file is only for a first start: this node's role is in the "
                    "registry, so %s is not followed; run `hastore promote` or `hastore demote`",
                    changed.assigned_role.value,
                )
            self._file = changed
            self._registry.learn_config(changed)
        role = self._registry.wanted.role
        if changed is None and role is self._role:
            return None
        self._role = role
        return self._with_role(role)

    def take(self, command: str, epoch: int) -> Flags | None:
        """Return the options for `command` that came with the role, if any, and never again.

        They are valid for 60 s, in the epoch in which they were written. Raises OSError if it
        cannot be made durable that they are used; they are then not used.
        """
        once = self._registry.wanted.once
        if once is None or once.id == self._memory.data.once:
            return None
        late = abs(self._clock.wall_ms() - once.wall_ms) > GOOD_FOR_MS
        if not late and once.epoch == epoch and once.command != command:
            return None
        self._memory.save(once=once.id)
        self._registry.wake()  # it removes them from ZooKeeper
        if late or once.epoch != epoch:
            log.error(
                "the options of a command in the registry (%s) are not used: they were written "
                "under epoch %d (now %d), or more than 60 s ago by this machine's clock; give the "
                "command again",
                once.command,
                once.epoch,
                epoch,
            )
            return None
        return Flags(
            no_catch_up=once.no_catch_up,
            force_unclean=once.force_unclean,
            accept_loss=once.accept_loss,
        )

    def _with_role(self, role: Role) -> Config:
        return msgspec.structs.replace(self._file, role=role)

    def _refuses(self, role: Role) -> str | None:
        try:
            check_config(self._with_role(role), Places("the registry"))
        except ConfigError as error:
            return str(error)
        return None
