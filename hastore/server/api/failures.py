"""Failures of single requests: what the client is told, and what the node logs.

    exception                             the client gets             the log gets
    the client's own fault (UsageError)   its type and text           nothing
    StoreError, damage                    its type and text           a line
    OSError: the disk cannot be read      `StoreError`, the text      a line
    anything else: a bug                  `InternalError`, its type   its traceback

MemoryError is not a failure of one request: it is raised again and ends the node.
"""

import logging

from hastore.clock import Clock
from hastore.errors import HastoreError, UsageError
from hastore.server.api.backend import ApiBackend

log = logging.getLogger(__name__)

REPEAT_MS = 10_000.0  # until the same failure is logged again
_KEPT_MAX = 1_000  # failures remembered for that purpose


class Failures:
    """Turn exceptions into statuses and log lines; the API's lock is held in every call."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._logged: dict[str, float] = {}
        self.count = 0  # of failures that were not the client's own fault

    def note(self, what: str, failure: Exception) -> tuple[str, str]:
        """Log a failure of `what`; return status and reason for the client. Raises MemoryError."""
        if isinstance(failure, MemoryError):
            raise failure
        if isinstance(failure, UsageError):
            return type(failure).__name__, str(failure)
        self.count += 1
        if isinstance(failure, HastoreError):
            answer = type(failure).__name__, str(failure)
        elif isinstance(failure, OSError):
            answer = "StoreError", f"the store cannot be read: {failure}"
        elif isinstance(failure, UnicodeEncodeError):  # a topic in the log that is not UTF-8
            answer = "CorruptRecordError", str(failure)
        else:
            text = f"{type(failure).__name__}: {failure}"[:200]
            answer = "InternalError", f"{text}; the node's log has more"
            if self._is_new(f"{what}: {text}"):
                log.error("api: %s failed because of a bug", what, exc_info=failure)
            return answer
        if self._is_new(f"{what}: {answer[1]}"):
            log.error("api: %s failed: %s", what, answer[1])
        return answer

    def _is_new(self, text: str) -> bool:
        """Whether to log a failure now; False if it was logged less than REPEAT_MS ago."""
        now = self._clock.monotonic_ms()
        if now < self._logged.get(text, -REPEAT_MS) + REPEAT_MS:
            return False
        if len(self._logged) >= _KEPT_MAX:
            self._logged.clear()
        self._logged[text] = now
        return True


def master_of(backend: ApiBackend, failures: Failures) -> str | None:
    """Return the master's API address for a refusal; None if the node does not know it."""
    try:
        return backend.master_map().master_api
    except Exception as failure:  # the refusal is sent without it
        failures.note("the search for the master", failure)
        return None
