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

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from hastore.clock import Clock
from hastore.protocol import api
from hastore.server.api.access import Access
from hastore.server.api.backend import ApiBackend
from hastore.server.api.connections import Connection
from hastore.server.api.ranges import AnsweringService, Done
from hastore.service import OnFailure

MAX_CHANGES_OF_ONE = 4  # requests of a connection that wait
MAX_CHANGES = 16  # the same, of all connections
CarryOut = Callable[[api.Administer], api.Administered | api.Failed]


class _Waiting(NamedTuple):
    connection: Connection
    name: str  # of the identity, when the request came
    request: api.Administer


class AdminService(AnsweringService):
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
        self._waiting: deque[_Waiting] = deque()
        self._work = threading.Event()

    def accept_change(self, connection: Connection, request: api.Administer) -> str | None:
        """Take a request; return why not if too many wait. Called by the API's thread."""
        own = self._of_one.get(connection, 0)
        if own >= MAX_CHANGES_OF_ONE or self.pending >= MAX_CHANGES:
            return "too many changes of this node wait"
        assert connection.proof is not None
        self._count(connection)
        self._waiting.append(_Waiting(connection, connection.proof.identity.name, request))
        self._work.set()
        return None

    def wake(self) -> None:
        """Wake the thread, so that it sees `stopping`."""
        self._work.set()

    def run(self) -> None:
        """Work until stopped; requests that still wait then are not carried out."""
        while not self.stopping.is_set():
            self._work.wait()
            self._work.clear()
            while self._waiting and not self.stopping.is_set():
                waiting = self._waiting.popleft()
                self._pace.begin()
                self._done.append(Done(waiting.connection, waiting.request, self._work_on(waiting)))
                self._on_done()
                self._pace.rests()

    def _work_on(self, waiting: _Waiting) -> tuple[api.Reply, None] | Exception:
        connection, name, request = waiting
        if connection.ended:
            reason = "the connection has ended; nothing was changed"
            self._note(waiting, "refused", reason)
            return api.Failed(request.rid, "BUSY", reason), None
        try:
            reply = self._carry_out(request)
        except Exception as failure:  # this request's failure; the API answers with it
            self._note(waiting, "refused", str(failure) or repr(failure))
            return failure
        if isinstance(reply, api.Failed):
            self._note(waiting, "refused", reply.reason)
        elif isinstance(request.change, api.MembersChange):
            self._note(waiting, "asked", f"request {request.change.id}")
        elif not reply.changed:
            self._note(waiting, "unchanged", reply.file)
        else:
            self._note(waiting, "checked" if request.version is None else "done", reply.file)
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
