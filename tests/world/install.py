"""Give hastore's modules the world's clocks, threads, sockets and random numbers.

The code stays as it is: a module's global `threading`, say, is replaced by a module that has the
world's classes and, for all else, the real one's contents. The file system is an argument of a node
already. Only a process that does nothing else may do this (tests/world/walk.py forks one).
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures._base as futures_base
import fcntl
import importlib
import os
import pkgutil
import queue
import random
import secrets
import select
import selectors
import socket
import sys
import threading
import time
from types import ModuleType
from typing import Any

from tests.world import descriptors, polls, sockets, threads
from tests.world.scheduler import world

# Packages of which every module is loaded first: a late import would get the real modules.
LOADED = (
    "hastore.client", "hastore.config", "hastore.dledger", "hastore.fs", "hastore.ha",
    "hastore.history", "hastore.protocol", "hastore.record", "hastore.registry", "hastore.repair",
    "hastore.security", "hastore.server", "hastore.store",
)  # fmt: skip
_NEEDS_MORE = ("zmq_transport",)  # of modules that need what a node does not


def load_all() -> None:
    """Import every module that a node or a client may need."""
    for name in LOADED:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not found.name.endswith(_NEEDS_MORE):
                importlib.import_module(found.name)
    importlib.import_module("numpy")


def _like(real: ModuleType, **replaced: Any) -> ModuleType:
    made = ModuleType(real.__name__)
    made.__dict__.update(real.__dict__)
    made.__dict__.update(replaced)
    return made


class _Secrets:
    """`secrets`, from the walk's seed."""

    @staticmethod
    def token_bytes(size: int = 32) -> bytes:
        return world().product.randbytes(size)

    @classmethod
    def token_hex(cls, size: int = 32) -> str:
        return cls.token_bytes(size).hex()

    @classmethod
    def token_urlsafe(cls, size: int = 32) -> str:
        return cls.token_hex(size)

    @staticmethod
    def randbits(bits: int) -> int:
        return world().product.getrandbits(bits)


class _Draws:
    """A module-level random.SystemRandom."""

    def choice(self, items: Any) -> Any:
        return world().product.choice(items)


def _random_module() -> ModuleType:
    def seeded(*seed: Any) -> random.Random:
        return random.Random(*(seed or (world().product.random(),)))

    return _like(
        random,
        Random=seeded,
        random=lambda: world().product.random(),
        choice=lambda items: world().product.choice(items),
        randrange=lambda *range_: world().product.randrange(*range_),
        randint=lambda low, high: world().product.randint(low, high),
        shuffle=lambda items: world().product.shuffle(items),
        uniform=lambda low, high: world().product.uniform(low, high),
    )


def _replaced() -> dict[int, Any]:
    """Return what replaces which object, by its id."""
    lock_like = {
        name: getattr(threads, name) for name in ("Lock", "RLock", "Condition", "Event", "Thread")
    }
    pairs: list[tuple[Any, Any]] = [
        (threading, _like(
            threading, **lock_like, current_thread=threads.current_thread,
            get_ident=threads.get_ident,
        )),
        (time, _like(
            time, sleep=threads.sleep, monotonic=threads.monotonic, time=threads.wall,
            time_ns=threads.wall_ns, monotonic_ns=threads.monotonic_ns,
            clock_gettime=threads.clock_gettime,
            perf_counter=threads.elapsed, perf_counter_ns=threads.elapsed_ns,
            thread_time=threads.elapsed, process_time=threads.elapsed,
        )),
        (queue, _like(queue, SimpleQueue=threads.SimpleQueue, Queue=threads.Queue)),
        (queue.SimpleQueue, threads.SimpleQueue),
        (concurrent.futures.ThreadPoolExecutor, threads.ThreadPoolExecutor),
        (socket, _like(
            socket, socket=sockets.Socket, create_connection=sockets.create_connection,
            create_server=sockets.create_server, socketpair=sockets.socketpair,
            gethostname=lambda: world().host.name,
        )),
        (select, _like(
            select, epoll=polls.Epoll, poll=polls.Poll, select=polls.select_call
        )),
        (selectors, _like(selectors, DefaultSelector=polls.Selector)),
        (os, _like(
            os, eventfd=descriptors.eventfd, eventfd_read=descriptors.eventfd_read,
            eventfd_write=descriptors.eventfd_write, close=descriptors.close,
            pipe2=descriptors.pipe2, splice=descriptors.splice, sendfile=descriptors.sendfile,
            getpid=lambda: world().host.process,
        )),
        (fcntl, _like(fcntl, ioctl=descriptors.ioctl, fcntl=descriptors.fcntl_call)),
        (secrets, _Secrets),
        (random, _random_module()),
    ]  # fmt: skip
    return {id(real): made for real, made in pairs}


class _Reading:
    """Whether the reads of a thread may wait for the disk: a `threading.local` of the file system.

    Greenlets share that of their OS thread.
    """

    @property
    def may_wait(self) -> bool:
        task = world().current
        return True if task is None else bool(task.locals.get("may_wait", True))

    @may_wait.setter
    def may_wait(self, value: bool) -> None:
        task = world().current
        if task is not None:
            task.locals["may_wait"] = value


def _install_kazoo(replaced: dict[int, Any]) -> None:
    """Replace what a class and a function of kazoo's keep of the real modules."""
    handler = sys.modules["kazoo.handlers.threading"]
    handler.SequentialThreadingHandler.queue_impl = threads.Queue
    handler.SequentialThreadingHandler.sleep_func = staticmethod(threads.sleep)
    select_call = sys.modules["kazoo.handlers.utils"].selector_select
    select_call.__defaults__ = (None, replaced[id(selectors)])


def install() -> None:
    """Replace the modules' globals, for good."""
    replaced = _replaced()
    modules = [
        module for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in ("hastore", "kazoo")
    ]  # fmt: skip
    for module in [*modules, futures_base]:
        for name, value in list(vars(module).items()):
            made = replaced.get(id(value))
            if made is not None:
                setattr(module, name, made)
    _install_kazoo(replaced)
    sys.modules["hastore.fs.filesystem"]._reading = _Reading()  # type: ignore[attr-defined]
    sys.modules["hastore.security.slots"]._random = _Draws()  # type: ignore[attr-defined]
