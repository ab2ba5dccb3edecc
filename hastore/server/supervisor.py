"""Tell systemd how the node is: units of Type=notify, with a watchdog.

The protocol is sd_notify(3)'s: datagrams of lines to the socket that NOTIFY_SOCKET names. Without
that variable, that is under any other supervisor, nothing is sent.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Supervisor:
    """The supervisor of this process; the main thread calls it."""

    def __init__(self, environment: Mapping[str, str], pid: int) -> None:
        """Read what systemd has set: NOTIFY_SOCKET, WATCHDOG_USEC, WATCHDOG_PID."""
        address = environment.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_ms = 0.0  # how long the process may be silent; 0: for ever
        if environment.get("WATCHDOG_PID", str(pid)) == str(pid):
            text = environment.get("WATCHDOG_USEC", "")
            self._watchdog_ms = int(text) / 1000.0 if text.isdecimal() else 0.0
        self._said_ms = 0.0
        self._owes_ready = False  # it was not told yet
        self._status = ""

    @property
    def is_there(self) -> bool:
        """Whether anybody listens."""
        return bool(self._address)

    def ready(self, now_ms: float) -> None:
        """Say that the node serves."""
        self._said_ms = now_ms
        self._owes_ready = not self._tell("READY=1")

    def stopping(self) -> None:
        """Say that the node stops."""
        self._tell("STOPPING=1")

    def is_due(self, now_ms: float) -> bool:
        """Whether `alive` should be called: a second has passed, or half of the watchdog's time."""
        limit = min(1_000.0, self._watchdog_ms / 2) if self._watchdog_ms else 1_000.0
        return self.is_there and now_ms - self._said_ms >= limit

    def alive(self, status: str, now_ms: float) -> None:
        """Say that the node answers, and what `systemctl status` shows of it."""
        self._said_ms = now_ms
        lines = ["READY=1"] if self._owes_ready else []
        if self._watchdog_ms:
            lines.append("WATCHDOG=1")
        if status != self._status:
            lines.append("STATUS=" + status.replace("\n", " "))
        if lines and self._tell("\n".join(lines)):
            self._owes_ready, self._status = False, status

    def _tell(self, text: str) -> bool:
        """Return whether it was told, or nobody listens."""
        if not self._address:
            return True
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as one:
                one.setblocking(False)
                one.sendto(text.encode(), self._address)
        except OSError as failure:  # a full buffer, or a manager that restarts: told again
            log.warning("systemd was not told %r: %s", text, failure)
            return False
        return True
