"""Who uses how much of a room that several share, such as all locks of queues.

One user may have as much as is left for others, so one alone half of the room: whoever takes all
that it gets leaves room for the next one.
"""

from collections import Counter
from typing import TypeVar

User = TypeVar("User")
_MUCH = 0.8  # of what may be used: operators are told


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
