"""Fork processes that have imported hastore already; warm.py talks to this server.

    python hastore/testing/warm_server.py DESCRIPTOR

DESCRIPTOR is a socket. A request is a JSON object: `start` names a script, its arguments, the
environment and the working directory, and comes with the process's stdin, stdout and stderr, and
its network namespace; `poll` asks whether a process has ended, and reaps it. An answer has the
`number` of its request. At the end of the socket all processes are killed. The server has one
thread, so a fork copies all that there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULES = (
    "hastore.cli.main",
    "hastore.cli.nodes",
    "hastore.cli.status",
    "hastore.server.run",
    "hastore.server.dledger_node",
    "hastore.store.derived.vector_walk",
    "numpy",
)
OPTIONAL = ("kazoo.client",)
REQUEST_BYTES_MAX = 1 << 20
CLONE_NEWNET = 0x40000000


def serve(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Answer requests. In a new process, return its request and descriptors; else None."""
    running: set[int] = set()
    ended: dict[int, int] = {}  # exit codes, in case that an answer was not heard
    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, 4)
        if not data:
            break
        request = json.loads(data)
        answer: int | None
        if "poll" in request:
            pid = request["poll"]
            if pid in running:
                reaped, status = os.waitpid(pid, os.WNOHANG)
                if reaped:
                    running.discard(pid)
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        else:
            answer = os.fork()
            if answer == 0:
                sock.close()
                return request, descriptors
            running.add(answer)
            ended.pop(answer, None)
        for descriptor in descriptors:
            os.close(descriptor)
        sock.send(json.dumps([request["number"], answer]).encode())
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    return None


def become(request: dict[str, Any], descriptors: list[int], path: list[str]) -> None:
    """Give this process what a new interpreter would have: streams, arguments, environment."""
    os.setsid()
    _enter(descriptors.pop())
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    coding, errors = sys.stdout.encoding, sys.stdout.errors
    stdin = open(0, encoding=coding, errors=errors, closefd=False)
    stdout = open(1, "w", encoding=coding, errors=errors, closefd=False)
    stderr = open(
        2, "w", buffering=1, encoding=coding, errors="backslashreplace", closefd=False
    )
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = stdin, stdout, stderr  # type: ignore[misc]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = request["start"]
    place = os.path.dirname(sys.argv[0])
    # A module of hastore is run as with `python -m`: its neighbours are no top-level modules.
    sys.path = [str(ROOT) if place.startswith(str(ROOT / "hastore")) else place, *path]


def _enter(namespace: int) -> None:
    """Move this process, which has one thread, into the network namespace of a descriptor."""
    # To enter another one needs a right; to stay does not.
    if not os.path.samestat(os.fstat(namespace), os.stat("/proc/self/ns/net")):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace, CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"setns: {os.strerror(number)}")
    os.close(namespace)


def main() -> None:
    """Import hastore, serve, and run the script of a new process."""
    path = sys.path[1:]
    sys.path[0] = str(ROOT)
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # so that numpy starts no thread here
    for name in MODULES:
        importlib.import_module(name)
    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    work = serve(sock)
    if work is not None:
        become(*work, path)
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
