"""How what is limited is shared: a room by its users, a process' descriptors by a node's parts.

Of a room, such as all locks of queues, one user may have as much as is left for others, so one
alone half of the room: whoever takes all that it gets leaves room for the next one.

Each part of a node may use up its share of the descriptors for good, so together they must leave
some: for the `ha` and the `http` port, the reader of a new slave, and each file that is opened for
a moment. With n descriptors:

    connections of the API    n / 2 - 64, from n = 256 on; else n / 4
    files of queues           n / 2 - 512, from n = 2,048 on; else n / 4; at most 16,384
    log files                 n / 16, at most 64; each has a descriptor, and its map a second one
"""

import resource
from collections import Counter
from typing import NamedTuple, TypeVar

User = TypeVar("User")
_MUCH = 0.8  # of what may be used: operators are told
_QUEUE_FILES_MAX = 16_384
_LOG_FILES_MAX = 64
BESIDE_CONNECTIONS, _BESIDE_QUEUE_FILES = 64, 512


class Shares(Counter[User]):
    """How much each user has; a user that has nothing is not kept."""

    def change(self, user: User, by: int) -> None:
        """Add to what a user has; `by` may be negative."""
        self[user] += by
        if not self[user]:
            del self[user]

    def crowding(self, room: int, used: int) -> tuple[User | None, int] | None:
        """Return who has most, and how much, if the room is nearly used up, or what one may have.

        None if neither is. `used` is what all have, also those that are not known: then the user
        may be None. Any thread may ask.
        """
        most: tuple[User | None, int] = max(
            list(self.items()), key=lambda one: one[1], default=(None, 0)
        )
        # Beside the others a user may have half of what they leave.
        if used < _MUCH * room and most[1] < _MUCH * (room - used + most[1]) / 2:
            return None
        return most


class DescriptorShares(NamedTuple):
    """What may be open at a time."""

    connections: int | None  # of the API's clients; None: any number
    queue_files: int
    log_files: int


def descriptor_shares() -> DescriptorShares:
    """Return the shares under the limit that this process has now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return DescriptorShares(None, _QUEUE_FILES_MAX, _LOG_FILES_MAX)
    half, quarter = limit // 2, limit // 4
    return DescriptorShares(
        max(half - BESIDE_CONNECTIONS, quarter, 1),
        max(1, min(max(half - _BESIDE_QUEUE_FILES, quarter), _QUEUE_FILES_MAX)),
        max(1, min(limit // 16, _LOG_FILES_MAX)),
    )
