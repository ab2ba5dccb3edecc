"""BaseBackend: what the client API, the HTTP port and `hastore status` see of a node of any mode.

NodeBackend (mode classic) and DLedgerBackend (mode dledger) extend it to an ApiBackend
(server/api/backend.py).
"""

from collections.abc import Callable, Mapping
from typing import Any

from hastore.ha.master.group_transfer import GroupTransferService
from hastore.protocol.positions import Place
from hastore.server.kept_positions import KeptPositions
from hastore.server.retention_service import RetentionService
from hastore.store.log_store import LogStore


class BaseBackend:
    """The part of a node's ApiBackend that does not depend on its mode.

    `config_path` is the absolute path of the file that the node follows; `config_problem` returns
    why a changed file is not followed, None if it is; `security_problems`, what is wrong with the
    identities and the audit log. `failure` says which thread failed, and why; the node then ends.
    """

    def __init__(self, store: LogStore, transfer: GroupTransferService) -> None:
        self.store = store
        self.transfer = transfer
        self.config_problem: Callable[[], str | None] = lambda: None
        self.config_path: str | None = None
        self.security_problems: Callable[[], list[str]] = list
        self.failure: str | None = None
        self._watchers: list[Callable[[], None]] = []
        self._stopping = False
        self._full = False  # the store had no room for the last put
        self._retention: RetentionService | None = None
        self._kept: KeptPositions | None = None
        store.hooks.on_readable = self._readable_moved

    def status(self) -> dict[str, Any]:
        """Return the object of `hastore status --json`."""
        raise NotImplementedError

    def watch_retention(self, retention: RetentionService, kept: KeptPositions) -> None:
        """Set the retention service and its kept positions; called once, before the start."""
        self._retention, self._kept = retention, kept

    def kept_positions(self, group: str, topic: str) -> Mapping[int, Place]:
        """Return the positions that retention has saved for a group in a topic, by queue."""
        return {} if self._kept is None else self._kept.find(group, topic)

    def begin_stop(self) -> None:
        """Refuse puts from now on."""
        self._stopping = True

    def closed_reason(self) -> str | None:
        """Return why this node takes no puts whatever its role is; None if its role decides."""
        if self.failure is not None:
            return f"the node ends: {self.failure}"
        if self._stopping:
            return "the node is shutting down"
        if self.store.broken_reason is not None:
            return f"the store is closed: {self.store.broken_reason}"
        return None

    def full_reason(self) -> str | None:
        """Return why the store has no room; None when it has room (again)."""
        if self._full:
            problems = self.store.problems
            if problems:
                return f"the disk is full: {problems[0]}"
            self._full = False
        return None

    def common_problems(self) -> list[str]:
        """Return the problems that nodes of every mode have; empty when all is well."""
        found = list(self.store.problems)
        if self.failure is not None:
            found.insert(0, f"the node ends: {self.failure}")
        config_problem = self.config_problem()
        if config_problem is not None:
            found.append(f"the changed configuration is not followed: {config_problem}")
        found += self.security_problems()
        if self._retention is not None:
            found += self._retention.problems()
        return found

    def keeps_files_for(self, name: str) -> bool:
        """Whether retention still keeps the files that another node, by its name, needs."""
        return self._retention is None or self._retention.keeps_files_for(name)

    def log_status(self) -> dict[str, Any]:
        """Return the offsets of the log, for the status."""
        store = self.store
        return {
            "min_offset": store.min_offset,
            "max_offset": store.max_offset,
            "flushed_offset": store.flushed_offset,
            "confirmed_offset": store.confirmed_offset,
            "readable_offset": store.readable_offset,
        }

    def watch_readable(
        self, callback: Callable[[], None], readers_wait: Callable[[], bool]
    ) -> None:
        """Call `callback` after the readable or the dispatched offset moved; see ApiBackend."""
        self._watchers.append(callback)
        self.store.hooks.readers_wait = readers_wait

    def _readable_moved(self) -> None:
        for callback in self._watchers:
            callback()
