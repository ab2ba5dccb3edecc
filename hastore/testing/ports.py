"""Free ports of loopback that nobody else takes meanwhile."""

from __future__ import annotations

import pathlib
import random
import socket
import weakref

from hastore.errors import HastoreError

_RANGE = "/proc/sys/net/ipv4/ip_local_port_range"


class Ports:
    """Free ports of loopback, reserved until closed, or until this object is gone.

    They are below the kernel's range of ephemeral ports, so that no outgoing connection takes one
    while its node is down. A socket that is bound but does not listen holds each of them.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        weakref.finalize(self, _close_all, self._held)
        self._below = min(int(pathlib.Path(_RANGE).read_text().split()[0]), 60_000)

    def take(self, *beside: int) -> int:
        """Reserve and return one more port; reserve those at the distances `beside` from it too."""
        low = 10_000 if self._below > 12_000 else 1_025
        for _ in range(1_000):
            port = random.SystemRandom().randrange(low, self._below)
            taken: list[socket.socket] = []
            try:
                for distance in (0, *beside):
                    taken.append(socket.socket())
                    taken[-1].bind(("127.0.0.1", port + distance))
            except OSError:
                _close_all(taken)
                continue
            for one in taken:
                # Now a listener with SO_REUSEADDR can bind the port, but another Ports cannot.
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held += taken
            return port
        raise HastoreError("there is no free port on 127.0.0.1: end what holds them")

    def addresses(self, count: int) -> dict[int, dict[str, str]]:
        """Return the addresses of `count` nodes, in the form of the configuration file."""
        return {
            number: {
                "api": f"tcp://127.0.0.1:{self.take()}",
                "ha": f"127.0.0.1:{self.take()}",
                "http": f"127.0.0.1:{self.take()}",
            }
            for number in range(1, count + 1)
        }

    def close(self) -> None:
        """Release all ports."""
        _close_all(self._held)


def _close_all(held: list[socket.socket]) -> None:
    while held:
        held.pop().close()
