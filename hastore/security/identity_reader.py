"""IdentityReader: parses a large identities file on a thread of its own.

A thousand identities take a quarter of a second to parse. The thread of the client API must not
spend that time: no client would be answered meanwhile.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from hastore.service import OnFailure, Service

Result = TypeVar("Result")


class IdentityReader(Service, Generic[Result]):
    """Parse the content that was asked for last. Any thread may ask."""

    def __init__(
        self,
        parse: Callable[[bytes], Result],
        on_parsed: Callable[[], object],
        *,
        on_failure: OnFailure,
    ) -> None:
        """`on_parsed` is called by this thread; it fetches the result by `take`."""
        super().__init__("IdentityReader", on_failure=on_failure)
        self._parse = parse
        self._on_parsed = on_parsed
        self._asked = threading.Event()
        self._wanted: bytes | None = None
        self._parsed: tuple[bytes, Result] | None = None

    def take(self, data: bytes) -> Result | None:
        """Return what came of `data`; None if it is not parsed yet: then the thread does it."""
        parsed = self._parsed
        if parsed is not None and parsed[0] == data:
            return parsed[1]
        self._wanted = data
        self._asked.set()
        return None

    def run(self) -> None:
        """Parse until the service is stopped."""
        while not self.stopping.is_set():
            self._asked.wait()
            self._asked.clear()
            data, self._wanted = self._wanted, None
            if data is not None and not self.stopping.is_set():
                self._parsed = data, self._parse(data)
                self._on_parsed()
                self._parsed = None  # it is in force, or the file has changed meanwhile

    def wake(self) -> None:
        """Let the thread see that it is to stop."""
        self._asked.set()
