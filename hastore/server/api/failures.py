"""A failure belongs to the request that met it: what its client is told, and what the log says.

    what was met                          the client is told          the log
    the client's own fault (UsageError)   its type and text           nothing
    StoreError, damage                    its type and text           a line
    OSError: a disk that does not read    `StoreError`, the text      a line
    anything else: a bug                  `InternalError`, its type   its traceback

MemoryError is nobody's own: it is raised again, and ends the node, as does a failure of the epoll.
"""

import logging

from hastore.clock import Clock
from hastore.errors import HastoreError, UsageError
from hastore.server.api.backend import ApiBackend

log = logging.getLogger(__name__)

REPEAT_MS = 10_000.0  # before the same failure is logged again
_KEPT_MAX = 1_000  # texts that are remembered


class Failures:
    """Say what became of a request that failed; used by whoever holds the API's socket."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: dict[str, float] = {}
        self.count = 0  # of the failures that were not the client's own fault

    def note(self, what: str, failure: Exception) -> tuple[str, str]:
        """Log a failure of `what`; return status and reason for the client. MemoryError."""
        if isinstance(failure, MemoryError):
            raise failure
        if isinstance(failure, UsageError):
            return type(failure).__name__, str(failure)
        self.count += 1
        if isinstance(failure, HastoreError):
            told = type(failure).__name__, str(failure)
        elif isinstance(failure, OSError):
            told = "StoreError", f"the store cannot be read: {failure}"
        elif isinstance(failure, UnicodeEncodeError):  # a topic in the log that is no UTF-8
            told = "CorruptRecordError", str(failure)
        else:
            text = f"{type(failure).__name__}: {failure}"[:200]
            told = "InternalError", f"{text}; the node's log has more"
            if self._is_new(f"{what}: {text}"):
                log.error("api: %s failed by a mistake of the program", what, exc_info=failure)
            return told
        if self._is_new(f"{what}: {told[1]}"):
            log.error("api: %s failed: %s", what, told[1])
        return told

    def _is_new(self, text: str) -> bool:
        """Whether a failure is to be logged: the same one comes again with each try of a client."""
        now = self._clock.monotonic_ms()
        if now < self._told.get(text, -REPEAT_MS) + REPEAT_MS:
            return False
        if len(self._told) >= _KEPT_MAX:
            self._told.clear()
        self._told[text] = now
        return True


def master_of(backend: ApiBackend, failures: Failures) -> str | None:
    """Return where the master is, for a refusal; None also when the node cannot tell."""
    try:
        return backend.master_map().master_api
    except Exception as failure:  # the refusal goes out without it
        failures.note("looking for the master", failure)
        return None
