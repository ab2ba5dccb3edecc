"""TlsContexts: the TLS settings of a node or a client, built from its files.

They are built again when the files change, so that certificates are replaced without a restart.
TLS 1.3 only, except to ZooKeeper (registry/session.py). Certificates are verified against the one
CA that is configured, never against the system's. Sessions are not resumed, so each connection
verifies certificates anew.
"""

import logging
import os
import ssl
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass

from hastore.clock import SYSTEM_CLOCK, Clock
from hastore.config.model import Config, Wire
from hastore.errors import ConfigError
from hastore.security.tls_engine import NodeName, PeerCertificate, TlsEngine

log = logging.getLogger(__name__)

CHECK_MS = 2_000.0  # the files are looked at not more often
RETRY_MS = 60_000.0  # files that were not valid may be so later, without a change: "not valid yet"
SHARED_MAX = 16  # contexts that are kept for clients; each has some 100 KiB
_NEVER_MS = float("inf")
_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which the module ssl does not name
CAS_MAX = 16  # of a file with more nobody looks for the one that has signed a certificate
SOON_MS = 14 * 86_400_000  # a certificate that expires within this time is a problem in the status


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of one end: the CA, and its own certificate with its private key, if any."""

    ca: str
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The contexts that were built from one state of the files."""

    server: ssl.SSLContext | None  # a client's certificate is asked for, but may be absent
    strict_server: ssl.SSLContext | None  # a client without a certificate is refused
    client: ssl.SSLContext  # the server's name is checked
    node_client: ssl.SSLContext  # the caller checks which node it is (the URI) instead
    own: PeerCertificate | None  # this node's certificate; of others only if it is watched
    signed_until_s: float  # when the one of several CAs ends that has signed `own`


class TlsContexts:
    """The contexts of a node or of a client; any thread may use it.

    With `node` the certificate must be that node's, and valid now: the constructor connects one
    context with another in memory to see it. Raises ConfigError, with the remedy, for files that
    are unreadable, open to others, or do not fit together. Later a change that is not valid keeps
    the contexts in force, logs a warning, and shows in `problems`. With `watched` the ends of a
    certificate that is no node's show there too; a client has no status, and does without.
    """

    def __init__(
        self,
        files: TlsFiles,
        *,
        node: NodeName | None = None,
        watched: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    ) -> None:
        self.files = files
        self._oldest = oldest
        self._node = node
        self._watched = watched
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._signature()
        self._loaded = self._load()
        self._problem: str | None = None
        self._checked_ms = self._loaded_ms = clock.monotonic_ms()

    @property
    def up_to_date(self) -> bool:
        """Whether the files are those that were built from; looks at them now."""
        with self._lock:
            return self._problem is None and self._signature() == self._seen

    def server(self, *, require_certificate: bool) -> ssl.SSLContext:
        """Return the context of a server, which needs a certificate of its own.

        A client's certificate is always verified if the client sends one.
        """
        loaded = self._current()
        context = loaded.strict_server if require_certificate else loaded.server
        if context is None:
            raise ConfigError("a TLS server needs a certificate and its key; configure both")
        return context

    def client(self) -> ssl.SSLContext:
        """Return the context of a client, which checks the server's name (TlsEngine's `host`)."""
        return self._current().client

    def node_client(self) -> ssl.SSLContext:
        """Return the context of a node that calls another; the caller checks `peer.node` itself."""
        return self._current().node_client

    def ends_ms(self) -> dict[str, float]:
        """Return when each certificate ends (wall time): `node`, this end's own, and `ca`.

        Of several certificates of the CA the one that ends last counts. With the one of them that
        has signed it, the own one ends too.
        """
        loaded, found = self._current(), dict[str, float]()
        if loaded.own is not None:
            found["node"] = min(loaded.own.not_after_s, loaded.signed_until_s) * 1000.0
        ends = [str(one["notAfter"]) for one in loaded.client.get_ca_certs() if "notAfter" in one]
        if ends:
            found["ca"] = max(ssl.cert_time_to_seconds(end) for end in ends) * 1000.0
        return found

    def problems(self) -> list[str]:
        """Return what an operator should know: files not in force, a certificate that expires.

        What a CA signs is valid no longer than the CA: a node's certificate that lasts as long as
        the CA cannot be renewed with it.
        """
        ends_ms, loaded = self.ends_ms(), self._loaded
        own = loaded.own
        found = [] if self._problem is None else [self._problem]
        if self._node is None and not self._watched:
            return found
        now_ms, ca_ms = self._clock.wall_ms(), ends_ms.get("ca", _NEVER_MS)
        own_ms = ends_ms.get("node", _NEVER_MS)
        if own_ms < ca_ms and own_ms - now_ms <= SOON_MS:
            when = _expires(own_ms - now_ms)
            if own is not None and loaded.signed_until_s < own.not_after_s:
                when += ", with the CA that has signed it"
            found.append(
                f"{self.files.certificate} {when}; renew it with "
                "`hastore keys cert ... --renew`; the node takes the new one without a restart"
            )
        if own is not None and now_ms < own.not_before_s * 1000.0:
            found.append(
                f"{self.files.certificate} is not valid yet by this machine's clock, as if it had "
                "been set back: correct the clock; new connections may be refused meanwhile"
            )
        if ca_ms - now_ms <= SOON_MS:
            found.append(
                f"the CA in {self.files.ca} itself {_expires(ca_ms - now_ms)}, and all that it "
                'signed with it; replace the CA in three steps (docs/security.md, "Replace the CA")'
            )
        return found

    def _current(self) -> _Loaded:
        with self._lock:
            now = self._clock.monotonic_ms()
            if now - self._checked_ms >= CHECK_MS:
                self._checked_ms = now
                self._reload(now)
            return self._loaded

    def _reload(self, now_ms: float) -> None:
        """Take changed files into force; otherwise keep what is in force. Called under the lock."""
        signature = self._signature()
        again = self._problem is not None and now_ms - self._loaded_ms >= RETRY_MS
        if signature == self._seen and not again:
            return
        self._seen, self._loaded_ms = signature, now_ms
        try:
            self._loaded = self._load()
        except ConfigError as error:
            problem = f"the earlier certificate stays in force: {error}"
            if problem != self._problem:
                log.warning("%s", problem)
            self._problem = problem
            return
        self._problem = None
        log.info("the certificates in %s are in force now", self.files.ca)

    def _signature(self) -> tuple[tuple[int, int, int, int] | None, ...]:
        """Return what tells one state of the files from another."""
        found: list[tuple[int, int, int, int] | None] = []
        for path in (self.files.ca, self.files.certificate, self.files.key):
            try:
                one = os.stat(path) if path is not None else None
            except OSError:
                one = None
            state = (one.st_ino, one.st_size, one.st_mtime_ns, one.st_mode) if one else None
            found.append(state)
        return tuple(found)

    def _load(self) -> _Loaded:
        files = self.files
        client = self._context(server_side=False)
        node_client = self._context(server_side=False)
        node_client.check_hostname = False
        if files.certificate is None:
            return _Loaded(None, None, client, node_client, None, _NEVER_MS)
        server = self._context(server_side=True)
        server.verify_mode = ssl.CERT_OPTIONAL
        strict_server = self._context(server_side=True)
        strict_server.verify_mode = ssl.CERT_REQUIRED
        if self._node is not None:
            own: PeerCertificate | None = self._check_own(self._node, strict_server, node_client)
        else:
            own = self._read_own(files.certificate) if self._watched else None
        until_s = _NEVER_MS if own is None else self._signed_until_s(client)
        return _Loaded(server, strict_server, client, node_client, own, until_s)

    def _context(self, *, server_side: bool) -> ssl.SSLContext:
        files = self.files
        purpose = ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT
        context = ssl.SSLContext(purpose)
        context.minimum_version = self._oldest
        context.options |= ssl.OP_NO_COMPRESSION
        if server_side:
            context.num_tickets = 0
        _check_public(files.ca, "hastore keys ca")
        try:
            context.load_verify_locations(cafile=files.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{files.ca}: is not a CA's certificate in PEM; name ca.pem of `hastore keys ca`"
            ) from error
        if files.certificate is not None:
            self._load_own(context, *self._own_files())
        return context

    def _own_files(self) -> tuple[str, str]:
        """Return the files of the own certificate and of its key."""
        certificate = self.files.certificate
        assert certificate is not None, "only called if there is one"
        return certificate, self.files.key or certificate

    def _load_own(self, context: ssl.SSLContext, certificate: str, key: str) -> None:
        _check_public(certificate, "hastore keys cert")
        check_key_mode(key)
        try:
            context.load_cert_chain(certificate, key, password=_refuse_password(key))
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"{key}: is not the key of {certificate}; name the two files that `hastore "
                    "keys cert` made together"
                ) from error
            raise ConfigError(
                f"{certificate} and {key}: are not a certificate and its key in PEM; make them "
                "with `hastore keys cert`"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{certificate} and {key}: cannot be read: {error.strerror}; check the permissions"
            ) from error

    def _read_own(self, certificate: str) -> PeerCertificate | None:
        """Return the certificate, valid or not and whoever signed it; None if it is no client's."""
        reader, shower = self._context(server_side=True), self._context(server_side=False)
        reader.load_verify_locations(cafile=certificate)
        reader.verify_mode = ssl.CERT_REQUIRED
        reader.verify_flags |= ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
        shower.check_hostname = False
        shower.verify_mode = ssl.CERT_NONE
        return _connect(reader, shower)[0].peer

    def _signed_until_s(self, client: ssl.SSLContext) -> float:
        """Return when the CA ends that has signed the own certificate, if there are several.

        While a CA is replaced, its file has the old one and the new one.
        """
        cas = client.get_ca_certs(binary_form=True)
        if not 1 < len(cas) <= CAS_MAX:
            return _NEVER_MS
        shower, found = self._context(server_side=False), []
        shower.check_hostname = False
        shower.verify_mode = ssl.CERT_NONE
        for ca in cas:
            reader = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._load_own(reader, *self._own_files())
            reader.load_verify_locations(cadata=ca)
            reader.verify_mode = ssl.CERT_REQUIRED
            reader.verify_flags |= ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
            if _connect(reader, shower)[0].peer is not None:
                (one,) = reader.get_ca_certs()
                found.append(float(ssl.cert_time_to_seconds(str(one["notAfter"]))))
        return max(found, default=_NEVER_MS)

    def _check_own(
        self, node: NodeName, server: ssl.SSLContext, client: ssl.SSLContext
    ) -> PeerCertificate:
        """Return this node's certificate; ConfigError if it is not valid now.

        Both ends of a connection in memory use the certificate: as a server, and as a client.
        """
        called, caller = _connect(server, client)
        failure = caller.failure or called.failure
        if failure is not None or called.peer is None:
            what = (failure or "").removeprefix("the other end's certificate ")
            raise ConfigError(f"{self.files.certificate}: {what}")
        if called.peer.node != node:
            own = called.peer.node
            whose = "no node's" if own is None else f"that of {own}"
            raise ConfigError(
                f"{self.files.certificate}: is {whose}, not that of {node}; make it with `hastore "
                "keys cert -c NODE.yaml`"
            )
        return called.peer


def _connect(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[TlsEngine, TlsEngine]:
    """Return both ends, the server's first, of a connection in memory after the handshake."""
    called, caller = TlsEngine(server, server_side=True), TlsEngine(client, server_side=False)
    for _ in range(4):
        called.receive(caller.take_outgoing())
        caller.receive(called.take_outgoing())
    return called, caller


def _expires(left_ms: float) -> str:
    return "has expired" if left_ms <= 0 else f"expires in {int(left_ms / 3.6e6)} hours"


_shared: dict[TlsFiles, TlsContexts] = {}
# A child must not find the lock of a context that another thread of its parent holds.
os.register_at_fork(after_in_child=_shared.clear)


def shared_contexts(files: TlsFiles) -> TlsContexts:
    """Return a client's contexts, those of an earlier client while the files are the same.

    To build them takes milliseconds, most of a client's start. Raises ConfigError as TlsContexts.
    """
    known = _shared.get(files)
    if known is not None and known.up_to_date:
        return known
    made = TlsContexts(files)
    if len(_shared) >= SHARED_MAX:
        _shared.clear()
    _shared[files] = made
    return made


def check_key_mode(path: str) -> None:
    """Raise ConfigError if the private key cannot be read, or others than its owner may read it."""
    mode = _readable(path, "hastore keys cert")
    if mode & 0o077:
        raise ConfigError(f"{path}: is open to other users; run chmod 600 {path}")


def _check_public(path: str, made_by: str) -> None:
    """Raise ConfigError if the certificate cannot be read, or any user may replace it."""
    if _readable(path, made_by) & 0o002:
        raise ConfigError(f"{path}: can be changed by other users; run chmod o-w {path}")


def _readable(path: str, made_by: str) -> int:
    """Return the mode of a file; ConfigError if it is none, or cannot be read."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; make it with `{made_by}`, or correct the "
            "path"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; check path and permissions"
        ) from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: is not a file; name a PEM file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{path}: cannot be read: permission denied; check its owner and mode")
    return mode


def _refuse_password(key: str) -> Callable[[], str]:
    """Return what OpenSSL calls for an encrypted key; without it, it would ask on the terminal."""

    def refuse() -> str:
        raise ConfigError(
            f"{key}: is encrypted with a password; decrypt it with `openssl pkey`, and keep it at "
            "mode 0600"
        )

    return refuse


class NodeTls:
    """The contexts of a node by address; None where the address is plain."""

    def __init__(self, config: Config, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Load the certificate, if an address speaks TLS.

        Raises ConfigError, with the remedy, if it is not this node's or not valid now.
        """
        security = config.security
        self._contexts: TlsContexts | None = None
        if security.uses_tls:
            assert security.ca is not None, "the configuration was checked"
            files = TlsFiles(security.ca, security.certificate, security.key)
            name = NodeName(config.cluster, config.group, config.node)
            self._contexts = TlsContexts(files, node=name, clock=clock)
        self.api = self._contexts if security.api is Wire.TLS else None
        self.ha = self._contexts if security.ha is Wire.TLS else None
        self.http = self._contexts if security.http is Wire.TLS else None

    def ends_ms(self) -> dict[str, float]:
        """Return when each certificate ends; empty without TLS. See TlsContexts."""
        return {} if self._contexts is None else self._contexts.ends_ms()

    def problems(self) -> list[str]:
        """Return what the status shows: a certificate that expires, files not in force."""
        return [] if self._contexts is None else self._contexts.problems()
