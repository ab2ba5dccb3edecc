"""Resolves host names in a thread of its own, because a look-up may take seconds."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

Targets = list[tuple[int, Any]]  # (address family, argument of `connect`)


def numeric_targets(host: str, port: int) -> Targets:
    """Return the targets of an IPv4 or IPv6 address; empty when the host is a name."""
    try:
        return _targets(host, port, socket.AI_NUMERICHOST)
    except (OSError, ValueError):  # ValueError: the host cannot be a name
        return []


def look_up(host: str, port: int, found: Callable[[Targets], None]) -> None:
    """Look a name up in a new thread, which calls `found` with the targets, [] if unknown."""

    def run() -> None:
        targets: Targets = []
        try:
            targets = _targets(host, port, 0)
        except (OSError, ValueError) as failure:
            log.debug("client: %s: %s", host, failure)
        finally:  # also after any failure, so that no connection waits for ever
            found(targets)

    try:
        threading.Thread(target=run, name=f"lookup {host}", daemon=True).start()
    except RuntimeError as failure:  # no more threads, or the interpreter ends
        log.debug("client: %s: %s", host, failure)
        found([])


def _targets(host: str, port: int, flags: int) -> Targets:
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return list(dict.fromkeys((int(family), target) for family, _, _, _, target in infos))
