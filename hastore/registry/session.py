"""A session with ZooKeeper: few operations, each with a deadline; the only module that uses kazoo.

kazoo runs three threads for a session: one for the connection, two for callbacks. They end with
`close`, within about a second even if the server hangs, because `close` shuts the sockets down.
kazoo itself would wait 10 s and more, and also while a connection attempt hangs.

A session that has lost its connection is closed and replaced by a new one (`SessionService`). kazoo
could reconnect, but it states the last transaction that it has seen, and servers whose data was
lost or restored from an older copy refuse such a client for ever.

ZooKeeper 3.8 speaks TLS 1.2 unless it is told otherwise, so the registry takes that too; the nodes
of hastore speak TLS 1.3 among themselves. kazoo checks no host name and trusts the system's CAs;
`RegistrySocket` replaces its TLS.
"""

import atexit
import contextlib
import logging
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import (
    ACL,
    OPEN_ACL_UNSAFE,
    READ_ACL_UNSAFE,
    Permissions,
    make_acl,
    make_digest_acl,
)

from hastore.clock import Clock
from hastore.errors import RegistryError
from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import failure_text
from hastore.service import OnFailure, Service

_OLDEST = ssl.TLSVersion.TLSv1_2
_WHY = "name its secureClientPort, and give a certificate that it accepts, if it asks for one"


def registry_contexts(
    ca: str | None, certificate: str | None, key: str | None, *, watched: bool = False
) -> TlsContexts | None:
    """Return what a session needs to speak TLS; None without a CA. `watched`: as in TlsContexts.

    Raises ConfigError for files that are unreadable, open to others, or do not fit together.
    """
    if ca is None:
        return None
    return TlsContexts(TlsFiles(ca, certificate, key), watched=watched, oldest=_OLDEST)


class RegistrySocket(ssl.SSLSocket):
    """A connection to a server; `note` is told why TLS has failed, in one line."""

    host = ""
    note: Callable[[str], None]

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive; a server that refuses a certificate says so only now, in TLS 1.3."""
        try:
            return super().recv(buflen, flags)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as failure:
            self.note(failure_text(failure, self.host))
            raise

    def break_off(self) -> None:
        """Let every call that waits for the server fail now; any thread may call this."""
        socket.socket.shutdown(self, socket.SHUT_RDWR)


def wrap(
    plain: socket.socket, context: ssl.SSLContext, host: str, note: Callable[[str], None]
) -> RegistrySocket:
    """Return a socket over a connected one, before its handshake."""
    context.sslsocket_class = RegistrySocket
    found: Any = context.wrap_socket(plain, server_hostname=host, do_handshake_on_connect=False)
    found.host, found.note = host, note
    made: RegistrySocket = found
    return made


def shake(sock: RegistrySocket, timeout_s: float) -> None:
    """Do the handshake. Raises OSError; `note` was told why."""
    sock.settimeout(timeout_s)
    try:
        sock.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
        sock.note(f"{sock.host} ended the handshake of TLS: {_WHY}")
        raise
    except (ssl.SSLError, ValueError) as failure:
        sock.note(failure_text(failure, sock.host))
        raise
    except TimeoutError:
        sock.note(f"{sock.host} does not answer in TLS: {_WHY}")
        raise
    except OSError as failure:
        sock.note(f"{sock.host} ended the handshake of TLS ({failure}): {_WHY}")
        raise


SESSION_S = 6.0  # the servers' ticks bound it below; only the notes of cluster_notes.py go with it
ANSWER_S = 3.0
CONNECT_S = 2.0  # to one server
_CLOSE_S = 0.3  # how long a server may take to answer the end of a session
_SLICE_S = 0.05
_READS = 5  # of a znode that changes between the read of its data and that of its ACL
_SHARED_DEPTH = 2  # of /hastore and /hastore/<cluster>: everybody may create a child

# This module's callers say what has failed, once; kazoo's own lines would repeat it each second.
_kazoo_log = logging.getLogger("hastore.registry.kazoo")
_kazoo_log.setLevel(logging.CRITICAL + 1)
_DROPPED = "Connection dropped: "
_BROKEN = "socket connection error: "
_NO_CONNECTION = ("Cannot resolve ", _DROPPED)
_REASON_CHARS = 200


class _KazooLog(logging.Logger):
    """kazoo's own lines: dropped, but for the last reason why there is no connection."""

    def __init__(self) -> None:
        super().__init__(_kazoo_log.name, logging.CRITICAL + 1)
        self.reason: str | None = None

    def warning(self, msg: object, *args: object, **_options: Any) -> None:
        """Keep the reason."""
        form = str(msg)
        if args and form.startswith(_NO_CONNECTION):
            text = (form % args).removeprefix(_DROPPED).removeprefix(_BROKEN)
            self.reason = " ".join(text.split())[:_REASON_CHARS]


POLL_S = 10.0  # watches report changes at once; this is for a watch that was lost
PAUSE_S, PAUSE_S_MAX = 0.2, 2.0


class Unreachable(RegistryError):
    """No server answers, or the connection is lost."""


class Stopped(RegistryError):
    """The caller's `stopping` was set during an operation."""


class Znode(NamedTuple):
    """A znode's data, and the transactions that wrote it (mzxid) and made the znode (czxid).

    `ours`: only who has the session's credentials can have written it. Without credentials nobody
    can tell, and it is true.
    """

    data: bytes
    version: int
    changed: int
    made: int
    ours: bool = True


def _znode(data: bytes, stat: Any, *, ours: bool = True) -> Znode:
    return Znode(data, stat.version, stat.mzxid, stat.czxid, ours)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads and sockets; `abort` ends whatever waits for a server.

    The TLS is hastore's: kazoo's own would trust every CA of the system too.
    """

    def __init__(self, tls: TlsContexts | None) -> None:
        super().__init__()
        self.aborted = False
        self.tls_problem: str | None = None  # why the last attempt has failed
        self._tls = tls
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """Start the threads. They need no end in order when the process ends.

        In a forked child they do not exist, and kazoo's `stop` could wait for ever for their locks.
        """
        super().start()
        atexit.unregister(self.stop)

    def create_connection(
        self, address: Any, *, hostname: str, timeout: float, **_tls: Any
    ) -> socket.socket:
        """Connect to a server, in less time than kazoo allows."""
        if self.aborted:
            raise OSError("the session is closed")
        limit_s = min(timeout, CONNECT_S)
        made: socket.socket = super().create_connection(address, timeout=limit_s)
        self._socket = made
        try:
            if self._tls is not None:
                made = self._socket = wrap(
                    made, self._tls.client(), hostname, self._note_tls_problem
                )
                shake(made, limit_s)
        except (OSError, ValueError):
            made.close()
            raise
        if self.aborted:
            self.abort()
        return made

    def select(
        self, rlist: Any, wlist: Any, xlist: Any, timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait until a socket is ready; one whose TLS has decrypted bytes left is ready already."""
        left = [one for one in rlist if isinstance(one, ssl.SSLSocket) and one.pending()]
        found = super().select(rlist, wlist, xlist, 0 if left else timeout)
        return [*left, *(one for one in found[0] if one not in left)], found[1], found[2]

    def _note_tls_problem(self, problem: str) -> None:
        self.tls_problem = problem

    def spawn(self, func: Callable[..., object], *args: Any, **options: Any) -> threading.Thread:
        """Start one of kazoo's threads; a failure in it shows as an operation without an answer.

        kazoo fails so if something else than ZooKeeper answers.
        """

        def run() -> None:
            try:
                func(*args, **options)
            except Exception as failure:
                _kazoo_log.debug("a thread of kazoo's ended: %r", failure)

        thread: threading.Thread = super().spawn(run)
        return thread

    def abort(self) -> None:
        """Let each wait for the server fail now, and each later connection attempt."""
        self.aborted = True
        open_one = self._socket
        with contextlib.suppress(OSError):  # it is closed already
            if isinstance(open_one, RegistrySocket):
                open_one.break_off()
            elif open_one is not None:
                open_one.shutdown(socket.SHUT_RDWR)


class Session:
    """Operations on znodes; used by one thread.

    Each operation raises Unreachable if no answer comes in time, Stopped if `stopping` is set
    meanwhile, and RegistryError if ZooKeeper refuses it.
    """

    def __init__(
        self,
        servers: str,
        credentials: str | None,
        clock: Clock,
        *,
        tls: TlsContexts | None,
        stopping: threading.Event,
        on_event: Callable[[], None],
    ) -> None:
        """Connect. `credentials` is "user:password" for the scheme digest. `on_event()` is called
        after each change of a watched znode, and when the connection is lost.
        """
        self._servers = servers
        self._credentials = credentials
        self._clock = clock
        self._stopping = stopping
        self._handler = _Handler(tls)
        self._log = _KazooLog()
        retry = KazooRetry(
            max_tries=-1, delay=0.1, backoff=2, max_delay=0.5, sleep_func=self._handler.sleep_func
        )
        self._client = KazooClient(
            hosts=servers,
            timeout=SESSION_S,
            handler=self._handler,
            auth_data=[("digest", credentials)] if credentials else None,
            connection_retry=retry,
            command_retry=retry,
            logger=self._log,
        )
        self._on_event = on_event
        self._fired: deque[str] = deque()  # paths of watches
        self._was_lost = False  # the connection, if only for a moment
        self.secured = False  # the caller has checked the ACLs in this session
        self._client.add_listener(self._on_state)
        try:
            self._wait(self._client.start_async().wait, ANSWER_S)
        except RegistryError:
            self.close()
            raise
        except (OSError, RuntimeError) as failure:
            self.close()
            raise Unreachable(f"this process has no descriptor or thread for it: {failure}") from (
                failure
            )

    def raise_if_lost(self) -> None:
        """Raise Unreachable if the connection is lost, or was.

        kazoo may have reconnected by now; but then all watches are gone, and so may be the session.
        """
        if self._was_lost or not self._client.connected:
            raise Unreachable(f"the connection to {self._servers} is lost")

    def close(self) -> None:
        """End the session. Returns within about a second, whatever the servers do."""
        closer = threading.Thread(target=self._stop, name="RegistryClose", daemon=True)
        closer.start()
        closer.join(_CLOSE_S)
        if closer.is_alive():
            self._handler.abort()
            closer.join(3 * _CLOSE_S)

    def get(self, path: str) -> Znode | None:
        """Return a znode's data, and watch it; None if there is none (then nothing is watched).

        With credentials, a znode is `ours` if its ACL is exactly the one that this session gives to
        those that it makes. Others may have written any other one: before its ACL was closed, or
        because they made it.
        """
        try:
            for _ in range(_READS):
                data, stat = self._run(path, self._client.get_async(path, watch=self._on_watch))
                if self._credentials is None:
                    return _znode(data or b"", stat)
                acl, then = self._run(path, self._client.get_acls_async(path))
                if (then.czxid, then.mzxid) == (stat.czxid, stat.mzxid):
                    ours = _plain_set(acl) == _plain_set(self._acl(path))
                    return _znode(data or b"", stat, ours=ours)
        except NoNodeError:
            return None
        return _znode(data or b"", stat, ours=False)  # it changes all the time

    def children(self, path: str) -> list[str]:
        """Return the names of a znode's children, and watch them; none if there is no znode, which
        is then watched for.
        """
        for _ in range(2):
            with contextlib.suppress(NoNodeError):
                result = self._client.get_children_async(path, watch=self._on_watch)
                return list(self._run(path, result))
            if self._run(path, self._client.exists_async(path, watch=self._on_watch)) is None:
                break
        return []

    def write(self, path: str, data: bytes, found: Znode | None) -> Znode | None:
        """Create a znode, or replace the data that were `found`; None if it has changed since.

        A znode that is not `ours` is deleted and made anew in one step, with the right ACL.
        """
        if found is None:
            return self.create(path, data)
        if not found.ours:
            return self._replace(path, data, found)
        try:
            stat = self._run(path, self._client.set_async(path, data, found.version))
        except (BadVersionError, NoNodeError):
            return None
        return _znode(data, stat)

    def _replace(self, path: str, data: bytes, found: Znode) -> Znode | None:
        """Make a znode anew. Closing its ACL instead would keep what others write just before."""
        both = self._client.transaction()
        both.delete(path, found.version)
        both.create(path, data, acl=self._acl(path))
        for result in self._run(path, both.commit_async()):
            if isinstance(result, (RolledBackError, RuntimeInconsistency)):
                continue
            if isinstance(result, (BadVersionError, NoNodeError)):
                return None
            if isinstance(result, NotEmptyError):
                raise RegistryError(
                    f"{path} was made by others, and has children: delete it with all of them; the "
                    "node then writes it anew with its present role"
                )
            if isinstance(result, NoAuthError):
                raise self._no_access(path)
            if isinstance(result, KazooException):
                raise RegistryError(f"ZooKeeper refuses to replace {path}: {result!r}")
        made = self.get(path)
        return made if made is not None and made.ours and made.data == data else None

    def create(self, path: str, data: bytes, *, ephemeral: bool = False) -> Znode | None:
        """Create a znode, and the parents that it lacks; None if it exists, or a parent was deleted
        meanwhile. An `ephemeral` one goes with this session.
        """
        try:
            return self._create(path, data, ephemeral=ephemeral)
        except NoNodeError:
            self.create(path.rpartition("/")[0], b"")
        try:
            return self._create(path, data, ephemeral=ephemeral)
        except NoNodeError:
            return None

    def replace(self, path: str, data: bytes) -> None:
        """Replace the data of a znode, if it exists."""
        with contextlib.suppress(NoNodeError):
            self._run(path, self._client.set_async(path, data))

    def delete(self, path: str) -> None:
        """Delete a znode, if it exists."""
        with contextlib.suppress(NoNodeError):
            self._run(path, self._client.delete_async(path))

    def take_fired(self) -> set[str]:
        """Return the paths whose watches have fired since the last call."""
        return {self._fired.popleft() for _ in range(len(self._fired))}

    def sync(self, path: str) -> None:
        """Let the connected server catch up with the ensemble's leader."""
        with contextlib.suppress(NoNodeError):
            self._run(path, self._client.sync_async(path))

    def secure(self, path: str) -> str | None:
        """Give a znode the ACL that hastore would create it with, if it has another.

        Returns a text that says what was wrong with it, None if it was right. Raises RegistryError
        if this session may not change it.
        """
        if self._credentials is None:
            return None
        wanted = self._acl(path)
        try:
            present, _ = self._run(path, self._client.get_acls_async(path))
            if _plain_set(present) == _plain_set(wanted):
                return None
            self._run(path, self._client.set_acls_async(path, wanted))
        except NoNodeError:
            return None
        return f"{path} had another ACL; it is now writable only with this node's registry_acl_file"

    # -- internal

    def _create(self, path: str, data: bytes, *, ephemeral: bool) -> Znode | None:
        result = self._client.create_async(
            path, data, acl=self._acl(path), ephemeral=ephemeral, include_data=True
        )
        try:
            _, stat = self._run(path, result)
        except NodeExistsError:
            return None
        return _znode(data, stat)

    def _acl(self, path: str) -> list[ACL]:
        """Everybody may read, since clients need the addresses. Many groups share the upper two."""
        if self._credentials is None:
            return list(OPEN_ACL_UNSAFE)
        user, _, password = self._credentials.partition(":")
        own = make_digest_acl(user, password, all=True)
        if path.count("/") <= _SHARED_DEPTH:
            return [own, make_acl("world", "anyone", read=True, create=True)]
        return [own, *READ_ACL_UNSAFE]

    def _no_access(self, path: str) -> RegistryError:
        own = "no registry_acl_file is given"
        if self._credentials is not None:
            own = "registry_acl_file holds another user:password"
        return RegistryError(
            f"ZooKeeper refuses access to {path}: its ACL, or that of a znode above it, admits "
            f"others, and {own}; use the file with which the znode was made. If strangers made it, "
            "delete it"
        )

    def _on_state(self, state: str) -> None:
        if state != KazooState.CONNECTED:
            self._was_lost = True
            self._on_event()

    def _on_watch(self, event: Any) -> None:
        if event.path is not None:  # else kazoo says that the watch is gone, with the connection
            self._fired.append(event.path)
        self._on_event()

    def _stop(self) -> None:
        try:
            self._client.stop()
            self._client.close()
        except (KazooException, OSError, AttributeError) as failure:
            _kazoo_log.debug("the session was not ended in order: %r", failure)

    def _wait(self, wait: Callable[[float], Any], timeout_s: float) -> None:
        deadline = self._clock.monotonic_ms() + timeout_s * 1000.0
        while not wait(_SLICE_S):
            if self._stopping.is_set():
                raise Stopped("the caller stops")
            if self._clock.monotonic_ms() > deadline:
                why = self._handler.tls_problem or self._log.reason
                raise Unreachable(
                    f"no answer from {self._servers} within {timeout_s:g} s"
                    + ("" if why is None else f": {why}")
                )

    def _run(self, path: str, result: Any) -> Any:
        """Wait for an operation of kazoo's, and return its value."""
        self._wait(lambda slice_s: result.wait(slice_s) or result.ready(), ANSWER_S)
        try:
            return result.get_nowait()
        except (NoNodeError, NodeExistsError, BadVersionError):
            raise
        except NoAuthError as refused:
            raise self._no_access(path) from refused
        except InvalidACLError as refused:
            raise RegistryError(
                f"ZooKeeper refuses the ACL of {path}: check that registry_acl_file holds "
                "user:password"
            ) from refused
        except (KazooException, KazooTimeoutError) as failure:
            raise Unreachable(
                f"the connection to {self._servers} is lost ({type(failure).__name__})"
            ) from failure


class SessionService(Service):
    """A thread that keeps a session with ZooKeeper, and reads again whenever something changed.

    A lost session is replaced by a new one, which reads everything: after PAUSE_S, then after
    twice as long, up to PAUSE_S_MAX.
    """

    def __init__(self, name: str, *, on_failure: OnFailure) -> None:
        super().__init__(name, on_failure=on_failure)
        self.changed = threading.Event()  # for the session's `on_event`

    def run(self) -> None:
        """Keep a session and read, until `is_over`."""
        pause_s = PAUSE_S
        while not self.is_over():
            try:
                with contextlib.closing(self.connect()) as session:
                    self.begin(session)
                    while not self.is_over():
                        self.changed.clear()
                        self.read(session)
                        pause_s = PAUSE_S
                        self.wait_for_change()
                        session.raise_if_lost()
            except Stopped:
                return
            except RegistryError as failure:
                self.note_lost(str(failure))
            self.stopping.wait(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def is_over(self) -> bool:
        """Whether the thread ends."""
        return self.stopping.is_set()

    def connect(self) -> Session:
        """Return a new session. Raises RegistryError."""
        raise NotImplementedError

    def begin(self, session: Session) -> None:
        """Prepare a new session."""

    def read(self, session: Session) -> None:
        """Read all that is followed. Raises RegistryError: the session is lost."""
        raise NotImplementedError

    def wait_for_change(self) -> None:
        """Wait until `changed`, or until it is time to read in any case."""
        self.changed.wait(POLL_S)

    def note_lost(self, problem: str) -> None:
        """Note why there is no session."""
        raise NotImplementedError


def _plain_set(acls: Iterable[ACL]) -> set[tuple[int, str, str]]:
    return {(one.perms & Permissions.ALL, one.id.scheme, one.id.id) for one in acls}
