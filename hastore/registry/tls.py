"""TLS to ZooKeeper's servers: whose certificates count, and the socket that kazoo then uses.

ZooKeeper 3.8 speaks TLS 1.2 unless it is told otherwise, so the registry takes that too; the nodes
of hastore speak TLS 1.3 among themselves.
"""

import socket
import ssl
from collections.abc import Callable
from typing import Any

from hastore.security.tls_contexts import TlsContexts, TlsFiles
from hastore.security.tls_engine import failure_text

_OLDEST = ssl.TLSVersion.TLSv1_2
_WHY = "name its secureClientPort, and give a certificate that it accepts, if it asks for one"


def registry_contexts(
    ca: str | None, certificate: str | None, key: str | None
) -> TlsContexts | None:
    """Return what a session needs to speak TLS; None without a CA.

    Raises ConfigError for files that are unreadable, open to others, or do not fit together.
    """
    if ca is None:
        return None
    return TlsContexts(TlsFiles(ca, certificate, key), oldest=_OLDEST)


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
