"""What an administrator may have a node do over the network, as commands do on its machine.

    NodesChange     `nodes` in the node's own configuration file
    RoleChange      `role` there, in mode classic, and once.json for the options of a promotion
    MembersChange   a request in the leader's store, in mode dledger (dledger/driver/requests.py)

Who asks was checked before (server/api/access.py), by a right of the node's own file of identities.
Nothing here needs the node to agree with anybody: the file counts as if it had been edited on the
machine, so the rules of promotions protect the group from a file that was forgotten. A request is
only taken by the node that it names. It can be repeated after any failure: a file that says already
what is wanted stays, and a request with an id that was given before is not given again. Of two
administrators who have seen the same file, the second finds another version and changes nothing.
A change of the role must follow its look within GOOD_FOR_MS: on a machine that was suspended, a
request may wait in the kernel until another node is the master, and it would be of this moment for
RoleService. Options whose role cannot be written are removed, so that no other command uses them.
With a registry the role is not in the file, and whoever may write into ZooKeeper changes it there.
"""

import contextlib
import hashlib
import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import msgspec

from hastore.clock import Clock
from hastore.config.file import MAX_FILE_BYTES, parse_config, text_with_role
from hastore.config.model import Config, Mode, NodeAddress, Role
from hastore.config.node_list import ListChange
from hastore.errors import UNREADABLE, ConfigError, UsageError
from hastore.fs.filesystem import REAL, FileSystem
from hastore.fs.private_files import folder_locked, replace_file
from hastore.protocol import api
from hastore.server.role_source import GOOD_FOR_MS, OneShotFile

log = logging.getLogger(__name__)

LOCK_WAIT_S = 3.0  # for a command that has the folder of a file locked
REMEMBERED = 256  # ids of requests that were done


class Leading(NamedTuple):
    """What a node of mode dledger knows of its group."""

    leads: bool
    leader: int | None
    members: Collection[int] | None  # with the learners; None: it does not know yet


class File(NamedTuple):
    """The node's configuration file, as it is now."""

    path: str
    text: str
    config: Config
    version: str


class Administration:
    """Carry out requests of administrators for one node; used by one thread at a time."""

    def __init__(
        self,
        config: Config,
        path: str | None,
        *,
        fs: FileSystem,
        clock: Clock,
        parse: Callable[[str, str], Config] = parse_config,
        leading: Callable[[], Leading] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare, for the node that follows the file at `path`, if it does follow one.

        `parse(text, path)` reads the content of a file as the node would, and raises ConfigError.
        `leading` is given in mode dledger. `on_change` is called after each change of the file.
        """
        self._config = config
        self._path = path
        self._fs = fs
        self._clock = clock
        self._parse = parse
        self._leading = leading
        self._on_change = on_change
        self._given: deque[str] = deque(maxlen=REMEMBERED)
        # By id, when a change of the role was looked at, by both clocks: one may have been set, the
        # other stands still while a machine is suspended.
        self._looked: dict[str, tuple[float, float]] = {}

    def carry_out(self, request: api.Administer) -> api.Administered | api.Failed:
        """Do what is asked, durably.

        Raises UsageError if it must not be done, ConfigError if the file cannot be read or written;
        nothing was changed then.
        """
        own = self._config
        asked, here = (request.cluster, request.group, request.node), (own.cluster, own.group)
        if asked != (*here, own.node):
            raise UsageError(
                f"this is node {own.node} of {'/'.join(here)}, not node {asked[2]} of "
                f"{'/'.join(asked[:2])}; nothing was changed: correct the address"
            )
        if isinstance(request.change, api.MembersChange):
            return self._give(request, request.change)
        if isinstance(request.change, api.RoleChange):
            return self._change_role(request, request.change)
        return self._change_nodes(request, request.change)

    # -- the file

    def _change_nodes(
        self, request: api.Administer, asked: api.NodesChange
    ) -> api.Administered | api.Failed:
        change = _list_change(asked)
        self._refuse_member(change.gone)
        path = self._own_path()
        with folder_locked(path, LOCK_WAIT_S):
            file = self._read(path)
            refusal = change.refusal(file.config)
            if refusal is not None:
                raise UsageError(f"{file.path} {refusal}")
            wanted = change.wanted(file.config)
            if wanted == file.config:
                return _answer(request, file, changed=False)
            text = change.edited(file.text, file.path, file.config, self._parse)
            if request.version is None:
                return _answer(request, file, changed=True)
            if request.version != file.version:
                return _changed_meanwhile(request, file)
            file = _replaced(file, text, wanted)
        log.warning("an administrator has changed `nodes` in %s: %s", path, _listed(wanted))
        self._on_change()
        return _answer(request, file, changed=True)

    def _refuse_member(self, gone: int | None) -> None:
        """Raise UsageError if a node that is a member in mode dledger would lose its addresses."""
        if gone is None or self._leading is None:
            return
        members = self._leading().members
        if members is None:
            raise UsageError("this node does not know the members yet; try again in a moment")
        if gone in members:
            raise UsageError(
                f"node {gone} is a member, or becomes one: first `hastore dledger remove -c FILE "
                f"--node {gone} --remote`"
            )

    def _change_role(
        self, request: api.Administer, asked: api.RoleChange
    ) -> api.Administered | api.Failed:
        if self._config.mode is not Mode.CLASSIC:
            raise UsageError(
                "this node is of mode dledger, where the nodes elect their leader; see "
                "`hastore dledger transfer --help`"
            )
        if self._config.registry is not None:
            raise UsageError(
                f"this node's role is in the registry {self._config.registry}; change it there: "
                "`hastore promote -c FILE`, from wherever that can be reached"
            )
        role = _role(asked.role)
        command = "promote" if role.is_master else "demote"
        if asked.once is not None and asked.once.command != command:
            raise UsageError(f"options of {asked.once.command!r} do not go with the role {role}")
        path = self._own_path()
        with folder_locked(path, LOCK_WAIT_S):
            file = self._read(path)
            if request.version is None:
                self._note_look(asked.id)
                changes = file.config.role is not role or asked.once is not None
                return _answer(request, file, changed=changes)
            if asked.id in self._given or (file.config.role is role and asked.once is None):
                return _answer(request, file, changed=False)
            if request.version != file.version:
                return _changed_meanwhile(request, file)
            if not self._is_fresh(asked.id):
                return api.Failed(request.rid, api.FILE_CHANGED, _OLD)
            file = self._write_role(file, role, asked.once)
            self._given.append(asked.id)
        log.warning("an administrator has asked for the role %s in %s", role.value, path)
        self._on_change()
        return _answer(request, file, changed=True)

    def _note_look(self, request_id: str) -> None:
        self._looked.pop(request_id, None)
        while len(self._looked) >= REMEMBERED:
            del self._looked[next(iter(self._looked))]
        self._looked[request_id] = self._clock.monotonic_ms(), self._clock.wall_ms()

    def _is_fresh(self, request_id: str) -> bool:
        """Whether the change with this id was looked at a moment ago."""
        looked = self._looked.get(request_id)
        now = self._clock.monotonic_ms(), self._clock.wall_ms()
        return looked is not None and all(
            abs(one - then) <= GOOD_FOR_MS for one, then in zip(now, looked, strict=True)
        )

    def _write_role(self, file: File, role: Role, once: api.OnceOptions | None) -> File:
        """Write the role and its options, or neither; return the file as it is now."""
        text = text_with_role(file.text, file.path, role)
        try:
            wanted = self._parse(text, file.path)
        except ConfigError as wrong:
            raise UsageError(f"the changed file would not be valid: {wrong}") from wrong
        called_off = once is None and not role.is_master and self._once_command() == "promote"
        try:
            if once is not None:  # before the role: the node reads it with the role
                self._write_once(once, file.path)
            elif not called_off:  # those of an order during which this node was killed
                self._remove_once()
            if text != file.text:
                file = _replaced(file, text, wanted)
            if called_off:  # with the role, and without them, the node would begin it all the same
                self._remove_once()
            return file
        except ConfigError:
            # If the role is there, only not durably, the promotion needs its options.
            if once is not None and _says(file.path, file.text):
                self._remove_once()
            raise

    @property
    def _once_path(self) -> str:
        return os.path.join(self._config.store.root, "hastore", "once.json")

    def _write_once(self, once: api.OnceOptions, path: str) -> None:
        """Write once.json durably; RoleService reads and removes it. `path` is the node's file."""
        fields = msgspec.structs.asdict(once) | {"wall_ms": self._clock.wall_ms()}
        place = self._once_path
        # The file itself may be in that folder, which this thread has locked then.
        same = os.path.realpath(os.path.dirname(place)) == os.path.dirname(path)
        with contextlib.nullcontext() if same else folder_locked(place, LOCK_WAIT_S):
            try:
                self._fs.replace_bytes(place, msgspec.json.encode(fields))
            except OSError as failure:
                raise _not_written(place, failure) from failure

    def _once_command(self) -> str | None:
        """Return the command whose options wait for RoleService; None if none do."""
        try:
            found = msgspec.json.decode(self._fs.read_bytes(self._once_path), type=OneShotFile)
        except (OSError, *UNREADABLE):
            return None
        return found.command

    def _remove_once(self) -> None:
        place = self._once_path
        try:
            if self._fs.exists(place):
                with contextlib.suppress(FileNotFoundError):  # the node has used them now
                    self._fs.remove(place)
                self._fs.sync_dir(os.path.dirname(place))
        except OSError as failure:
            raise ConfigError(
                f"{place}: the options cannot be removed: {failure.strerror}; the next promotion "
                f"within {GOOD_FOR_MS // 1000} s would use them: remove the file, or wait so long"
            ) from failure

    def _own_path(self) -> str:
        if self._path is None:
            raise ConfigError("this node follows no configuration file")
        path = os.path.realpath(self._path)  # a link stays, and its file is replaced
        folder = os.path.dirname(path)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{path}: the node's user may not write into {folder}; give it that right "
                "(docs/operations.md), or give the command on the node's machine"
            )
        return path

    def _read(self, path: str) -> File:
        try:
            content = REAL.read_bytes(path, MAX_FILE_BYTES + 1)
        except OSError as failure:
            raise ConfigError(f"{path}: cannot be read: {failure.strerror}") from failure
        if len(content) > MAX_FILE_BYTES:  # what was not read would be lost
            raise UsageError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; it was not changed")
        try:
            text = content.decode()
        except UnicodeDecodeError as failure:
            raise UsageError(f"{path}: is not UTF-8, and the node does not follow it") from failure
        try:
            config = self._parse(text, path)
        except ConfigError as wrong:
            raise UsageError(f"the node does not follow its file as it is now: {wrong}") from wrong
        own = self._config
        if (config.cluster, config.group, config.node) != (own.cluster, own.group, own.node):
            raise UsageError(
                f"{path} is now the file of node {config.node} of {config.cluster}/{config.group}"
            )
        if config.mode is not own.mode:
            raise UsageError(
                f"{path} says mode {config.mode.value}, and the node does not follow it: it runs "
                f"in mode {own.mode.value}"
            )
        return File(path, text, config, _version(text))

    # -- requests to the leader

    def _give(
        self, request: api.Administer, asked: api.MembersChange
    ) -> api.Administered | api.Failed:
        if self._leading is None:
            raise UsageError(
                "this node is of mode classic, whose nodes are in its files; see "
                "`hastore node add --help`"
            )
        from hastore.dledger.driver import requests  # mode classic does not need it

        if asked.command not in requests.COMMANDS or (asked.command == "replace") != (
            asked.by is not None
        ):
            raise UsageError(f"{asked.command!r} is no request to the leader")
        if asked.id in self._given:
            return api.Administered(request.rid, False)
        now = self._leading()
        if not now.leads:
            leader = "no leader is known" if now.leader is None else f"node {now.leader} leads"
            return api.Failed(
                request.rid, "SERVICE_NOT_AVAILABLE", f"this node does not lead; {leader}"
            )
        root = self._config.store.root
        path = requests.request_path(root)
        with folder_locked(path, LOCK_WAIT_S):
            if self._fs.exists(path):
                return api.Failed(
                    request.rid, "BUSY", "another administrator's request waits; try again"
                )
            try:
                requests.write_request(
                    self._fs, root, asked.command, asked.node, term=asked.term,
                    members=tuple(asked.members), wall_ms=self._clock.wall_ms(), by=asked.by,
                    request_id=asked.id,
                )  # fmt: skip
            except OSError as failure:
                raise _not_written(path, failure) from failure
        self._given.append(asked.id)
        return api.Administered(request.rid, True)


def _replaced(file: File, text: str, config: Config) -> File:
    """Replace the file, atomically and durably; return it as it is now."""
    try:
        mode = stat.S_IMODE(os.stat(file.path).st_mode)
    except OSError as failure:
        raise _not_written(file.path, failure) from failure
    replace_file(file.path, text.encode(), mode)
    return File(file.path, text, config, _version(text))


def _says(path: str, text: str) -> bool:
    """Whether the file at `path` has this content."""
    try:
        return REAL.read_bytes(path, MAX_FILE_BYTES + 1) == text.encode()
    except OSError:
        return False


def _not_written(path: str, failure: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written: {failure.strerror}; check its disk")


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError as wrong:
        known = ", ".join(role.value for role in Role)
        raise UsageError(f"{name!r} is no role; the roles are {known}") from wrong


_OLD = (
    f"this change was not looked at in the last {GOOD_FOR_MS // 1000} s, so it may be an old one "
    "that was held up; nothing was changed: look again"
)


def _list_change(asked: api.NodesChange) -> ListChange:
    if asked.new is None and asked.gone is None or asked.new == asked.gone:
        raise UsageError("the change names no node, or one twice")
    if (asked.new is None) != (asked.address is None):
        raise UsageError("a new node needs its addresses")
    address = None if asked.address is None else NodeAddress(
        api=asked.address.api, ha=asked.address.ha, http=asked.address.http
    )  # fmt: skip
    return ListChange(asked.gone, asked.new, address)


def _answer(request: api.Administer, file: File, *, changed: bool) -> api.Administered:
    config = file.config
    nodes = {
        number: api.NodePlaces(one.api, one.ha, one.http) for number, one in config.nodes.items()
    }
    has_role = config.role is not None and config.registry is None
    role = config.assigned_role.value if has_role else None
    return api.Administered(request.rid, changed, file.path, file.version, nodes, role)


def _changed_meanwhile(request: api.Administer, file: File) -> api.Failed:
    reason = (
        f"{file.path} was changed since it was looked at, and lists node {_listed(file.config)} "
        "now; nothing was changed: look again"
    )
    return api.Failed(request.rid, api.FILE_CHANGED, reason)


def _listed(config: Config) -> str:
    return ", ".join(map(str, sorted(config.nodes)))


def _version(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
