"""DiskRoom: whether the node's disk counts as full, and why."""

from hastore.dledger.store.entry_store import EntryStore
from hastore.errors import StoreFullError
from hastore.fs.filesystem import NO_ROOM

ROOM_BYTES = 64 * 1024  # at least, for term, vote and member lists


class DiskRoom:
    """The driver notes failures, and asks whether there is room again; under its lock."""

    def __init__(self, store: EntryStore) -> None:
        self._messages = store.messages
        self._failure: str | None = None

    @property
    def full(self) -> bool:
        """Whether the disk counts as full."""
        return self._failure is not None

    def note(self, failure: Exception) -> bool:
        """Note a failure; return whether the disk counts as full only since then."""
        is_new = not self.full and (
            isinstance(failure, StoreFullError) or getattr(failure, "errno", None) in NO_ROOM
        )
        if is_new:
            self._failure = str(failure)
        return is_new

    def recovered(self) -> bool:
        """Return whether the disk was full until now, and has room again."""
        messages = self._messages
        if not self.full or messages.problems or messages.free_bytes() < ROOM_BYTES:
            return False
        self._failure = None
        return True

    @property
    def problem(self) -> str | None:
        """What an operator must look at; None if the store says it already."""
        failure = self._failure  # any thread may ask
        if failure is None or failure in self._messages.problems:
            return None
        return f"the disk is full: {failure}"
