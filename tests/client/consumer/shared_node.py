"""A node in this process at which consumers share queues: a fake log, and what gives the locks."""

from __future__ import annotations

from hastore.config.model import ApiConfig
from hastore.protocol.remoting import Code
from hastore.server.api.server import ApiParts, ApiServer
from hastore.server.remoting.door import Door
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import GroupRequests
from hastore.server.remoting.lock_requests import LockRequests
from hastore.server.remoting.own_members import OwnMembers
from hastore.server.remoting.position_requests import PositionRequests
from hastore.server.remoting.retries import Retries
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.subscriptions import Subscriptions
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend


class SharedNode:
    """A fake backend behind a real ApiServer with a door, in which all that shares is joined."""

    door: Door
    topics: TopicView
    groups: GroupRequests
    positions: GroupPositions
    locks: LockRequests
    members: OwnMembers
    asked: PositionRequests

    def __init__(self, number: int = 1, *, writable: bool = True, epoch: int = 65537) -> None:
        self.backend = FakeBackend(number, writable=writable, epoch=epoch)
        self.server = self._serve("tcp://127.0.0.1:0")
        self.address = self.server.endpoint
        self.backend.nodes = {number: self.address}

    def _serve(self, address: str) -> ApiServer:
        server = ApiServer(
            address, self.backend, ApiConfig(), on_failure=raise_failure, make_door=self._door
        )
        server.start()
        return server

    def _door(self, parts: ApiParts) -> Door:
        door = fill(parts, self)
        self.door = door
        return door

    def stop(self) -> None:
        self.server.stop()
        assert self.server.failure is None

    def restart(self) -> None:
        self.server = self._serve(self.address)


def fill(parts: ApiParts, node: SharedNode) -> Door:
    """Return a door that does not serve RocketMQ's clients, but hastore's own members."""
    door = Door(parts, "RocketMQ's clients are not served here")
    node.topics = TopicView(parts.backend, auto_create=True)
    node.groups = GroupRequests(door)
    node.positions = GroupPositions(door)
    node.locks = LockRequests(door, node.positions)
    node.members = OwnMembers(
        door, node.groups, node.locks, node.positions, node.topics,
        Retries(door, node.topics, Subscriptions(door, node.topics)),
    )  # fmt: skip
    door.join(node.groups.handlers())
    door.join(node.positions.handlers())
    door.join(node.locks.handlers())
    node.asked = PositionRequests(door, node.positions, node.groups.members, node.topics, "g0")
    door.join(node.asked.handlers())
    assert Code.LOCK_BATCH_MQ in door.codes
    return door
