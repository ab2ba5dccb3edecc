"""Floods of callers that a port refuses."""

import contextlib
import itertools
import socket

from hastore.bounded_log import BURST, EVERY_MS
from hastore.clock import SYSTEM_CLOCK
from hastore.ha.hello.peer import split_address
from tests.ha.nodes import wait_for

PLAIN = b"GET / HTTP/1.1\r\n\r\n"


def flood(address, noted, caplog, says, openings=(PLAIN,)):
    """Open 3 * BURST connections, in turn with these bytes, and check what the node wrote.

    `noted` must get each refusal, for the audit log; the node's own log has few lines with `says`.
    """
    begun_ms = SYSTEM_CLOCK.monotonic_ms()
    for opening in itertools.islice(itertools.cycle(openings), 3 * BURST):
        with socket.create_connection(split_address(address), timeout=60) as caller:
            caller.sendall(opening)
            with contextlib.suppress(ConnectionError):
                while caller.recv(4096):
                    pass
    wait_for(lambda: len(noted) == 3 * BURST, "the lines of the audit log")
    lines = [one for one in caplog.records if says in one.getMessage()]
    passed_ms = SYSTEM_CLOCK.monotonic_ms() - begun_ms
    assert BURST <= len(lines) <= BURST + 1 + passed_ms / EVERY_MS
