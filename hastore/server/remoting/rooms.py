"""Which requests of RocketMQ's clients a node answers: every handler is joined here."""

from __future__ import annotations

from hastore.config.checks import remoting_refusal
from hastore.config.model import Config
from hastore.server.api.server import ApiParts
from hastore.server.remoting.door import Door
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import GroupRequests


def make_door(config: Config, parts: ApiParts) -> Door:
    """Return the door of a node, with all its handlers."""
    door = Door(parts, remoting_refusal(config))
    groups = GroupRequests(door)
    door.join(groups.handlers())
    positions = GroupPositions(door)
    door.join(positions.handlers())
    return door
