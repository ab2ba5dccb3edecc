"""What commands have nodes do over the network: each is asked at its `api` address, by an admin.

A change of files has two steps. The look asks every node what the change would do to its file, and
changes nothing; so what one node refuses is known before the first file is written. The change
names the version of the file that the look has seen, so that of two administrators one changes
nothing. A node that cannot be asked is Missed, with the reason: its file is changed by hand.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hastore.addresses import parse_address
from hastore.bounded_log import one_line
from hastore.cli.own_node import security_of
from hastore.client.connections.requester import Requester, RequestNotKnown
from hastore.client.connections.transport import NoAnswer
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Config, NodeAddress
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
