"""What commands have nodes do over the network: each is asked at its `api` address, by an admin.

A change of files has two steps. The look asks every node what the change would do to its file, and
changes nothing; so what one node refuses is known before the first file is written. The change
names the version of the file that the look has seen, so that of two administrators one changes
nothing. A node that cannot be asked is Missed, with the reason: its file is changed by hand.

`RemotePlace` is the role of a node that the node itself changes: promote, demote and flip with
`--remote`. `ask_leader` is for `hastore dledger` with it: find the leader, have it write the
request. Whatever is interrupted or lost on the way, the command may be given again: what is as
wanted, or under way, is not asked for a second time. The request names the term and the members
that were seen, so that of two administrators one is refused.
"""

import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from hastore.addresses import parse_address
from hastore.bounded_log import one_line
from hastore.cli.common import print_note
from hastore.cli.own_node import (
    Flags,
    RegistryPlace,
    RolePlace,
    as_node,
    ask_node,
    node_name,
    refuse_hanging,
    security_of,
)
from hastore.client.connections.requester import Requester, RequestNotKnown
from hastore.client.connections.transport import NoAnswer
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import config_error, load_names
from hastore.config.model import Config, Mode, NodeAddress, Role
from hastore.config.node_list import ListChange
from hastore.errors import ClientError, HastoreError, UsageError
from hastore.protocol import api

TIMEOUT_S = 60.0
STATUS_S = 3.0  # for the statuses of all nodes
LOOK_S = 5.0  # for the answer of a node: it may wait for a command that has its file locked
CHANGE_S = 10.0  # the same, and for its disk
MAX_NUMBER = 65_535
MAX_NODES = 200  # that a group's nodes may name
Status = dict[str, Any]
Change = api.NodesChange | api.MembersChange | api.RoleChange
_REASON = 600  # characters of a node's text
_TOO_OLD = "its hastore is too old to be changed over the network; upgrade it"


class FileChanged(HastoreError):
    """A node's file is another one than the look has seen."""


@dataclass(frozen=True, slots=True)
class Missed:
    """A node that did not do what it was asked for, or did not say so."""

    reason: str
    perhaps_done: bool = False  # the answer is missing


def order(
    config: Config, number: int, change: Change, version: str | None,
    timeout_s: float,
) -> api.Administered | Missed:  # fmt: skip
    """Have a node of the configured group do something, or say what would be done.

    Raises UsageError if the node says that it must not be done, FileChanged if its file is another
    one than that of `version`.
    """
    address = config.nodes[number].api
    requester = Requester((address,), SYSTEM_CLOCK, security_of(config))

    def make(rid: int) -> api.Administer:
        return api.Administer(rid, config.cluster, config.group, number, change, version)

    deadline_ms = requester.deadline(timeout_s)
    is_change = version is not None or isinstance(change, api.MembersChange)
    may_be_done = False
    try:
        # A node that is down is not waited for; and who was not reached has changed nothing. Not
        # AskMap: this client would then look for all nodes that the answer names.
        there = requester.run_steps(requester.ask_each(api.AskStatus, timeout_s))[address]
        if isinstance(there, NoAnswer):
            return Missed(_text(f"no answer: {there.text}"))
        left_s = requester.left_s(deadline_ms)
        may_be_done = is_change
        reply, _ = requester.run_steps(requester.ask(address, make, left_s, may_be_unknown=True))
    except RequestNotKnown:
        if version is not None:  # it has answered the look, so it knows the request
            return Missed("it ended the connection after the change", perhaps_done=True)
        return Missed(_TOO_OLD, perhaps_done=may_be_done)
    except ClientError as failure:  # also NotAuthenticatedError: the identity may be revoked since
        return Missed(_text(str(failure)), perhaps_done=may_be_done)
    finally:
        requester.close()
    if isinstance(reply, api.Administered):
        return reply
    if not isinstance(reply, api.Failed):
        return Missed(f"it has answered {type(reply).__name__}")
    reason = _text(reply.reason)
    if reply.status == api.FILE_CHANGED:
        raise FileChanged(f"node {number}: {reason}")
    if reply.status == UsageError.__name__:
        raise UsageError(f"node {number}: {reason}")
    # It was allowed to look. If the right ended with the change, this is the answer to a repeat.
    return Missed(reason, perhaps_done=version is not None and reply.status == "FORBIDDEN")


def ask_statuses(config: Config) -> tuple[dict[int, Status], dict[int, str]]:
    """Ask all nodes of the configured group at once; return their statuses, and why others lack.

    What answers as another node than the one that is configured there is among the latter.
    """
    numbers = {node.api: number for number, node in config.nodes.items()}
    requester = Requester(tuple(numbers), SYSTEM_CLOCK, security_of(config))
    try:
        found = requester.run_steps(requester.ask_each(api.AskStatus, STATUS_S))
    finally:
        requester.close()
    statuses: dict[int, Status] = {}
    silent: dict[int, str] = {}
    for address, number in sorted(numbers.items(), key=lambda pair: pair[1]):
        reply = found[address]
        if isinstance(reply, NoAnswer):
            silent[number] = _text(f"no answer: {reply.text}")
        elif isinstance(reply, api.Failed):
            silent[number] = _text(reply.reason)
        elif not isinstance(reply, api.NodeStatus):
            silent[number] = f"it has answered {type(reply).__name__}"
        else:
            status, wanted = reply.status, (number, config.cluster, config.group)
            if tuple(map(status.get, ("node", "cluster", "group"))) == wanted:
                statuses[number] = status
            else:
                silent[number] = f"another node answers at {address}: correct `nodes`"
    return statuses, silent


def members_of(status: Mapping[str, Any]) -> set[int]:
    """Return the members and learners of mode dledger that a status names."""
    return numbers_in(status.get("members")) | learners_of(status)


def learners_of(status: Mapping[str, Any]) -> set[int]:
    """Return the learners that a status names."""
    found = status.get("learners")
    ones = found if isinstance(found, list) else []
    return numbers_in([one.get("node") for one in ones if isinstance(one, dict)])


def numbers_in(found: object) -> set[int]:
    """Return the numbers in a list of a status; none if it is no list."""
    return {one for one in found if isinstance(one, int)} if isinstance(found, list) else set()


def listed_whys(missed: Mapping[int, str]) -> str:
    """Return the reasons of nodes as one text."""
    return "; ".join(f"node {number}: {reason}" for number, reason in missed.items())


class RemoteNodes:
    """The nodes of a group whose files are changed over the network, within one time limit."""

    def __init__(self, config: Config, timeout_s: float) -> None:
        """Prepare; `config` is that of a file of the group, and how this command proves itself."""
        self.config = config
        self.looked: dict[int, api.Administered] = {}  # what the nodes have said
        self.missed: dict[int, Missed] = {}
        self._end_s = time.monotonic() + timeout_s
        self._asked: api.NodesChange | None = None
        self._told_by: dict[int, int] = {}  # nodes that are not in the file here: who lists them

    def look(self, change: ListChange, skip: Collection[int]) -> None:
        """Ask all nodes but those of `skip` what the change would do; raises UsageError.

        The nodes that they list are asked too: a file here may know less than another one. A new
        node may have a file already; if it does not answer it is not missed.
        """
        self._asked = asked = _request(change)
        skipped = {*skip, change.gone}
        if change.new is not None and change.address is not None:
            self._learn(change.new, change.address)
        done: set[int] = set()
        while left := sorted(set(self.config.nodes) - skipped - done):
            number = left[0]
            done.add(number)
            try:
                found = self._order(number, asked, None, LOOK_S)
            except UsageError as refused:
                by = self._told_by.get(number)
                where = "" if by is None else (
                    f": node {by} lists it at {self.config.nodes[number].api}; if it left the "
                    f"group, complete that: `hastore node remove FILE --node {number} --remote`, "
                    "or `replace`, as it was given then"
                )  # fmt: skip
                raise UsageError(
                    f"{refused}{where}; no file was changed: correct it first"
                ) from refused
            if isinstance(found, Missed):
                if number != change.new:
                    self.missed[number] = found
                continue
            self.looked[number] = found
            for other, one in found.nodes.items():
                address = NodeAddress(api=one.api, ha=one.ha, http=one.http)
                if self._learn(other, address):
                    self._told_by[other] = number

    def change(self, number: int) -> api.Administered | Missed:
        """Have a node make the change that it was asked about; raises FileChanged, UsageError."""
        assert self._asked is not None
        found = self._order(number, self._asked, self.looked[number].version, CHANGE_S)
        if isinstance(found, Missed):
            self.missed[number] = found
        return found

    def _order(
        self, number: int, asked: api.NodesChange, version: str | None, most_s: float
    ) -> api.Administered | Missed:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0.0:
            return Missed("it was not asked: the command's time was over")
        return order(self.config, number, asked, version, min(left_s, most_s))

    def _learn(self, number: int, address: NodeAddress) -> bool:
        """Ask another node too, unless what names it is garbage; return whether it is new."""
        nodes, api_address = self.config.nodes, address.api
        is_one = api_address.startswith("tcp://") and 1 <= number <= MAX_NUMBER
        is_one = is_one and parse_address(api_address.removeprefix("tcp://")) is not None
        if is_one and number not in nodes and len(nodes) < MAX_NODES:
            nodes = {**nodes, number: address}
            self.config = msgspec.structs.replace(self.config, nodes=nodes)
            return True
        return False


def _request(change: ListChange) -> api.NodesChange:
    one = change.address
    places = None if one is None else api.NodePlaces(one.api, one.ha, one.http)
    return api.NodesChange(change.gone, change.new, places)


def _text(text: str) -> str:
    """Return what a node says, fit for one line."""
    return one_line(" ".join(text.split()))[:_REASON]


class RemotePlace:
    """The role in the file of the node of a configuration; the node reads and changes it."""

    def __init__(self, config: Config) -> None:
        self.what = f"the file of node {config.node}"
        self._config = config

    def role(self) -> Role | None:
        """Return the role in the node's file. Raises HastoreError if the node does not say it."""
        looked = self._look(_change(Role.SLAVE, None))
        try:
            return Role(looked.role)
        except ValueError as wrong:
            raise HastoreError(
                f"{node_name(self._config)} tells no role of its file: give the command on its "
                "machine"
            ) from wrong

    def change(self, role: Role) -> None:
        """Have the node edit its file; raises HastoreError or UsageError if it does not."""
        self._have_changed(_change(role, None))

    def change_once(self, role: Role, command: str, flags: Flags, before: dict[str, Any]) -> None:
        """Have the node edit its file, and take the flags, which it uses once."""
        once = api.OnceOptions(command, int(before["epoch"]), **flags)
        self._have_changed(_change(role, once))

    def _look(self, change: api.RoleChange) -> api.Administered:
        found = order(self._config, self._config.node, change, None, LOOK_S)
        if isinstance(found, Missed):
            raise HastoreError(
                f"{node_name(self._config)}: {found.reason}; its role was not changed: see to "
                "that, or give the command on its machine"
            )
        return found

    def _have_changed(self, change: api.RoleChange) -> None:
        looked = self._look(change)
        if not looked.changed:
            return
        own = self._config
        try:
            found = order(own, own.node, change, looked.version, CHANGE_S)
        except FileChanged as conflict:
            raise HastoreError(f"{conflict}; give the command again") from conflict
        if isinstance(found, Missed):
            known = "perhaps it was changed: give the command again"
            text = known if found.perhaps_done else "its role was not changed"
            raise HastoreError(f"{node_name(own)}: {found.reason}; {text}")


def remote_place(config: Config) -> RolePlace:
    """Return where the role of the configuration's node is changed from another machine."""
    return RemotePlace(config) if config.registry is None else RegistryPlace(config)


def ask_named(config: Config) -> dict[str, Any] | None:
    """Return the status of the configuration's node, as `ask_node`; UsageError if it is another."""
    status = ask_node(config)
    wanted = config.node, config.cluster, config.group
    if status is not None:
        told = tuple(status.get(key) for key in ("node", "cluster", "group"))
        if told != wanted:
            raise UsageError(
                f"{node_name(config)} is node {told[0]} of {told[1]}/{told[2]}; nothing was "
                "changed: correct `nodes` in FILE"
            )
    return status


def _change(role: Role, once: api.OnceOptions | None) -> api.RoleChange:
    return api.RoleChange(secrets.token_hex(8), role.value, once)


class Made(NamedTuple):
    """A request that the leader has taken; without an id there was nothing to ask for."""

    config: Config  # of the leader, as far as it is needed to ask it
    status: Status  # of the leader, before
    request_id: str | None


def ask_leader(path: str, command: str, node: int, by: int | None) -> Made:
    """Have the leader of the group of the file at `path` write a request.

    Raises ConfigError if the file is not of this mode, UsageError if there is no such node, and
    HastoreError if no leader is found, or it does not take the request.
    """
    config = load_names(path)
    if config.mode is not Mode.DLEDGER:
        problem = "is classic, where the operator names the master"
        raise config_error(path, "mode", problem, "use `hastore promote -c FILE`")
    leader, status = _leader(config)
    own = as_node(config, leader)
    if node not in config.nodes and node not in members_of(status):
        raise UsageError(
            f"node {node} is neither under `nodes` in {path} nor a member; nothing was changed: "
            "correct the number, or add the node first (`hastore node add`)"
        )
    already = _already(status, command, node, by)
    if already is not None:
        print_note(f"nothing to do: {already}")
        return Made(own, status, None)
    refuse_hanging(own, status)
    request_id = secrets.token_hex(8)
    change = api.MembersChange(
        request_id, command, node, int(status["term"]), sorted(numbers_in(status["members"])), by
    )
    made = order(own, leader, change, None, CHANGE_S)
    if not isinstance(made, Missed):
        return Made(own, status, request_id)
    text = f"{node_name(own)}, the leader: {made.reason}"
    if made.perhaps_done:
        text += (
            "; whether it has got the request is not known: `hastore status` shows leader and "
            "members, and the command may be given again"
        )
    raise HastoreError(text)


def _leader(config: Config) -> tuple[int, Status]:
    """Return the node that says itself that it leads, in the newest term, with its status."""
    statuses, silent = ask_statuses(config)
    leading = [
        number
        for number, one in statuses.items()
        if one.get("leader") == number and isinstance(one.get("term"), int)
        and numbers_in(one.get("members"))
    ]  # fmt: skip
    if leading:
        leader = max(leading, key=lambda number: int(statuses[number]["term"]))
        return leader, statuses[leader]
    known = {one.get("leader") for one in statuses.values()} - {None}
    named = f", though node {', '.join(map(str, known))} is said to" if known else ""
    whys = "" if not silent else f" ({listed_whys(silent)})"
    raise HastoreError(
        f"no node that answers leads{named}{whys}; nothing was changed: an election needs a "
        "majority, see `hastore status`"
    )


def _already(status: Status, command: str, node: int, by: int | None) -> str | None:
    """Return what is as wanted already, or under way; None if the request is needed."""
    members = numbers_in(status["members"])
    learners = learners_of(status)
    leaving = numbers_in(status.get("leaving"))
    if command == "transfer":
        return f"node {node} leads already" if status["leader"] == node else None
    if command == "add":
        if node in members:
            return f"node {node} is a member already"
        return f"node {node} is a learner already" if node in learners else None
    if command == "remove":
        return None if node in members or node in learners else f"node {node} is no member"
    if by in members and node not in members:
        return f"node {by} is a member already, and node {node} none any more"
    if by in learners and node not in members:  # a dead one is removed first
        return f"node {by} is a learner already, and node {node} no member"
    under_way = node in leaving and by in members | learners
    return f"node {by} is replacing node {node} already" if under_way else None
