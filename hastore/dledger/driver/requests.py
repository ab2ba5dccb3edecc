"""RequestRunner: runs an administrator's requests (request_file.py) on the leader."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol

from hastore.dledger.core.core import DLedgerCore
from hastore.dledger.core.events import Role, Settled
from hastore.dledger.driver.request_file import (
    DONE,
    REFUSED,
    UNKNOWN,
    AdminRequest,
    RequestFile,
    RequestOutcome,
)
from hastore.dledger.links.peer_links import PeerLinks

log = logging.getLogger(__name__)

Done = Callable[[Settled], None]


class GroupControl(Protocol):
    """What the runner needs of the driver."""

    @property
    def core(self) -> DLedgerCore | None:
        """The core; None before the node takes part."""
        ...

    @property
    def left(self) -> str | None:
        """Why the node has left the quorum; None while it takes part."""
        ...

    def hand_over(self, to: int, done: Done) -> None:
        """Let another node lead."""
        ...

    def change_members(self, members: tuple[int, ...], done: Done) -> None:
        """Add or remove one member."""
        ...


class RequestRunner:
    """Take the file, check it, run it; one thread calls `look`."""

    def __init__(self, file: RequestFile, control: GroupControl, links: PeerLinks) -> None:
        self.outcome: RequestOutcome | None = None  # of the last request
        self._file = file
        self._control = control
        self._links = links

    def look(self) -> None:
        """Run the request that waits, if there is one and no other still runs."""
        if self.outcome is not None and self.outcome.outcome is None:
            return
        try:
            request = self._file.take()
        except OSError as error:
            log.error("a request of an administrator cannot be taken: %s", error)
            return
        if request is not None:
            self._run(request)

    def _run(self, request: AdminRequest) -> None:
        control, core = self._control, self._control.core
        problem = self._problem(request)
        if problem is not None or core is None:
            self._set(request, REFUSED, problem or "the node starts")
            return
        self._set(request, None, "")
        log.warning("an administrator asks: %s node %d", request.command, request.node)
        done = partial(self._done, request)
        if request.command == "transfer":
            control.hand_over(request.node, done)
        elif request.command == "add":
            control.change_members((*request.members, request.node), done)
        else:
            control.change_members(tuple(n for n in request.members if n != request.node), done)

    def _problem(self, request: AdminRequest) -> str | None:
        core, left = self._control.core, self._control.left
        if core is None:
            return "the node starts"
        if left is not None:
            return f"this node has left the quorum: {left}"
        if core.role is not Role.LEADER:
            leader = core.leader
            where = "no leader is known now" if leader is None else f"node {leader} is the leader"
            return f"{where}: give the command with the leader's file"
        return self._file.problem(
            request, node=core.node, term=core.term, members=core.members,
            addresses=self._links.member.addresses, linked=self._links.linked,
        )  # fmt: skip

    def _done(self, request: AdminRequest, settled: Settled) -> None:
        outcome = {"COMMITTED": DONE, "REFUSED": REFUSED}.get(settled.outcome, UNKNOWN)
        self._set(request, outcome, settled.reason or ("" if outcome == DONE else settled.outcome))

    def _set(self, request: AdminRequest, outcome: str | None, reason: str) -> None:
        self.outcome = RequestOutcome(request.id, request.command, request.node, outcome, reason)
        if outcome is not None:
            log.warning("%s node %d: %s %s", request.command, request.node, outcome, reason)
            self._file.on_outcome(self.outcome)
