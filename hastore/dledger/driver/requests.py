"""Requests of an administrator: to hand over the leadership, or to change the group's members.

RequestFile is `<store.root>/hastore/dledger-request.json`; the RequestRunner of the driver carries
it out on the leader. `hastore dledger transfer|add|replace|remove -c FILE` writes the file, as
`hastore promote` does once.json. Whoever may write the file may also write the node's log. Over the
network only an identity with the right `admin` can have it written, by the node itself
(server/administration.py); no other client and no peer can.

    hastore dledger ...                            the node (DLedgerDriver, each 200 ms)
      reads the status: term, leader, members
      must be the leader's file, else it names the leader
      writes the file, with a random `id` --------> removes it durably, checks it
                                                    runs it: Transfer or ChangeMembers
      polls the status until `request.id` is its  <- shows {id, outcome, reason} as `request`
      own: DONE, REFUSED or UNKNOWN

The node refuses a file, and removes it, if it

- was written more than 60 s ago (or that much in the future), or in another term than the present;
- names other members than the group has now (`members`), so that of two administrators one loses;
- asks to add a node without an address under `nodes`, one without a link, or one that is a learner
  or member already; to add or replace while another replacement is under way, or a linked node has
  a version that knows no learners; to remove a node that is neither learner nor member, or the last
  member; to transfer to a node that is no member, or to itself;
- asks to remove a member so that no majority of the others would work: the change could be neither
  committed nor taken back. A learner counts nowhere, so it is added and removed whoever works;
- reaches a node that is not the leader. The reason names the leader.

The file is removed durably before anything is done: no request is run twice, not even after a power
loss. A crash right after the removal loses the request; the command then says that the outcome is
unknown, and that `hastore status` shows the members.
"""

import logging
import secrets
from collections.abc import Callable, Collection

import msgspec

from hastore.clock import Clock
from hastore.dledger.core.events import listed
from hastore.errors import UNREADABLE, HastoreError
from hastore.fs.filesystem import FileSystem
from hastore.protocol.dledger import MemberSet

log = logging.getLogger(__name__)

GOOD_FOR_MS = 60_000
FILE_BYTES_MAX = 64 * 1024
COMMANDS = ("transfer", "add", "replace", "remove")
DONE, REFUSED, UNKNOWN = "DONE", "REFUSED", "UNKNOWN"
NOT_LINKED = "is not linked with this node"  # in the reason of a refusal that may soon be over


class AdminRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The file's content: `command` about `node`, as the administrator saw `term` and `members`."""

    id: str
    command: str  # one of COMMANDS
    node: int  # the node that takes over, is added, replaced or removed
    term: int
    members: tuple[int, ...]
    wall_ms: int
    by: int | None = None  # "replace": the node that is added

    @property
    def text(self) -> str:
        """Say what is asked for, for logs."""
        return f"{self.command} node {self.node}" + (f" by node {self.by}" if self.by else "")

    def wanted(self, now: MemberSet) -> MemberSet:
        """Return the member list that is asked for, of a request that is not refused."""
        if self.command in ("add", "replace"):
            by, leaving = (self.node, ()) if self.by is None else (self.by, (self.node,))
            return MemberSet(now.members, (*now.learners, by), leaving)
        # Whoever takes back one end of a replacement, takes it back.
        members, learners = (
            tuple(one for one in nodes if one != self.node) for nodes in (now.members, now.learners)
        )
        return MemberSet(members, learners)


class RequestOutcome(msgspec.Struct, frozen=True):
    """What became of the last request; `outcome` is None while it runs."""

    id: str
    command: str
    node: int
    outcome: str | None  # DONE, REFUSED (nothing was done) or UNKNOWN (see the members)
    reason: str = ""


def request_path(root: str) -> str:
    """Return the file's path in the store with this root."""
    return f"{root}/hastore/dledger-request.json"


def write_request(
    fs: FileSystem,
    root: str,
    command: str,
    node: int,
    *,
    term: int,
    members: tuple[int, ...],
    wall_ms: int,
    by: int | None = None,
    request_id: str | None = None,
) -> str:
    """Write the file durably, for the node that has this store; return the request's id.

    Without `request_id` it gets a random one. `term` and `members` are those that the node's status
    shows. A file that the node has not taken yet is replaced. Raises HastoreError if the store is
    not on this machine, OSError if the file cannot be written.
    """
    if not fs.is_dir(f"{root}/hastore"):
        raise HastoreError(
            f"{root}/hastore does not exist, so store.root is another folder here; run the command "
            "on the node's machine, in the directory where the node was started"
        )
    request = AdminRequest(
        id=secrets.token_hex(8) if request_id is None else request_id,
        command=command,
        node=node,
        term=term,
        members=members,
        wall_ms=wall_ms,
        by=by,
    )
    fs.replace_bytes(request_path(root), msgspec.json.encode(request))
    return request.id


class RequestFile:
    """The file in one store, as its node sees it; `on_outcome` is told how each request ended."""

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        clock: Clock,
        *,
        on_outcome: Callable[[RequestOutcome], None] = lambda _outcome: None,
    ) -> None:
        self.on_outcome = on_outcome
        self._fs = fs
        self._path = request_path(root)
        self._clock = clock

    def pop(self) -> AdminRequest | None:
        """Remove the file, durably, and return the request; None if there is none.

        A file that is no request is removed too. Raises OSError if the file cannot be read or
        removed; the request is then not run.
        """
        fs, taken = self._fs, f"{self._path}.taken"
        if not fs.exists(self._path):
            return None
        fs.rename(self._path, taken)  # a request that is written from now on stays
        fs.sync_dir(self._path.rpartition("/")[0])
        try:
            found = msgspec.json.decode(fs.read_bytes(taken, FILE_BYTES_MAX), type=AdminRequest)
        except UNREADABLE as error:
            log.error("%s is removed: it is not a file of `hastore dledger`: %s", self._path, error)
            found = None
        fs.remove(taken)
        return found

    def refusal(
        self, request: AdminRequest, *, node: int, term: int, group: MemberSet,
        addresses: Collection[int], linked: Collection[int], old: Collection[int] = (),
    ) -> str | None:  # fmt: skip
        """Return why the leader `node` does not run the request; None if it does.

        `addresses` are the nodes that this node's file lists under `nodes`, `linked` those that it
        has a link with, and `old` those of them whose version knows no learners.
        """
        members = group.members
        age_ms = self._clock.wall_ms() - request.wall_ms
        target = request.node
        if abs(age_ms) > GOOD_FOR_MS:
            return f"it was written {age_ms // 1000} s ago; give the command again"
        if request.term != term:
            return (
                f"it was written in term {request.term}, now it is term {term}; give the command "
                "again"
            )
        if sorted(request.members) != sorted(members):
            return (
                f"it was written when the members were {listed(request.members)}, now they are "
                f"{listed(members)}; look at `hastore status`, and give the command again"
            )
        if request.command == "transfer":
            if target == node:
                return f"node {target} is the leader already"
            if target not in members:
                return f"node {target} is no member; the members are {listed(members)}"
        elif request.command == "add":
            return _not_addable(target, group, addresses, linked, old)
        elif request.command == "replace":
            if target not in members:
                return f"node {target} is no member; the members are {listed(members)}"
            if group.learners:
                first = group.learners[0]
                return (
                    f"node {first} is a learner; wait until it is a member, or withdraw it: "
                    f"`hastore dledger remove -c FILE --node {first}`"
                )
            by = 0 if request.by is None else request.by
            return _not_addable(by, group, addresses, linked, old)
        elif request.command == "remove":
            return _not_removable(node, target, group, linked)
        else:
            return f"unknown command {request.command!r}; known are {', '.join(COMMANDS)}"
        return None


def _not_addable(
    new: int,
    group: MemberSet,
    addresses: Collection[int],
    linked: Collection[int],
    old: Collection[int],
) -> str | None:
    """Return why a node cannot become a learner now; None if it can."""
    if new in group.members:
        return f"node {new} is a member already"
    if new in group.learners:
        return f"node {new} is a learner already; `hastore status` says what it waits for"
    if group.leaving:
        return (
            f"node {listed(group.leaving)} is being replaced; wait until it is no member, or "
            "withdraw that: `hastore dledger remove` with the node that replaces it"
        )
    if new not in addresses:
        return (
            f"node {new} has no address here; add it to `nodes` in the file of every node, and "
            "start it, before it becomes a learner"
        )
    if new not in linked:
        return (
            f"node {new} is not linked with this node; start it, with the same `nodes`, before it "
            "becomes a learner"
        )
    if old:
        return (
            f"node {listed(old)} runs a version of hastore that knows no learners; upgrade every "
            "node first"
        )
    return None


def _not_removable(
    leader: int, target: int, group: MemberSet, linked: Collection[int]
) -> str | None:
    """Return why a node cannot be removed now; None if it can."""
    members = group.members
    if target in group.learners:
        return None
    if target not in members:
        learners = f", the learners {listed(group.learners)}" if group.learners else ""
        return f"node {target} is no member; the members are {listed(members)}{learners}"
    if len(members) == 1:
        return f"node {target} is the only member"
    if group.learners and group.leaving and target not in group.leaving:
        return (
            f"node {listed(group.leaving)} is being replaced by node {listed(group.learners)}; "
            "wait for that, or withdraw it: `hastore dledger remove -c FILE --node "
            f"{group.learners[0]}`"
        )
    return _stops(leader, members, linked, tuple(n for n in members if n != target))


def _stops(
    leader: int, members: tuple[int, ...], linked: Collection[int], after: tuple[int, ...]
) -> str | None:
    """Return why the group would stop: too few of the members `after` the change would work.

    Returns None if a majority would.
    """
    works = {leader, *linked} & set(after)
    needed = len(after) // 2 + 1
    if len(works) >= needed:
        return None
    silent = listed(set(members) - {leader, *linked})
    return (
        f"the group would stop: {needed} of the members {listed(after)} must work, and now only "
        f"{listed(works)} would; start or remove node {silent} first"
    )
