"""The node that a configuration file describes: its status, where its role is, its file."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import click
import msgspec

from hastore.addresses import (
    KAZOO_MISSING,
    address_text,
    is_group_address,
    is_wildcard,
    parse_address,
)
from hastore.cli.common import DONE, FAILED, print_note
from hastore.client.connections.requester import Requester
from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.client.messages import replay_stop
from hastore.client.security import SecurityLike, as_security, with_tls
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import edit_role
from hastore.config.model import BindConfig, Config, NodeAddress, Role, Wire
from hastore.errors import (
    STORE_CLOSED,
    ClientError,
    HastoreError,
    NotAuthenticatedError,
    RegistryError,
    UsageError,
)
from hastore.fs.filesystem import REAL
from hastore.fs.private_files import folder_locked
from hastore.protocol import api

REPLAY_S = 5.0  # replay lags by milliseconds, unless it is stuck
_POLL_S = 0.01
_FIND_S = 5.0
ANSWER_S = 1.0  # a node that hangs must not delay the command for long
PATIENT_S = 10.0  # but a master that is late with its replay may be as late with its answers
_ASKED_AT_ONCE = 32
_SILENT_MS = 30_000.0  # so long a command does not ask a registry again that did not answer
_SILENT_UNTIL = "hastore.registry"  # its place in the command's context
_T = TypeVar("_T")
_Status = TypeVar("_Status", bound=Mapping[str, Any])


def has_closed_store(status: Mapping[str, Any]) -> bool:
    """Whether a node's store is closed: the node takes nothing until it is restarted."""
    return str(status.get("reason") or "").startswith(STORE_CLOSED)


def best_informed(statuses: Iterable[_Status]) -> _Status:
    """Return, of the statuses of a group that elects its leader, the one that knows its members.

    A node that was removed does not get the entry that says so: in the same term it still lists
    itself. So of one term the leader counts, and without one who has most of the log.
    """

    def knows(status: _Status) -> tuple[int, bool, int, int]:
        known = (status.get("committed_index", -1), status.get("ledger_end_index", -1))
        return status["term"], status.get("leader") == status.get("node"), *known

    return max(statuses, key=knows)


def wait_replayed(
    addresses: Sequence[str], security: SecurityLike = None, *, patient: bool = False
) -> str | None:
    """Wait until the master among `addresses` has replayed its log, up to its end at the call.

    A put is acknowledged before replay enters its message into queues and index. After this wait a
    command finds each message that was acknowledged before it. If there is no master, the command
    goes on with what the nodes have. Returns how far replay has come if it takes longer than
    `REPLAY_S`, or the master answers no more: then the command must not pass off the messages up
    to there as all of them. `patient`: a master that does not answer at once is waited for.
    """
    more = () if security is None else (security,)
    found = _find_master(_known(addresses), more, patient=patient)
    if found is None:
        return None
    address, status = found
    deadline, end = time.monotonic() + REPLAY_S, status["max_offset"]
    while status["dispatched_offset"] < end:
        if time.monotonic() >= deadline:
            return _unreplayed(status, end)
        time.sleep(_POLL_S)
        now = ask_status(address, PATIENT_S if patient else ANSWER_S, *more)
        if now is None:
            return f"{_unreplayed(status, end)}; it does not answer now"
        status = now
    return None


def _find_master(
    addresses: Sequence[str], more: tuple[SecurityLike, ...], *, patient: bool
) -> tuple[str, dict[str, Any]] | None:
    """Return the first node that takes puts, with its status; None if none answers."""
    silent = []
    for address in addresses:
        status = ask_status(address, ANSWER_S, *more)
        if status is None:
            silent.append(address)
        elif status["writable"]:
            return address, status
    for address in silent if patient else ():
        status = ask_status(address, PATIENT_S, *more)
        if status is not None and status["writable"]:
            return address, status
    return None


def _unreplayed(status: Mapping[str, Any], end: int) -> str:
    """Return that a node's replay has not come to `end`, and why."""
    why = replay_stop(status) or "it is late: try again"
    return (
        f"node {status['node']} has replayed its log only up to offset"
        f" {status['dispatched_offset']:,} of {end:,}, so what is stored after that is missing"
        f" here: {why}"
    )


def need_replayed(addresses: Sequence[str], security: SecurityLike = None) -> None:
    """Wait as `wait_replayed`, for a command that would do something wrong; raises HastoreError."""
    missing = wait_replayed(addresses, security, patient=True)
    if missing is not None:
        raise HastoreError(
            f"nothing was done: {missing}; run the command again once `hastore status` shows no"
            " such problem"
        )


def warn_unreplayed(missing: str | None) -> int:
    """Print what `wait_replayed` has returned; return the exit code of a command that shows all."""
    if missing is None:
        return DONE
    print_note(f"warning: {missing}")
    return FAILED


def of_each(numbers: Iterable[int], ask: Callable[[int], _T]) -> dict[int, _T]:
    """Return what `ask` returns for each node; all are asked at once, since any may be silent.

    Raises what the first of them, in the order of the numbers, has raised.
    """
    due = list(numbers)
    if not due:
        return {}
    with ThreadPoolExecutor(min(len(due), _ASKED_AT_ONCE)) as pool:
        return dict(zip(due, pool.map(ask, due), strict=True))


def ask_node(config: Config) -> dict[str, Any] | None:
    """Return the status of the node whose configuration this is; None without an answer."""
    return ask_own_status(config, config.node, ANSWER_S)


def as_node(config: Config, number: int) -> Config:
    """Return a configuration as that of another node of the group, for questions to it."""
    bind = config.bind if number == config.node else BindConfig()
    return msgspec.structs.replace(config, node=number, bind=bind)


def registered(config: Config, *, copy: bool = False) -> Config:
    """Return a configuration with the addresses that the nodes state in the registry, if it has one
    that answers: after a node has moved, only that node's own file needs to say where it is.

    The file's own node keeps those of the file, unless that is a `copy` on another machine.
    """
    context, now_ms = click.get_current_context(silent=True), SYSTEM_CLOCK.monotonic_ms()
    of_command: dict[str, Any] = {} if context is None else context.meta
    if config.registry is None or now_ms < of_command.get(_SILENT_UNTIL, 0.0):
        return config
    try:
        stated = RegistryPlace(config).addresses()
    except (HastoreError, OSError) as failure:  # it took seconds: it is not asked again at once
        of_command[_SILENT_UNTIL] = now_ms + _SILENT_MS
        print_note(f"warning: the addresses are those of the file: {failure}")
        return config
    nodes = {
        number: there if number != config.node or copy else address
        for number, address in config.nodes.items()
        for there in (stated.get(number, address),)
    }
    return msgspec.structs.replace(config, nodes=nodes)


def node_name(config: Config) -> str:
    """Return the node's number and address, for errors."""
    return f"node {config.node} ({config.nodes[config.node].api})"


def refuse_hanging(config: Config, status: dict[str, Any] | None, more: str = "") -> None:
    """Raise HastoreError if a leader could not take a request, as its disk hangs."""
    if status is not None and status.get("sync_hangs"):
        raise HastoreError(
            f"{node_name(config)}: its disk hangs, so it takes no request; it hands over by itself "
            f"if another member can lead: look at the disk, and at `hastore status`{more}"
        )


def _known(addresses: Sequence[str]) -> Sequence[str]:
    """Return the addresses of nodes; those that a group has in ZooKeeper, if that is given."""
    if not is_group_address(addresses[0]):
        return addresses
    requester = Requester(tuple(addresses), SYSTEM_CLOCK)
    try:
        requester.run_steps(requester.survey(_FIND_S))
    except ClientError:
        return ()  # the command itself says so
    finally:
        requester.close()
    return requester.cluster.addresses


def ask_own_status(config: Config, number: int, timeout_s: float) -> dict[str, Any] | None:
    """Return the status of a node of the configured group, as `ask_status` does.

    The own node is also asked where it binds, in case its machine cannot reach it where others do.
    TLS comes from the configuration, unless HASTORE_SECURITY or --security says otherwise; the
    identity comes from there. Raises NotAuthenticatedError if the node does not accept it.
    """
    found = ask_own(config, number, timeout_s)
    return None if isinstance(found, NoAnswer) else found


def ask_own(config: Config, number: int, timeout_s: float) -> dict[str, Any] | NoAnswer:
    """Return what `ask_own_status` does, or why there is no answer.

    That it is REFUSED means that no process listens at any address of the node.
    """
    security = security_of(config)
    found = ask_or_why(config.nodes[number].api, timeout_s, security)
    if isinstance(found, NoAnswer) and number == config.node and config.bind.api is not None:
        bound = _ask_bound(config, timeout_s, security)
        if not isinstance(bound, NoAnswer) or found.kind is Quiet.REFUSED:
            return bound
    return found


def security_of(config: Config) -> SecurityLike:
    """Return how a command of this machine speaks with the nodes of the configured group."""
    security = as_security(None)
    own = config.security
    if own.api is Wire.TLS and own.ca is not None:
        security = with_tls(security, own.ca, own.certificate, own.key)
    return security


def _ask_bound(
    config: Config, timeout_s: float, security: SecurityLike
) -> dict[str, Any] | NoAnswer:
    """Return the status of the own node, asked where it binds, unless another one answers there.

    Ports of several containers may be published on one machine, so that is possible.
    """
    try:
        found = ask_or_why(local_api(config), timeout_s, security)
    except NotAuthenticatedError as refused:  # its certificate may name only where others reach it
        return NoAnswer(Quiet.UNAUTHENTICATED, str(refused))
    if isinstance(found, NoAnswer):
        return found
    own = (config.node, config.cluster, config.group)
    if (found["node"], found.get("cluster"), found.get("group")) != own:
        return NoAnswer(Quiet.FAILED, f"node {found['node']} answers at {local_api(config)}")
    return found


def local_api(config: Config) -> str:
    """Return where the own machine reaches what the node binds as `api`."""
    endpoint = parse_address(config.bound("api").removeprefix("tcp://"))
    assert endpoint is not None, "the configuration was checked"
    host, port = endpoint
    if is_wildcard(host):
        host = "::1" if ":" in host else "127.0.0.1"
    return f"tcp://{address_text(host, port)}"


def ask_status(
    address: str, timeout_s: float, security: SecurityLike = None
) -> dict[str, Any] | None:
    """Return the node's object of `hastore status --json`; None when it does not answer in time.

    Raises NotAuthenticatedError if the node does not accept this command, or it not the node.
    """
    found = ask_or_why(address, timeout_s, security)
    return None if isinstance(found, NoAnswer) else found


def ask_or_why(
    address: str, timeout_s: float, security: SecurityLike = None
) -> dict[str, Any] | NoAnswer:
    """Return what `ask_status` does, or why there is no answer."""
    requester = Requester((address,), SYSTEM_CLOCK, security)
    try:
        reply, _ = requester.run_steps(requester.ask(address, api.AskStatus, timeout_s))
    except NotAuthenticatedError:
        raise
    except ClientError:
        late = NoAnswer(Quiet.TIMED_OUT, "it is connected and does not answer")
        return requester.transport.silence(address) or late
    finally:
        requester.close()
    if isinstance(reply, api.NodeStatus):
        return reply.status
    return NoAnswer(Quiet.FAILED, getattr(reply, "reason", "it does not answer the question"))


# -- where the operator finds and changes the role: the file, or the registry ----------------------

Flags = dict[str, Any]  # no_catch_up, force_unclean, accept_loss, needed_node


class RolePlace(Protocol):
    """A node's role as the operator has set it; `what` names the place in texts."""

    what: str

    def role(self) -> Role | None:
        """Return the present role; None if there is none."""

    def change(self, role: Role) -> None:
        """Set the role."""

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Set the role, and give the running node the flags of this command, which it uses once.

        `before` is the node's status.
        """


def role_place(path: str, config: Config) -> RolePlace:
    """Return the place for the node of the file at `path`. Raises UsageError without kazoo."""
    return FilePlace(path, config) if config.registry is None else RegistryPlace(config)


class FilePlace:
    """The file itself; flags go to once.json in the store."""

    what = "the file"

    def __init__(self, path: str, config: Config) -> None:
        self._path = path
        self._config = config

    def role(self) -> Role | None:
        """Return the role in the file."""
        return self._config.role

    @property
    def _once(self) -> str:
        return os.path.join(self._config.store.root, "hastore", "once.json")

    def change(self, role: Role) -> None:
        """Edit the file. Flags of a command that was killed before its edit are removed first.

        Those of a promotion that is called off go last: without them, and with the role, the node
        would begin it all the same.
        """
        called_off = not role.is_master and self._flags_of() == "promote"
        if not called_off:
            self._remove_once()
        edit_role(self._path, role)
        if called_off:
            self._remove_once()

    def _flags_of(self) -> str | None:
        """Return the command whose flags wait for the node; None if none do, or nobody knows."""
        try:
            return str(json.loads(REAL.read_bytes(self._once))["command"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _remove_once(self) -> None:
        if REAL.exists(self._once):
            with folder_locked(self._once), contextlib.suppress(FileNotFoundError):
                REAL.remove(self._once)
                REAL.sync_dir(os.path.dirname(self._once))

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Write once.json durably; the edit of the file then makes the node read it."""
        once = self._once
        folder = os.path.dirname(once)
        if not REAL.is_dir(folder):
            remedy = "run the command in the directory where the node was started"
            raise HastoreError(
                f"{folder} does not exist, so store.root is another folder here; {remedy}"
            )
        note = {
            "command": command,
            **flags,
            "epoch": before["epoch"],
            "wall_ms": SYSTEM_CLOCK.wall_ms(),
        }
        with folder_locked(once):  # against another such command
            REAL.replace_bytes(once, json.dumps(note).encode())
        before_edit = REAL.read_bytes(self._path)
        try:
            edit_role(self._path, role)
        except BaseException:  # also Ctrl-C, while another command has the file's folder locked
            # No other command may use them; but if the role is there, the promotion needs them.
            if REAL.read_bytes(self._path) == before_edit and REAL.exists(once):
                REAL.remove(once)
            raise


class RegistryPlace:
    """The node's object in ZooKeeper; each operation has a session of its own."""

    what = "the registry"

    def __init__(self, config: Config) -> None:
        try:
            from hastore.registry import editing
        except ImportError as missing:
            raise UsageError(KAZOO_MISSING) from missing
        self._editing = editing
        self._config = config

    def role(self) -> Role | None:
        """Return the role in the registry, None without a valid object."""
        with self._editing.open_editor(self._config) as editor:
            try:
                return editor.role()
            except RegistryError as wrong:
                print_note(f"warning: {wrong}")
                return None

    def read_role(self) -> Role | None:
        """Return the role in the registry, None without an object; raises RegistryError."""
        with self._editing.open_editor(self._config) as editor:
            return editor.role()

    def addresses(self) -> dict[int, NodeAddress]:
        """Return the addresses that the group's nodes state there; raises RegistryError."""
        with self._editing.open_editor(self._config) as editor:
            return editor.addresses()

    def change(self, role: Role) -> None:
        """Set the role there."""
        with self._editing.open_editor(self._config) as editor:
            editor.change(role, None)

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Set role and flags in one write."""
        once = self._editing.new_once(command, before["epoch"], **flags)
        with self._editing.open_editor(self._config) as editor:
            editor.change(role, once)


# -- the file that the running node follows --------------------------------------------------------


def file_mismatch(path: str, config: Config, status: Mapping[str, Any]) -> str | None:
    """Return how the running node differs from the file at `path`; None if it follows that file.

    If the path that the node names does not exist on this machine, the files are taken to be the
    same, because a node in a container has other paths.
    """
    known = status.get("config")
    runs = f"is node {status['node']} of {status.get('cluster')}/{status.get('group')}"
    own = f"node {config.node} of {config.cluster}/{config.group}"
    address = config.nodes[config.node].api
    if runs != f"is {own}":
        told = f" and runs with {known}" if known else ""
        return f"{address} {runs}{told}; {path} is the file of {own}"
    if not known or not os.path.exists(known) or os.path.samefile(known, path):
        return None
    return f"{own} ({address}) runs with {known}, not with {os.path.abspath(path)}"


def refuse_other_file(
    command: str, path: str, config: Config, status: Mapping[str, Any] | None
) -> None:
    """Raise UsageError, with both paths, when the running node does not follow the file."""
    problem = None if status is None else file_mismatch(path, config, status)
    if status is None or problem is None:
        return
    same_node = status["node"] == config.node and status.get("group") == config.group
    remedy = f"run `hastore {command} -c {status['config']}`" if same_node else "check -c FILE"
    raise UsageError(f"{problem}; nothing was changed: {remedy}")


def pending_changes(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the changes of a node's file that are not in force yet, by key."""
    return {change["key"]: change for change in status.get("config_pending") or []}


def awaiting_promotion(status: Mapping[str, Any]) -> list[str]:
    """Return the keys of a node's file that count from its next promotion."""
    changes = pending_changes(status).items()
    return [key for key, change in changes if change["counts_from"] == "promotion"]


def pending_texts(
    path: str | None, status: Mapping[str, Any], masters: Sequence[Mapping[str, Any]] = ()
) -> Iterator[str]:
    """Yield a line for each changed key not yet in force, with the event that applies it.

    A key that counts from the next promotion needs one of the master: to promote this node, a
    slave, would move the master. `masters` are the statuses of the nodes that take writes.
    """
    for key, change in pending_changes(status).items():
        until = "the next start"
        if change["counts_from"] == "promotion":
            until = f"the next promotion{_promotion(path, status, masters)}"
        now, later = (_as_text(change[name]) for name in ("in_force", "in_file"))
        yield f"{key}: {later} in its file, {now} in force until {until}"


def _promotion(
    path: str | None, status: Mapping[str, Any], masters: Sequence[Mapping[str, Any]]
) -> str:
    """Return which promotion puts keys in force: that of the present master, if there is one."""
    master = status.get("master")
    if status.get("role") != Role.SLAVE.value:
        return f", `hastore promote -c {path or 'FILE'}`"
    for one in masters:
        if one["node"] == master:
            return f" of the master, node {master}: `hastore promote -c {one.get('config')}`"
    return " of the master" if master is None else f" of the master, node {master}, by its file"


def _as_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
