"""Where a node's role and the options of one command come from: its files, or ZooKeeper.

    ConfigWatch      the configuration file, after each change of it
    OneShotFlags     <store>/hastore/once.json: options for one promotion or demotion, written by
                     `hastore promote` and `hastore demote`
    RegistryRoles    both from ZooKeeper, with the rest of the file, on a node with `registry`
    pending_changes  what the file says and is not in force yet, for the status. Pure

RoleService's thread reads them (GroupService's the file, in mode dledger). Options are valid for
60 s, and only in the epoch in which they were written. It is made durable that they are used before
they are used, so that no power loss brings them back; those that are not valid are removed too. The
condition of a flip is valid as long as the role that came with it is not followed yet.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hastore.addresses import KAZOO_MISSING
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.checks import Places, check_config
from hastore.config.file import config_error, parse_config
from hastore.config.model import Config, Mode, NodeAddress, Role
from hastore.errors import UNREADABLE, ConfigError, UsageError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.ha.promoter import Flags
from hastore.ha.rules.epochs import CLASSIC_EPOCH, History
from hastore.registry.remembered import RegistryMemory, read_credentials
from hastore.service import OnFailure

if TYPE_CHECKING:  # a node without a registry does not load it
    from hastore.registry.entry import Once

log = logging.getLogger(__name__)

GOOD_FOR_MS = 60_000
PROMOTION = "promotion"
RESTART = "restart"
RETRY_MS = 2_000.0  # a file that was not valid may be so later: what it names was mended
_FOLLOWED = ("role", "acks", "nodes")  # `role` is in force at once; the others are compared apart
_AT_ONCE = "store.retention."  # these keys too


class ConfigWatch:
    """The configuration file of a node; a file that does not validate is not followed.

    It is checked again each RETRY_MS: it may be right, and a file that it names be mended.
    """

    def __init__(
        self,
        path: str,
        overrides: Mapping[str, str],
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.path = path
        self._overrides = dict(overrides)
        self._fs = fs
        self._clock = clock
        self._seen = fs.read_bytes(path)
        self._unreadable = False
        self._retry_ms: float | None = None  # when `_seen`, which is not valid, is checked again
        self._said: str | None = None  # what the log says of `_seen`
        # When the file was refused first, as it is now, also if it is followed since; None: never.
        # A file that could not be read for longer than RETRY_MS counts as refused since then.
        self.refused_ms: float | None = None
        self._refused_before: float | None = None  # the same, before it could not be read
        self._mode: Mode | None = None  # that of the first configuration
        self.problem: str | None = None  # why the last change is not followed; the status shows it

    def first(self) -> Config:
        """Return the configuration read by the constructor. Raises ConfigError if it is invalid."""
        config = self._parse(self._seen)
        self._mode = config.mode
        return config

    def _changed(self) -> Config | None:
        """Return the new configuration, once after each change of the file; else None.

        Raises ConfigError if the new file cannot be read, once, or is invalid, at each check.
        """
        try:
            content = self._fs.read_bytes(self.path)
        except OSError as error:
            if not self._unreadable:
                self._unreadable, self._said = True, None
                self._refused_before = self.refused_ms
                if self._retry_ms is None or self.refused_ms is None:  # else it was refused before
                    self.refused_ms = self._clock.monotonic_ms()
                raise ConfigError(
                    f"{self.path}: {error.strerror}; the node keeps its configuration"
                ) from error
            return None
        now, away_ms = self._clock.monotonic_ms(), None
        if self._unreadable:
            away_ms = self.refused_ms
            self._unreadable, self._said, self.refused_ms = False, None, self._refused_before
            if self._retry_ms is None:
                self.problem = None
            else:  # it was not valid before
                self._retry_ms = now
        if content != self._seen:
            is_old = away_ms is not None and now - away_ms > RETRY_MS
            self._seen, self._said, self.refused_ms = content, None, away_ms if is_old else None
        elif self._retry_ms is None or now < self._retry_ms:
            return None
        self._retry_ms = now + RETRY_MS
        try:
            config = self._parse(content)
        except ConfigError:
            self.refused_ms = now if self.refused_ms is None else self.refused_ms
            raise
        self._retry_ms = None
        return config

    def parse(self, text: str, path: str) -> Config:
        """Return what a file with this content says to the node. Raises ConfigError."""
        return parse_config(text, path, self._overrides)

    def follow(self) -> Config | None:
        """Return the new configuration, once after each change; else None.

        If the new file is invalid or cannot be read, log the reason and keep it in `problem`.
        """
        try:
            config = self._changed()
        except ConfigError as error:
            self.problem = str(error)
            if self.problem != self._said:
                self._said = self.problem
                log.error("the changed configuration is not followed: %s", error)
            return None
        if config is not None:
            self.problem = None
        return config

    def _parse(self, content: bytes) -> Config:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise config_error(
                self.path, "", f"is not UTF-8: {error}", "save it as UTF-8"
            ) from error
        config = self.parse(text, self.path)
        if self._mode is not None and config.mode is not self._mode:
            raise config_error(
                self.path,
                "mode",
                f"this node runs in mode {self._mode.value}",
                "stop it, and give it another store.root before it starts in the other mode",
            )
        return config


class OneShotFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of once.json."""

    command: str  # "promote" | "demote"
    epoch: int
    wall_ms: int
    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False
    needed_node: int | None = None


class OneShotFlags:
    """The file once.json in one store."""

    def __init__(self, fs: FileSystem, root: str, clock: Clock) -> None:
        self._fs = fs
        self._path = f"{root}/hastore/once.json"
        self._clock = clock
        self._removing: OneShotFile | None = None  # its removal may not be durable yet

    def take_flags(
        self, command: str, epoch: int, keep: Callable[[Flags], None] = lambda _flags: None,
        *, new_role: bool = False,
    ) -> Flags | None:  # fmt: skip
        """If the file is valid and for `command`, remove it and return its flags; else return None.

        A valid file is at most 60 s old and was written in `epoch`; an invalid one is removed too.
        With a `new_role`, which is followed all the same, the condition of a flip stays: the disk
        may have been full, or the node down, since the command. `keep` gets the flags before the
        file is removed.
        Raises OSError if the file cannot be read, or not be removed durably; its flags are then
        not used, and a later call returns them, though the file itself may be gone.
        """
        try:
            found = self._find()
        except UNREADABLE as error:
            log.error("%s is removed: it is not a file of `hastore promote`: %s", self._path, error)
            self._remove(None)
            return None
        if found is None:
            return None
        if found.epoch != epoch or abs(self._clock.wall_ms() - found.wall_ms) > GOOD_FOR_MS:
            log.error(
                "%s is removed: it was written under epoch %d (now %d), or more than 60 s ago; "
                "give the command again",
                self._path,
                found.epoch,
                epoch,
            )
            flags = _of_late(found) if new_role and found.command == command else None
            if flags is not None:
                keep(flags)
            self._remove(None if flags is None else found)
            return flags
        if found.command != command:
            return None
        flags = Flags(
            no_catch_up=found.no_catch_up,
            force_unclean=found.force_unclean,
            accept_loss=found.accept_loss,
            needed_node=found.needed_node,
        )
        keep(flags)
        self._remove(found)
        return flags

    def meant_epoch(self) -> None:
        """Return None: a change of the file is of the moment in which RoleService reads it."""

    def _find(self) -> OneShotFile | None:
        """Return the file's content, or that of the one whose removal could not be synced."""
        if not self._fs.exists(self._path):
            return self._removing
        return msgspec.json.decode(self._fs.read_bytes(self._path), type=OneShotFile)

    def _remove(self, used: OneShotFile | None) -> None:
        """Remove the file durably, so that it is not used a second time after a power loss.

        `used` is kept until that is done: who asked for it waits for its effect.
        """
        self._removing = used
        if self._fs.exists(self._path):
            self._fs.remove(self._path)
        self._fs.sync_dir(self._path.rpartition("/")[0])
        self._removing = None


def _of_late(once: "OneShotFile | Once") -> Flags | None:
    """Return what counts of late options that came with a new role; None if nothing does."""
    if once.needed_node is None:
        return None
    log.warning("the answer of node %d is needed all the same", once.needed_node)
    return Flags(needed_node=once.needed_node, meant_epoch=once.epoch)


class RegistryRoles:
    """The node's file with the role that ZooKeeper has; used by RoleService's thread."""

    def __init__(
        self,
        config: Config,
        read_file: Callable[[], Config | None],
        memory: RegistryMemory,
        store_id: Callable[[], str],
        *,
        fs: FileSystem,
        clock: Clock,
        on_addresses: Callable[[Mapping[int, NodeAddress]], None],
        on_failure: OnFailure,
        greatest_epoch: Callable[[], int],
    ) -> None:
        """Make `registry`, which the caller starts and stops; NodeRegistry says what it calls.

        `make_notes` makes what reads the notes of the cluster's other groups.

        `greatest_epoch` returns the greatest epoch that this node knows.

        Raises UsageError if kazoo is not installed, OSError if the ACL file cannot be read,
        ConfigError for the files of TLS.
        """
        try:
            from hastore.registry.cluster_notes import ClusterNotes
            from hastore.registry.node_registry import NodeRegistry
            from hastore.registry.session import registry_contexts
        except ImportError as missing:
            raise UsageError(KAZOO_MISSING) from missing
        self._file = config
        self._read_file = read_file
        self._memory = memory
        self._clock = clock
        credentials = read_credentials(config, fs)
        tls = registry_contexts(
            config.registry_ca, config.registry_certificate, config.registry_key, watched=True
        )
        self.make_notes = partial(
            ClusterNotes, config, credentials, clock, tls=tls, on_failure=on_failure
        )
        self.registry = NodeRegistry(
            config, credentials, store_id, memory, clock, tls=tls,
            refuses=self._refuses, on_addresses=on_addresses, on_failure=on_failure,
        )  # fmt: skip
        # As it was read last: its role and its options belong together, and may be replaced soon.
        self._assigned = self.registry.wanted
        self._role = self._assigned.role
        self._greatest_epoch = greatest_epoch
        self._in_touch = False  # with ZooKeeper, as `read` has found it last
        self._epoch_then = 0  # the greatest that this node knew when it was in touch, or started
        self._meant_epoch: int | None = None
        self._turn: str | None = None  # the id of the options that came with the last new role

    def first(self) -> Config:
        """Return the configuration with which the node starts."""
        self._in_touch, self._epoch_then = self.registry.in_touch, self._greatest_epoch()
        self._assigned = self.registry.wanted
        self._role = self._assigned.role
        return self._with_role(self._role)

    def meant_epoch(self) -> int | None:
        """Return the greatest epoch that the last change of the role, or the last options, can have
        meant.

        None if they are of this moment. If they were read first after a time without ZooKeeper,
        they may be as old as that time, and were not meant for a master that came later.
        """
        return self._meant_epoch

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
            self.registry.learn_config(changed)
        in_touch = self.registry.in_touch  # before the role: an old role is none of this moment
        before, self._assigned = self._assigned.once, self.registry.wanted
        role, once = self._assigned
        if role is not self._role:
            self._turn = None if once is None else once.id
        if role is not self._role or (once is not None and once != before):
            self._meant_epoch = None if self._in_touch else self._epoch_then
        self._in_touch = in_touch
        if in_touch:
            self._epoch_then = self._greatest_epoch()
        if changed is None and role is self._role:
            return None
        self._role = role
        return self._with_role(role)

    def take_flags(
        self, command: str, epoch: int, keep: Callable[[Flags], None] = lambda _flags: None,
        *, new_role: bool = False,
    ) -> Flags | None:  # fmt: skip
        """Return the options for `command` that came with the role, if any, and never again.

        They are valid for 60 s, in the epoch in which they were written. Of later ones, which came
        with a new role, the condition of a flip stays: the role is followed all the same, and the
        clocks of this machine and of the operator's may only differ. So it is with a `new_role`,
        also if it came while the node was down. Raises OSError if it cannot be made durable that
        they are used; they are then not used. `keep` gets them before.
        """
        once = self._assigned.once
        if once is None or once.id == self._memory.data.once:
            return None
        if new_role:
            self._turn = once.id
        age_ms = self._clock.wall_ms() - once.wall_ms
        late = abs(age_ms) > GOOD_FOR_MS
        if not late and once.epoch == epoch and once.command != command:
            return None
        flags = self._counting(once, command, late=late or once.epoch != epoch)
        if flags is not None:
            keep(flags)
        self._memory.save(once=once.id)
        self.registry.note_unused(once.command, None)
        self.registry.wake()  # it removes them from ZooKeeper
        if late or once.epoch != epoch:
            log.error(
                "the options of a command in the registry (%s) are not used: they were written "
                "under epoch %d (now %d), or more than 60 s ago by this machine's clock; give the "
                "command again",
                once.command,
                once.epoch,
                epoch,
            )
            has_options = once.no_catch_up or once.force_unclean or once.accept_loss
            if once.epoch == epoch and (once.id != self._turn or has_options):
                self.registry.note_unused(once.command, age_ms)
        return flags

    def _counting(self, once: "Once", command: str, *, late: bool) -> Flags | None:
        """Return what counts of options, None if nothing does."""
        if late:
            is_new = once.id == self._turn and once.command == command
            return _of_late(once) if is_new else None
        return Flags(
            no_catch_up=once.no_catch_up,
            force_unclean=once.force_unclean,
            accept_loss=once.accept_loss,
            needed_node=once.needed_node,
        )

    def _with_role(self, role: Role) -> Config:
        return msgspec.structs.replace(self._file, role=role)

    def _refuses(self, role: Role) -> str | None:
        try:
            check_config(self._with_role(role), Places("the registry"))
        except ConfigError as error:
            return str(error)
        return None


def pending_changes(started: Config, latest: Config, history: History) -> list[dict[str, Any]]:
    """Return the keys whose value in the file is not in force, each with `key`, `in_force`,
    `in_file` and `counts_from` ("promotion" or "restart").

    `started` is the configuration that the node started with; `latest` is the latest valid file.
    The `acks` and nodes in force are those of the last entry of the epoch `history`, also after a
    restart. For a node that has left the group no promotion is due. Addresses of other nodes are in
    force at once, the node's own after a restart.
    """
    found = []
    left = has_left(started.node, history)
    if history and history[-1].epoch != CLASSIC_EPOCH and not left:
        entry, nodes = history[-1], sorted(latest.nodes)
        if latest.effective_acks != entry.acks:
            found.append(_change("acks", entry.acks, latest.effective_acks, PROMOTION))
        if nodes != sorted(entry.nodes):
            found.append(_change("nodes", sorted(entry.nodes), nodes, PROMOTION))
    before, after = _keys(started), _keys(latest)
    for key in before.keys() | after.keys():
        if before.get(key) != after.get(key):
            found.append(_change(key, before.get(key), after.get(key), RESTART))
    own = started.node
    if own in latest.nodes:
        old, new = _keys(started.nodes[own]), _keys(latest.nodes[own])
        for name, value in old.items():
            if value != new[name]:
                found.append(_change(f"nodes.{own}.{name}", value, new[name], RESTART))
    return sorted(found, key=lambda change: (change["counts_from"], change["key"]))


def has_left(node: int, history: History) -> bool:
    """Whether the list of the last epoch is without this node, and that of an earlier one is not.

    A new node has no such list before it is in force.
    """
    return bool(history) and node not in history[-1].nodes and any(
        node in entry.nodes for entry in history
    )  # fmt: skip


def _change(key: str, in_force: object, in_file: object, counts_from: str) -> dict[str, Any]:
    return {"key": key, "in_force": in_force, "in_file": in_file, "counts_from": counts_from}


def _keys(section: msgspec.Struct) -> dict[str, object]:
    """Return a section's dotted keys, with their values as the file writes them."""
    flat: dict[str, object] = {}
    _flatten("", msgspec.to_builtins(section), flat)
    return flat


def _flatten(prefix: str, values: Mapping[str, Any] | Sequence[Any], flat: dict[str, Any]) -> None:
    assert isinstance(values, Mapping)
    for name, value in values.items():
        key = f"{prefix}{name}"
        if (not prefix and name in _FOLLOWED) or key.startswith(_AT_ONCE):
            continue
        if isinstance(value, Mapping):
            _flatten(f"{key}.", value, flat)
            continue
        if key.endswith("_ms"):
            key, value = key.removesuffix("_ms"), None if value is None else f"{value}ms"
        flat[key] = value
