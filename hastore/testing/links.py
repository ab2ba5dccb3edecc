"""Links between the nodes of a group that can be cut, as a network without a route cuts them.

Each node's file names ports of this process instead of the other nodes' HA ports. What is said
over a cut link is kept and said once the link is whole again, as TCP does it: connections stay
open and silent, also new ones.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

_PIECE_BYTES = 64 * 1024


class Links:
    """The links of a group; `close` ends them."""

    def __init__(self, ha: Mapping[int, str]) -> None:
        """Listen for each pair of nodes; `ha` maps a node to its HA port, 127.0.0.1:PORT."""
        self._rules = threading.Condition()
        self._cut: set[int] = set()
        self._closed = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.addresses: dict[tuple[int, int], str] = {}  # under which a node finds another
        for source in ha:
            for target, address in ha.items():
                port = int(address.rpartition(":")[2])
                if source != target:
                    listener = socket.create_server(("127.0.0.1", 0))
                    self._sockets.append(listener)
                    self.addresses[source, target] = f"127.0.0.1:{listener.getsockname()[1]}"
                    self._start(self._accept, listener, {source, target}, ("127.0.0.1", port))

    def cut(self, number: int) -> None:
        """Cut a node off all others."""
        with self._rules:
            self._cut.add(number)

    def heal(self) -> None:
        """Make all links whole; what was said meanwhile arrives now."""
        with self._rules:
            self._cut.clear()
            self._rules.notify_all()

    def close(self) -> None:
        """End all connections and threads."""
        with self._rules:
            self._closed = True
            self._rules.notify_all()
            sockets = list(self._sockets)
            threads = list(self._threads)
        for one in sockets:
            _shut(one)
        for thread in threads:
            thread.join()
        for one in sockets:
            one.close()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        with self._rules:
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            thread.start()

    def _accept(self, listener: socket.socket, nodes: set[int], address: tuple[str, int]) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:  # `close` shut it down
                return
            if not self._keep(caller):
                return
            self._start(self._connect, caller, nodes, address)

    def _connect(self, caller: socket.socket, nodes: set[int], address: tuple[str, int]) -> None:
        called = socket.socket()
        try:
            if not self._wait(nodes) or not self._keep(called):
                return
            called.connect(address)
            back = threading.Thread(target=self._forward, args=(called, caller, nodes), daemon=True)
            back.start()
            self._forward(caller, called, nodes)
            back.join()
        except OSError:  # the node is down: end the connection, as its port would
            return
        finally:
            with self._rules:
                for one in (caller, called):
                    one.close()
                    if one in self._sockets:
                        self._sockets.remove(one)

    def _keep(self, one: socket.socket) -> bool:
        """Note a socket, so that `close` ends it; False if it has closed already."""
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._rules:
            if self._closed:
                one.close()
                return False
            self._sockets.append(one)
            return True

    def _forward(self, source: socket.socket, sink: socket.socket, nodes: set[int]) -> None:
        try:
            while piece := source.recv(_PIECE_BYTES):
                if not self._wait(nodes):
                    return
                sink.sendall(piece)
        except OSError:  # reset by one of both
            _shut(source)
        if self._wait(nodes):
            _shut(sink)

    def _wait(self, nodes: set[int]) -> bool:
        """Wait until the link is whole; False once all ends."""
        with self._rules:
            self._rules.wait_for(lambda: self._closed or not nodes & self._cut)
            return not self._closed


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended already
        return
