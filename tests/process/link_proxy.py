"""A forwarding proxy on each link between two nodes, for systems without network namespaces.

Each node's file has ports of the proxies instead of the other nodes' HA ports. A cut direction
keeps its bytes until it is restored, as if TCP sent them again: the connection stays open and
silent. Partial loss becomes a delay, the time after which TCP would send again. One difference to a
real network remains: a connection through a cut link is accepted, and then silent.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.process.harness import Ports
from tests.process.networks import Addresses, Network

PIECE_BYTES = 16 * 1024
AGAIN_S = 0.2  # until TCP sends a lost packet again
SLOW_BYTES_PER_S = 128 * 1024
SLOW_DELAY_S = 0.02
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by a reset


class LinkProxies(Network):
    """A network on loopback; every link between two nodes goes through this process."""

    name = "proxies"

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._ports = Ports()
        self.addresses = self._ports.addresses(count)
        self._rules = threading.Condition()
        self._closed = False
        self._unplugged: set[int] = set()
        self._links: list[tuple[int, int, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._listeners: dict[tuple[int, int], socket.socket] = {}
        for source in self.addresses:
            for target in self.addresses:
                if source != target:
                    listener = socket.create_server(("127.0.0.1", 0))
                    self._listeners[source, target] = listener
                    self._start(self._accept, source, target, listener)

    def seen_by(self, number: int) -> Addresses:
        """Return the addresses with the proxies' ports as the other nodes' HA ports."""
        seen = {n: dict(address) for n, address in self.addresses.items()}
        for (source, target), listener in self._listeners.items():
            if source == number:
                seen[target]["ha"] = f"127.0.0.1:{listener.getsockname()[1]}"
        return seen

    def close(self) -> None:
        """End all connections and threads."""
        with self._rules:
            self._closed = True
            self._rules.notify_all()
        for listener in self._listeners.values():
            _shut(listener)
        self._reset(set(self.addresses))
        # A connecting thread adds its sockets before it checks `_closed`, so none is missed.
        while self._threads:
            thread = self._threads.pop()
            thread.join(60)
            assert not thread.is_alive(), "a link of the proxy hangs"
        for listener in self._listeners.values():
            listener.close()
        for _, _, each in self._links:
            each.close()
        self._ports.close()

    # ---- the faults

    def unplug(self, number: int) -> None:
        """Reset the connections of a node, and block new ones."""
        with self._rules:
            self._unplugged.add(number)
        self._reset({number})

    def plug(self, number: int) -> None:
        """Allow the node's connections again."""
        with self._rules:
            self._unplugged.discard(number)
            self._rules.notify_all()

    def _changed(self, source: int) -> None:
        with self._rules:
            self._rules.notify_all()

    def _paced(self, number: int) -> None:
        with self._rules:
            self._rules.notify_all()

    def _reset(self, numbers: set[int]) -> None:
        with self._rules:
            ended = [each for each in self._links if {each[0], each[1]} & numbers]
        for _, _, each in ended:
            _shut(each)

    # ---- forwarding

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        with self._rules:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(
                target=work, args=arguments, name="link proxy", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _accept(self, source: int, target: int, listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:  # `close` shut it down
                return
            if self._closed:
                caller.close()
                return
            self._start(self._connect, source, target, caller)

    def _connect(self, source: int, target: int, caller: socket.socket) -> None:
        """Connect to the target when both directions are open, and forward."""
        with self._rules:
            self._links.append((source, target, caller))
        if self._pass(source, target) and self._pass(target, source):
            host, port = self.addresses[target]["ha"].rsplit(":", 1)
            try:
                answerer = socket.create_connection((host, int(port)), timeout=60)
            except OSError:  # the node is down: refuse, as its port would
                self._end(caller)
                return
            answerer.settimeout(None)
            for each in (caller, answerer):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._rules:
                self._links.append((source, target, answerer))
                refused = self._closed or {source, target} & self._unplugged
            if refused:
                _shut(caller)
                _shut(answerer)
            back = threading.Thread(
                target=self._forward, args=(target, source, answerer, caller), daemon=True
            )
            back.start()
            self._forward(source, target, caller, answerer)
            back.join()
            self._end(answerer)
        self._end(caller)

    def _end(self, one: socket.socket) -> None:
        with self._rules:
            self._links = [link for link in self._links if link[2] is not one]
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        one.close()

    def _pass(self, source: int, target: int) -> bool:
        """Wait until `source` may send to `target`; return False if the proxies end meanwhile."""

        def open_now() -> bool:
            cut = self._lost.get((source, target), 0.0) >= 1
            return self._closed or not (cut or {source, target} & self._unplugged)

        with self._rules:
            self._rules.wait_for(open_now)
            share = self._lost.get((source, target), 0.0)
            slow = bool({source, target} & self._slow)
        if random.random() < share:
            time.sleep(AGAIN_S)
        if slow:
            time.sleep(SLOW_DELAY_S)
        return not self._closed

    def _forward(
        self, source: int, target: int, sender: socket.socket, receiver: socket.socket
    ) -> None:
        try:
            while piece := sender.recv(PIECE_BYTES):
                if not self._pass(source, target):
                    break
                if {source, target} & self._slow:
                    time.sleep(len(piece) / SLOW_BYTES_PER_S)
                receiver.sendall(piece)
        except OSError:  # reset by a node, or by `unplug`
            _shut(sender)
        self._pass(source, target)  # the end of a connection does not pass a cut link either
        _shut(receiver, socket.SHUT_WR)


def _shut(one: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    try:
        one.shutdown(how)
    except OSError:  # it has ended already
        return
