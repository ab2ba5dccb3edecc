"""What administrators ask of a node, carried out in a thread of its own, one after the other.

A change of the node's configuration file reads, writes and syncs it, and may wait for a command on
the node's machine that has the file locked. So neither the API's thread nor one that reads for
clients does it. To read a file as YAML takes the interpreter for some 10 ms, so while the log grows
the thread rests between two requests: no flood of them slows puts for long. Access has checked the
identity before; each request becomes one line of the audit log here, whatever comes of it. A
request whose connection has ended, as by a revocation, is not carried out: its administrator gets
no answer, and may repeat it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hastore.clock import Clock
from hastore.protocol import api
from hastore.server.api.access import Access
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.server.api.ranges import InOrderService
from hastore.service import OnFailure

MAX_CHANGES_OF_ONE = 4  # requests of a connection that wait
MAX_CHANGES = 16  # the same, of all connections
CarryOut = Callable[[api.Administer], api.Administered | api.Failed]


class _Waiting(NamedTuple):
    connection: Connection
    request: api.Administer
    name: str  # of the identity, when the request came


class AdminService(InOrderService):
    """Carry out requests of administrators, in the order of their arrival."""

    def __init__(
        self,
        backend: ApiBackend,
        access: Access,
        carry_out: CarryOut,
        clock: Clock,
        on_done: Callable[[], None],
        *,
        on_failure: OnFailure,
    ) -> None:
        """Prepare; `carry_out` and `on_done` are called from the thread. `carry_out` may raise."""
        super().__init__("AdminService", backend, clock, on_done, on_failure=on_failure)
        self._access = access
        self._carry_out = carry_out

    def accept_change(self, connection: Connection, request: api.Administer) -> str | None:
        """Take a request; return why not if too many wait. Called by the API's thread."""
        assert connection.proof is not None
        waiting = _Waiting(connection, request, connection.proof.identity.name)
        if not self._accept(waiting, MAX_CHANGES_OF_ONE, MAX_CHANGES):
            return "too many changes of this node wait"
        return None

    def _rest(self) -> None:
        self._pace.rests()

    def _work_on(self, entry: _Waiting) -> tuple[api.Reply, None]:
        request = entry.request
        self._pace.begin()
        if entry.connection.ended:
            reason = "the connection has ended; nothing was changed"
            self._note(entry, "refused", reason)
            return api.Failed(request.rid, "BUSY", reason), None
        try:
            reply = self._carry_out(request)
        except Exception as failure:
            self._note(entry, "refused", str(failure) or repr(failure))
            raise
        if isinstance(reply, api.Failed):
            self._note(entry, "refused", reply.reason)
        elif isinstance(request.change, api.MembersChange):
            self._note(entry, "asked", f"request {request.change.id}")
        elif not reply.changed:
            self._note(entry, "unchanged", reply.file)
        else:
            self._note(entry, "checked" if request.version is None else "done", reply.file)
        return reply, None

    def _note(self, waiting: _Waiting, outcome: str, reason: str) -> None:
        action, what = described(waiting.request.change)
        text = f"{what}: {reason}" if reason else what
        self._access.administered(waiting.name, waiting.connection.peer, action, outcome, text)


def described(change: api.NodesChange | api.MembersChange | api.RoleChange) -> tuple[str, str]:
    """Return a change's action for the audit log, and what it is about."""
    if isinstance(change, api.RoleChange):
        return "administer role", " ".join([change.role, *_options(change.once)])
    if isinstance(change, api.MembersChange):
        by = "" if change.by is None else f" by node {change.by}"
        return "administer members", f"{change.command} node {change.node}{by}"
    parts = [] if change.gone is None else [f"remove node {change.gone}"]
    if change.new is not None:
        one = change.address  # whoever is there gets all records
        at = "" if one is None else f" at {one.api}, ha {one.ha}, http {one.http}"
        parts.append(f"add node {change.new}{at}")
    return "administer nodes", ", ".join(parts) or "nothing"


def _options(once: api.OnceOptions | None) -> list[str]:
    """Return the options that were given, as those of the command."""
    if once is None:
        return []
    flags = ("no_catch_up", "force_unclean", "accept_loss")
    found = [f"--{name.replace('_', '-')}" for name in flags if getattr(once, name)]
    needed = [] if once.needed_node is None else [f"(node {once.needed_node} must answer)"]
    return [*found, *needed]
