"""run_node: a node of either mode as a process.

It makes the node that the configuration file describes, handles signals, prints the ready line, and
raises an exception if the node fails. The main thread only waits, and tells systemd how the node is
(`Supervisor`): units of Type=notify, with a watchdog. The protocol is sd_notify(3)'s: datagrams of
lines to the socket that NOTIFY_SOCKET names. Without that variable, that is under any other
supervisor, nothing is sent.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial

from hastore.bounded_log import BoundedLines
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Mode
from hastore.errors import NodeFailedError, StoreBrokenError, UsageError
from hastore.fs.filesystem import GROUP_READABLE, REAL
from hastore.server.base_node import BaseNode
from hastore.server.node import Node
from hastore.server.node_log import NodeLog
from hastore.server.role_source import ConfigWatch
from hastore.service import Sleeper

log = logging.getLogger(__name__)

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
READY_WAIT_S = 60.0
_failures = BoundedLines(log, level=logging.ERROR, burst=1, every_ms=60_000.0)
LOOK_S = 0.1  # so often the main thread looks whether the node has failed


def run_node(path: str, overrides: Mapping[str, str], kind: str | None) -> int:
    """Run a node in the foreground until SIGTERM or SIGINT; return its exit code.

    `kind` is the kind of node that the command asks for. It is only logged: the command has
    checked it against the role in the file. Raises UsageError if HASTORE_LOG is not a log level,
    the errors of `Node.start`, NodeFailedError if a thread of the node failed, and StoreBrokenError
    if the store closed because of a failure.
    """
    level = os.environ.get("HASTORE_LOG", "INFO").upper()
    if level not in LOG_LEVELS:
        known = ", ".join(LOG_LEVELS)
        raise UsageError(f"HASTORE_LOG={level} is not a log level; use one of {known}")
    node_log = NodeLog(level)
    log.debug("starting as %s", kind or "the role in the file")
    watch = ConfigWatch(path, overrides)
    node = _make(watch, node_log)
    orders = Orders()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, orders.take)
    _raise_descriptor_limit()
    sys.setswitchinterval(0.0005)
    supervisor = Supervisor(os.environ, os.getpid())
    node.start()
    try:
        if _announce(node, orders):
            supervisor.ready(SYSTEM_CLOCK.monotonic_ms())
        while not orders.ending and not node.failed.is_set():
            orders.wait(LOOK_S)
            if orders.reread:
                orders.reread = False
                node_log.reopen()
                node.wake()
            if supervisor.is_due(SYSTEM_CLOCK.monotonic_ms()):
                supervisor.alive(state_of(node), SYSTEM_CLOCK.monotonic_ms())
    finally:
        supervisor.stopping()
        _end(node)
    return 0


def state_of(node: BaseNode) -> str:
    """Return what the node is, in a line; it hangs if the node does, as its status would."""
    try:
        status = node.backend.status()
        why_not = node.backend.not_ready()
    except Exception as failure:  # the HTTP port answers 500; the node goes on
        _failures.write("the node's status failed: %r", failure)
        return f"the node's status failed: {failure!r}"
    state = f"{status['role']}, epoch {status['epoch']}"
    return state if why_not is None else f"{state}, not ready: {why_not}"


class Orders:
    """What signals have asked the main thread for, which waits here.

    The handler runs in the main thread, between any two of its steps. So it takes no lock: an
    Event that this thread waits for may be locked by this thread just then, and to set it would
    wait for ever. A Sleeper is made for that.
    """

    def __init__(self) -> None:
        self.ending = False  # SIGTERM or SIGINT
        self.reread = False  # SIGHUP: the file shall be read again now
        self._sleeper = Sleeper()

    def take(self, number: int, _frame: object) -> None:
        """Note a signal; this is its handler."""
        if number == signal.SIGHUP:
            self.reread = True
        else:
            self.ending = True
        self._sleeper.wake()

    def wait(self, timeout_s: float) -> None:
        """Wait for a signal; one that came before it ends a wait too."""
        self._sleeper.sleep(timeout_s)


def _make(watch: ConfigWatch, node_log: NodeLog) -> BaseNode:
    """Return the node that the file describes; the first file's mode stays."""
    config, path = watch.first(), os.path.abspath(watch.path)
    shared = config.store.group_read
    os.umask(0o027 if shared else 0o077)  # also for what no FileSystem makes, such as a core file
    node_log.follow(config)
    make: Callable[..., BaseNode] = partial(Node, config_refused_ms=lambda: watch.refused_ms)
    if config.mode is Mode.DLEDGER:
        from hastore.server import dledger_node  # mode classic does not need it

        make = dledger_node.DLedgerNode
    return make(
        config, watch.follow, config_path=path, config_problem=lambda: watch.problem,
        parse=watch.parse,
        fs=GROUP_READABLE if shared else REAL,
    )  # fmt: skip


def _end(node: BaseNode) -> None:
    """Stop a node. Raise the failure that ended the node, if any; the command prints it last."""
    try:
        node.stop()
    except Exception:
        if node.failure is None:
            raise
        log.exception("the stop failed too")  # the thread's failure is raised below
    if node.backend.store.broken_reason is not None:
        raise StoreBrokenError(str(node.backend.store.broken_reason))
    if node.failure is not None:
        raise NodeFailedError(
            f"node {node.config.node} has ended itself: {node.failure}; the traceback "
            "is further up on stderr. Start the node again, or let a supervisor do so; if the "
            "failure comes back, report it"
        )


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, so that many clients fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(node: BaseNode, orders: Orders) -> bool:
    """Print the ready line once the node serves, or has logged what it waits for.

    If neither happens within READY_WAIT_S, log a warning and print the line all the same. Return
    False if the node ends instead.
    """
    waited = 0.0
    while not node.roles.settled.wait(0.05):
        waited += 0.05
        if orders.ending or node.failed.is_set():
            return False
        if waited > READY_WAIT_S:
            log.warning("the node does not serve yet: %s", node.roles.reason)
            break
    _print(node.ready_line())
    return True


def _print(line: str) -> None:
    """Print a line to stdout. A full disk there ends no node, which may be needed to take over."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        raise
    except OSError as failure:
        log.warning("the ready line was not written to stdout: %s; make room", failure.strerror)
        with contextlib.suppress(OSError):  # what print has kept must not fail again at the end
            os.dup2(REAL.open(os.devnull).fileno(), sys.stdout.fileno())


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
