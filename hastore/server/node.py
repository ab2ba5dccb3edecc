"""A node: composes store, replication, client API and HTTP, and starts and stops them.

`run_node` runs one node as a process: it follows the configuration file, handles signals, prints
the ready line, and raises an exception if the node fails.
"""

import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Mapping

from hastore.bounded_log import LineFormatter
from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.file import config_error, parse_config
from hastore.config.model import Config, Mode
from hastore.errors import (
    ConfigError,
    NodeFailedError,
    StoreBrokenError,
    StoreError,
    UsageError,
)
from hastore.fs.filesystem import REAL, FileSystem
from hastore.ha.master.group_transfer import GroupTransferService
from hastore.ha.master.ha_service import HAService
from hastore.ha.node.member import Member
from hastore.ha.node.node_state import NodeState
from hastore.ha.replica.rewind import finish_cut
from hastore.ha.rules.epochs import CLASSIC_EPOCH
from hastore.registry.node_registry import RegistryMemory
from hastore.server.api.server import ApiServer
from hastore.server.base_node import BaseNode, read_secret, refuse_other_log, store_host
from hastore.server.kept_positions import KeptPositions
from hastore.server.node_backend import NodeBackend
from hastore.server.registry_roles import RegistryRoles, make_registry
from hastore.server.retention_service import RetentionService
from hastore.server.role_files import OneShotFlags
from hastore.server.role_service import OneShot, RoleService
from hastore.store.message_store import MessageStore

log = logging.getLogger(__name__)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
READY_WAIT_S = 60.0
REGISTRY_WAIT_S = 2.0  # for its first answer, and for its end


class Node(BaseNode):
    """One node of mode classic. `start` and `stop` are called once each, from the same thread."""

    backend: NodeBackend

    def __init__(
        self,
        config: Config,
        read_config: Callable[[], Config | None],
        *,
        fs: FileSystem = REAL,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(config, fs, clock)
        root = config.store.root
        own = config.nodes[config.node]
        self.store = MessageStore(
            config.store,
            fs=fs,
            clock=clock,
            store_host=store_host(own.api),
            on_failure=self._on_failure,
        )
        self.state = NodeState(fs, root)
        self.member = Member(
            config,
            self.store,
            self.state,
            clock,
            read_secret(config, fs),
            tls=self.tls.ha,
            on_failure=self._on_failure,
        )
        self.transfer = GroupTransferService(
            clock,
            self.store.flush_service.request,
            on_failure=self._on_failure,
            always_flush=self.member.counts_flushed,
        )
        self.member.on_refused = self._ha_refused
        self.ha = HAService(self.member, self.transfer)
        self.roles = self._make_roles(read_config)
        self.backend = NodeBackend(
            self.member, self.store, self.ha, self.transfer, self.roles, self.registry
        )
        self.api = ApiServer(
            own.api,
            self.backend,
            config.api,
            clock=clock,
            on_failure=self._on_failure,
            tls=self.tls.api,
            access=self._access(),
        )
        self._kept = KeptPositions(fs, root, lambda: self.state.data.aside, clock)
        self.retention = RetentionService(
            self.member,
            self.store,
            self.ha,
            self._kept,
            self.backend.put_encoded,
            clock,
            on_failure=self._on_failure,
        )
        self.backend.watch_retention(self.retention, self._kept)

    def _make_roles(self, read_config: Callable[[], Config | None]) -> RoleService:
        """Return the service of the role, which the file or ZooKeeper names; set `registry`."""
        config, fs, clock, root = self.config, self._fs, self._clock, self.config.store.root
        one_shot: OneShot = OneShotFlags(fs, root, clock)
        self._memory = memory = RegistryMemory(fs, root)
        self.registry = make_registry(
            config, fs, lambda: self.state.data.store_id, memory, clock, self._on_failure
        )
        self._registry_roles: RegistryRoles | None = None
        if self.registry is not None:
            from_registry = RegistryRoles(config, read_config, self.registry, memory, clock)
            self._registry_roles = one_shot = from_registry
            read_config = from_registry.read
        roles = RoleService(self.member, self.ha, one_shot, read_config)
        roles.on_change = self._role_changed
        if self.registry is not None:
            self.registry.on_change = roles.wake
            self.registry.on_addresses = self.member.relocate
        return roles

    def _role_changed(self, action: str, outcome: str, reason: str) -> None:
        if outcome == "asked":
            reason += ", by the node's file" if self.registry is None else ", by ZooKeeper"
        self.audit.note(action, outcome=outcome, reason=reason)

    @property
    def settled(self) -> threading.Event:
        """Set once the node serves, or has logged what it waits for."""
        return self.roles.settled

    @property
    def reason(self) -> str | None:
        """Why the node does not serve yet."""
        return self.roles.reason

    def wake(self) -> None:
        """Read the configuration again now, after SIGHUP."""
        self.roles.wake()
        if self.registry is not None:
            self.registry.wake()

    @property
    def role_text(self) -> str:
        """The fields of the ready line that depend on the mode."""
        return f"role={self.roles.role} epoch={self.state.last_epoch}"

    def start(self) -> None:
        """Recover the store, bind the ports, start the threads. If this fails, no thread runs.

        Raises StoreInUseError, StoreBrokenError or StoreError if the store cannot be opened,
        ConfigError if a port cannot be bound.
        """
        self._open_store()
        try:
            self._open_state()
            self._bind(self.ha.bind)
        except BaseException:
            self.store.close()
            raise
        hooks = self.store.hooks
        hooks.on_append, hooks.on_flushed = self.ha.on_append, self.ha.on_flushed
        self.transfer.start()
        self.ha.acceptor.start()
        if self._http is not None:
            self._http.start()
        self.retention.start()
        self._start_registry()
        self.roles.start()

    def _start_registry(self) -> None:
        """Follow the registry, if there is one; begin in the role that it has, if it answers."""
        if self.registry is None or self._registry_roles is None:
            return
        self.registry.start()
        if not self.registry.settled.wait(REGISTRY_WAIT_S):
            log.warning("the registry has not answered yet; the node starts in its last role")
        self.roles.begin_with(self._registry_roles.first())

    def _open_store(self) -> None:
        config, state = self.config, self.state
        try:
            self.store.lock()  # before node.json is read: another process may write it
            try:
                refuse_other_log(self._fs, config)
                state.load(config.node, config.cluster, config.group)
                intent = state.data.intent
                if self.registry is not None:
                    self.registry.load()
                else:
                    self._memory.forget()
                self.store.open(
                    intent_offset=None if intent is None else intent.offset,
                    from_rocketmq=state.last_epoch == CLASSIC_EPOCH,
                )
            except BaseException:
                self.store.unlock()
                raise
        except OSError as error:
            raise StoreError(
                f"{config.store.root}: the store cannot be opened: {error}; `store.root` must be a "
                "directory that this user may read and write"
            ) from error

    def _open_state(self) -> None:
        """Finish a rewind that a crash interrupted, and mark the store unclean if a power loss may
        have taken bytes. This happens before any HELLO.
        """
        config, state, store = self.config, self.state, self.store
        if not self._fs.exists(f"{config.store.root}/hastore/node.json") and store.max_offset > 0:
            log.warning(
                "this store has a log but no node state: its bytes count as written by an unknown "
                "master until they have been compared with a master's log"
            )
        self._kept.load()
        finish_cut(store, state)
        alone = len(config.nodes) == 1
        state.begin_boot(config.ha.ack_point.value, alone=alone, log_end=store.max_offset)
        # Readers get the log up to the confirmed offset; if the log is a RocketMQ master's, up to
        # the whole offset. A link, or the opening of an epoch, sets a new limit later.
        classic = config.ha.classic_master is not None and state.last_epoch == CLASSIC_EPOCH
        limit = store.whole_offset if classic else min(store.confirmed_offset, store.max_offset)
        store.set_limits(readable=limit)

    def stop(self) -> None:
        """Stop cleanly: refuse puts, answer waiting puts, close links, sync and close the store.

        Each step runs even if an earlier one fails; the first failure is raised.
        """
        self.backend.begin_stop()
        failure = self._run_steps(
            (
                self._stop_registry,
                self.roles.stop,
                self.retention.stop,
                self.member.step_down,
                lambda: self.ha.close_epoch("the node stops"),
                self.transfer.stop,
                self.api.stop,
                self.ha.stop,
                self._stop_http,
                self._stop_security,
            )
        )
        failed = failure is not None or self.store.broken_reason is not None
        try:
            self.store.close(unlock=False)
            if not failed:
                self.state.end_cleanly()
        finally:
            self.store.unlock()  # after node.json is written: the next start reads it
        if failure is not None:
            raise failure

    def _stop_registry(self) -> None:
        if self.registry is not None:
            self.registry.stop(REGISTRY_WAIT_S)


class ConfigWatch:
    """Notice changes of the configuration file; a file that does not validate is not followed."""

    def __init__(self, path: str, overrides: Mapping[str, str], fs: FileSystem = REAL) -> None:
        self._path = path
        self._overrides = dict(overrides)
        self._fs = fs
        self._seen = fs.read_bytes(path)
        self._unreadable = False
        self._mode: Mode | None = None  # that of the first configuration
        self.problem: str | None = None  # why the last change is not followed; the status shows it

    def first(self) -> Config:
        """Return the configuration read by the constructor. Raises ConfigError if it is invalid."""
        config = self._parse(self._seen)
        self._mode = config.mode
        return config

    def changed(self) -> Config | None:
        """Return the new configuration, once after each change of the file; else None.

        Raises ConfigError if the new file is invalid or cannot be read, also once for each change.
        """
        try:
            content = self._fs.read_bytes(self._path)
        except OSError as error:
            if not self._unreadable:
                self._unreadable = True
                raise ConfigError(
                    f"{self._path}: {error.strerror}; the node keeps its configuration"
                ) from error
            return None
        if self._unreadable:
            self._unreadable, self.problem = False, None
        if content == self._seen:
            return None
        self._seen = content
        return self._parse(content)

    def follow(self) -> Config | None:
        """Return the new configuration, once after each change; else None.

        If the new file is invalid or cannot be read, log the reason and keep it in `problem`.
        """
        try:
            config = self.changed()
        except ConfigError as error:
            log.error("the changed configuration is not followed: %s", error)
            self.problem = str(error)
            return None
        if config is not None:
            self.problem = None
        return config

    def _parse(self, content: bytes) -> Config:
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise config_error(
                self._path, "", f"is not UTF-8: {error}", "save it as UTF-8"
            ) from error
        config = parse_config(text, self._path, self._overrides)
        if self._mode is not None and config.mode is not self._mode:
            raise config_error(
                self._path,
                "mode",
                f"this node runs in mode {self._mode.value}",
                "stop it, and give it another store.root before it starts in the other mode",
            )
        return config


def run_node(path: str, overrides: Mapping[str, str], kind: str | None) -> int:
    """Run a node in the foreground until SIGTERM or SIGINT; return its exit code.

    `kind` is the kind of node that the command asks for. It is only logged: the command has
    checked it against the role in the file. Raises UsageError if HASTORE_LOG is not a log level,
    the errors of `Node.start`, NodeFailedError if a thread of the node failed, and StoreBrokenError
    if the store closed because of a failure.
    """
    level = os.environ.get("HASTORE_LOG", "INFO").upper()
    if level not in LOG_LEVELS:
        known = ", ".join(LOG_LEVELS)
        raise UsageError(f"HASTORE_LOG={level} is not a log level; use one of {known}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    log.debug("starting as %s", kind or "the role in the file")
    watch = ConfigWatch(path, overrides)
    node = _make(watch)
    node.backend.config_path = os.path.abspath(path)
    node.backend.config_problem = lambda: watch.problem
    ending = threading.Event()
    hurry = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGINT, lambda *_: ending.set())
    signal.signal(signal.SIGHUP, lambda *_: hurry.set())
    _raise_descriptor_limit()
    sys.setswitchinterval(0.0005)
    node.start()
    try:
        _announce(node, ending)
        while not ending.wait(0.1) and not node.failed.is_set():
            if hurry.is_set():
                hurry.clear()
                node.wake()
    finally:
        _end(node)
    return 0


def _make(watch: ConfigWatch) -> BaseNode:
    """Return the node that the file describes; the first file's mode stays."""
    config = watch.first()
    if config.mode is Mode.CLASSIC:
        return Node(config, watch.follow)
    from hastore.server.dledger_node import DLedgerNode  # a node of mode classic does not need it

    return DLedgerNode(config, watch.follow)


def _end(node: BaseNode) -> None:
    """Stop a node. Raise the failure that ended the node, if any; the command prints it last."""
    try:
        node.stop()
    except Exception:
        if node.backend.failure is None:
            raise
        log.exception("the stop failed too")  # the thread's failure is raised below
    if node.backend.store.broken_reason is not None:
        raise StoreBrokenError(str(node.backend.store.broken_reason))
    if node.backend.failure is not None:
        raise NodeFailedError(
            f"node {node.config.node} has ended itself: {node.backend.failure}; the traceback "
            "is further up on stderr. Start the node again, or let a supervisor do so; if the "
            "failure comes back, report it"
        )


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, so that many clients fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(node: BaseNode, ending: threading.Event) -> None:
    """Print the ready line once the node serves, or has logged what it waits for.

    If neither happens within READY_WAIT_S, log a warning and print the line all the same.
    """
    waited = 0.0
    while not node.settled.wait(0.05):
        waited += 0.05
        if ending.is_set() or node.failed.is_set():
            return
        if waited > READY_WAIT_S:
            log.warning("the node does not serve yet: %s", node.reason)
            break
    print(node.ready_line(), flush=True)
