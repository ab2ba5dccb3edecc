"""A node's object in ZooKeeper: parsed strictly, checked against the node that it is for. Pure.

    {"role": "SYNC_MASTER", "api": "tcp://HOST:PORT", "ha": "HOST:PORT", "http": "HOST:PORT",
     "cluster": "demo", "group": "g0", "node": 1, "store": "<id of the node's store>",
     "once": {...}}

An operator who sets the object by hand needs only `role` and the three addresses; the node adds the
rest. `store` tells two nodes with one number apart. `once` has the options of one `hastore promote`
or `hastore demote`; the node uses them at most once, then removes them.
"""

from collections.abc import Mapping

import msgspec

from hastore.addresses import parse_address
from hastore.config.model import NodeAddress, Role
from hastore.errors import RegistryError

MAX_ENTRY_BYTES = 16 * 1024
WRITE_AGAIN = "correct it, or delete the znode: the node then writes it anew with its present role"


class Once(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Options for one promotion or demotion; `id` is random."""

    id: str
    command: str  # "promote" | "demote"
    epoch: int
    wall_ms: int
    no_catch_up: bool = False
    force_unclean: bool = False
    accept_loss: bool = False
    needed_node: int | None = None


class NodeEntry(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """The object of one node."""

    role: Role
    api: str
    ha: str
    http: str
    cluster: str | None = None
    group: str | None = None
    node: int | None = None
    store: str | None = None
    once: Once | None = None

    @property
    def address(self) -> NodeAddress:
        """The node's three addresses."""
        return NodeAddress(api=self.api, ha=self.ha, http=self.http)

    def encode(self) -> bytes:
        """Return the object as JSON."""
        return msgspec.json.encode(self)


def parse_entry(data: bytes, path: str) -> NodeEntry:
    """Return the object in the znode at `path`; raises RegistryError, one line with the remedy."""
    if not data:
        raise RegistryError(f"{path} is empty; {WRITE_AGAIN}")
    if len(data) > MAX_ENTRY_BYTES:
        raise RegistryError(
            f"{path} holds {len(data):,} bytes, more than {MAX_ENTRY_BYTES:,}; {WRITE_AGAIN}"
        )
    try:
        entry = msgspec.json.decode(data, type=NodeEntry)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = str(error).replace("\n", " ").replace("`$.", "`")
        roles = ", ".join(role.value for role in Role)
        remedy = f"the roles are {roles}" if "`role`" in problem else "it is a JSON object"
        raise RegistryError(f"{path}: {problem} ({remedy}); {WRITE_AGAIN}") from error
    for name, text in (("api", entry.api.removeprefix("tcp://")), ("ha", entry.ha),
                       ("http", entry.http)):  # fmt: skip
        scheme = name != "api" or entry.api.startswith("tcp://")
        if not scheme or parse_address(text) is None:
            form = "tcp://HOST:PORT" if name == "api" else "HOST:PORT"
            given = getattr(entry, name)[:80]
            raise RegistryError(f"{path}: {name}: {given!r} is not {form}; {WRITE_AGAIN}")
    if entry.once is not None and entry.once.command not in ("promote", "demote"):
        raise RegistryError(f"{path}: once: the command is neither promote nor demote; "
                            f"{WRITE_AGAIN}")  # fmt: skip
    return entry


def foreign_problem(
    entry: NodeEntry, path: str, own: NodeEntry, *, may_move: bool = True
) -> str | None:
    """Return why the object at a node's znode is that of another node; None if it is its own.

    `own` is the object as the node would write it. Its addresses may differ only if `may_move`: the
    node has other ones since this start, and has not written them yet.
    """
    told = (entry.cluster, entry.group, entry.node)
    for name, given, ours in zip(
        ("cluster", "group", "node"), told, (own.cluster, own.group, own.node), strict=True
    ):
        if given is not None and given != ours:
            return (
                f"{path} holds the object of {name} {given!r}, and this node is of {name} "
                f"{ours!r}: it was copied from there; delete the znode, and this node writes its "
                "own"
            )
    if entry.store is not None and entry.store != own.store:
        return (
            f"{path}: node number {own.node} is used with another store, at {entry.api}: give one "
            "of the two nodes another number in every file; if they are of two groups, which "
            "clients would take for one, give one group another name (`group`) instead; if that "
            "node or its disk is gone for good, delete the znode"
        )
    if entry.address != own.address and not (may_move and entry.store is not None):
        name = next(n for n in ("api", "ha", "http") if getattr(entry, n) != getattr(own, n))
        return (
            f"{path}: {name} is {getattr(entry, name)}, but {getattr(own, name)} in this node's "
            f"file: it is the object of another node, or of a copy of this one; set {name} as in "
            "the file, or delete the znode"
        )
    return None


def others_wrote(path: str, role: Role | None) -> str:
    """Say why an object does not count whose ACL is not the one of the node's credentials."""
    asks = "" if role is None else f", and asks for the role {role.value}"
    return (
        f"{path} has another ACL than that of registry_acl_file, so others may have written it"
        f"{asks}; run `hastore promote` or `hastore demote` for this node, which replaces it, or "
        "delete the znode: the node then writes it anew with its present role"
    )


def siblings_of(
    entries: Mapping[int, NodeEntry], cluster: str, group: str
) -> dict[int, NodeAddress]:
    """Return the addresses that the nodes of a group state; an object copied from elsewhere is left
    out.
    """
    return {
        number: entry.address
        for number, entry in entries.items()
        if (entry.cluster or cluster, entry.group or group, entry.node or number)
        == (cluster, group, number)
    }
