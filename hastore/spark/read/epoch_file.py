"""The epoch history of a store in use or not, from `<store>/hastore/node.json`."""

import json
import os

from hastore.errors import StoreBrokenError
from hastore.ha.rules.history import FORGOTTEN_EPOCH, Standing, check_position
from hastore.spark.options.partitions import Stored

Entries = tuple[tuple[int, int], ...]  # (epoch, start offset), both rising


class EpochFile:
    """The history that a store's node keeps; None for a store of RocketMQ.

    The node replaces the file as a whole, so a reader sees the old or the new one.
    """

    def __init__(self, root: str) -> None:
        self._path = f"{root}/hastore/node.json"
        self._seen: tuple[int, int, int] | None = None
        self._entries: Entries | None = None

    def read(self) -> Entries | None:
        """Return the entries now; reads the file again only if it has changed."""
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            self._seen = self._entries = None
            return None
        seen = (status.st_ino, status.st_mtime_ns, status.st_size)
        if seen != self._seen:
            self._entries = self._load()
            self._seen = seen
        return self._entries

    def _load(self) -> Entries | None:
        try:
            with open(self._path, "rb") as file:
                history = json.load(file)["history"]
            return tuple((int(entry[0]), int(entry[1])) for entry in history)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise StoreBrokenError(f"{self._path} is not the state of a node: {error}") from error


def valid_end(history: Entries | None, last: Stored | None) -> int | None:
    """Return where the records end that belong to the log that had the record `last`.

    None: nowhere, all records belong to it as far as `history` says.
    """
    if history is None or last is None or last.epoch is None:
        return None
    if last.epoch == FORGOTTEN_EPOCH:  # other nodes may remember it: nothing to compare
        return None
    standing, at = check_position(history, last.offset + 1, last.epoch, last.offset)
    if standing is Standing.LOST:
        return at
    return next((start for epoch, start in history if epoch > last.epoch), None)
