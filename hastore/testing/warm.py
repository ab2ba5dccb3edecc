"""Start a program of hastore as a real process without the time that its imports take.

    process = warm.start(["bin/hastore", "serve", "-c", path], stdout=out)
    process.kill()
    assert process.wait() == -signal.SIGKILL

A process of its own costs 0.4 s of CPU before its node begins; a fork of a server that has
imported hastore (warm_server.py) costs 0.01 s. It has its own session, memory, threads, signals,
descriptors, environment and exit code, and leaves the same traces, so that a test can kill, pause
and wait for it. Only these differ: /proc shows the server's command line, and what an import says
or does has happened before.
"""

from __future__ import annotations

import atexit
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

from hastore.errors import HastoreError

ANSWER_S = 60.0  # a bound for what takes milliseconds on a quiet machine
UNKNOWN_CODE = 255  # the exit code of a process of which only the parent of a fork knows it
SERVER = pathlib.Path(__file__).with_name("warm_server.py")


class _Server:
    """The server of this test process; it ends with it. A fork of the process has its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asked = 0  # the number of the last request
        self._unheard: set[int] = set()  # starts whose answer an interrupt has left unread
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.settimeout(ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int | None:
        """Send a request; return the number in its answer.

        An exception of a signal handler, such as a test's time limit, may interrupt it anywhere.
        """
        with self._lock:
            self._asked += 1
            number = self._asked
            try:
                text = json.dumps({"number": number, **request})
                socket.send_fds(self._sock, [text.encode()], list(descriptors))
                return self._answer_to(number)
            except BaseException:
                if "start" in request:
                    self._unheard.add(number)
                raise

    def _answer_to(self, number: int) -> int | None:
        """Return the answer to a request; those before are of requests that were interrupted."""
        while True:
            try:
                answer = self._sock.recv(1_024)
            except TimeoutError:
                text = f"the server of warm processes has not answered for {ANSWER_S:g} s"
                raise HastoreError(text) from None
            if not answer:
                code = self._process.poll()
                raise HastoreError(f"the server of warm processes has ended: exit code {code}")
            which, value = json.loads(answer)
            if which in self._unheard:
                self._unheard.discard(which)
                os.kill(value, signal.SIGKILL)  # nobody knows this process
            if which == number:
                found: int | None = value
                return found

    def close(self) -> None:
        """End the server and all its processes."""
        self._sock.close()
        self._process.wait()

    def leave(self) -> None:
        """Let the parent of this fork have it alone: it ends with the last who has its socket."""
        atexit.unregister(self.close)
        self._sock.close()
        self._process.returncode = 0  # it is no child of this process, so nobody waits for it


_server: _Server | None = None
_server_lock = threading.Lock()  # groups may start in several threads at once


def _after_fork() -> None:
    """Begin anew in a forked child: over one socket, each would take the other's answers."""
    global _server, _server_lock
    _server_lock = threading.Lock()  # a thread of the parent may have held it
    if _server is not None:
        _server.leave()
        _server = None


os.register_at_fork(after_in_child=_after_fork)


def _ask(request: Mapping[str, Any], descriptors: Sequence[int] = ()) -> int | None:
    global _server
    with _server_lock:
        if _server is None:
            _server = _Server()
    return _server.ask(request, descriptors)


class WarmProcess:
    """A process of the server, with the methods of subprocess.Popen.

    A forked child of whoever started it can look and send signals; it learns no exit code.
    """

    def __init__(self, pid: int, command: Sequence[str]) -> None:
        self.pid = pid
        self.args = list(command)
        self.returncode: int | None = None
        self._end = os.pidfd_open(pid)  # readable once the process has ended
        self._lock = threading.Lock()
        self._parent = os.getpid()
        weakref.finalize(self, os.close, self._end).atexit = False  # `wait` may come later

    def poll(self) -> int | None:
        """Return the exit code, minus the signal that ended the process; None if it runs."""
        if os.getpid() != self._parent:
            return UNKNOWN_CODE if self._has_ended(0) else None
        # Only this reaps the process, so until then no other one can have its number.
        with self._lock:
            if self.returncode is None:
                self.returncode = _ask({"poll": self.pid})
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code. Raises TimeoutExpired."""
        if self.poll() is None:
            # The server reaps a process only when asked, so this descriptor tells of the end.
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        code = self.poll()
        assert code is not None
        return code

    def _has_ended(self, timeout: float | None) -> bool:
        """Wait for the end at most so many seconds; return whether it has come."""
        ends = select.poll()
        ends.register(self._end, select.POLLIN)
        return bool(ends.poll(None if timeout is None else timeout * 1_000))

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    command: Sequence[str],
    *,
    stdin: int | IO[bytes] = subprocess.DEVNULL,
    stdout: int | IO[bytes] = subprocess.DEVNULL,
    stderr: int | IO[bytes] = subprocess.DEVNULL,
    namespace: str | None = None,
) -> WarmProcess:
    """Start a Python script with its arguments, in a session of its own; `command` begins with it.

    It has this process's environment and working directory. Streams are files or descriptors;
    `namespace` is the path of a network namespace, by default that of the calling thread.
    """
    null = os.open(os.devnull, os.O_RDWR)
    network = os.open(namespace or "/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        streams = [
            null if one == subprocess.DEVNULL else one if isinstance(one, int) else one.fileno()
            for one in (stdin, stdout, stderr)
        ]
        request = {
            "start": list(command), "environment": dict(os.environ), "folder": os.getcwd(),
        }  # fmt: skip
        pid = _ask(request, [*streams, network])
    finally:
        os.close(null)
        os.close(network)
    assert pid is not None
    return WarmProcess(pid, command)
