"""Begin a link at the called end: plain, or by TLS with the certificates of both ends.

With `security.ha: tls` a link carries nothing before TLS has verified both ends' certificates
against the group's CA. Whether the certificate is that of the node that the HELLO names is checked
with the HELLO (`check_certificate` in peer.py, which also has the calling end). A plain caller is
refused, so an attacker on the network cannot downgrade a link. Only the classic protocol of
RocketMQ's peers stays plain, where the configuration allows it (ha_connection.py,
classic_client.py).
"""

import logging
import socket

from hastore.errors import AuthenticationError, ProtocolError
from hastore.ha.hello.peer import Deadline, receive_exactly
from hastore.protocol.hello import ANSWER_MAGIC, CALL_MAGIC, MAGIC_BYTES
from hastore.security.tls_contexts import TlsContexts
from hastore.security.tls_engine import NOT_TLS_ALERT, TlsEngine, begins_tls
from hastore.security.tls_socket import LinkSocket, TlsSocket

log = logging.getLogger(__name__)

LINGER_S = 0.5  # how long a refused caller may take to read why
_LINGER_BYTES = 64 * 1024


def is_call(first: bytes) -> bool:
    """Return whether the first 8 bytes are those of a node of hastore, by TLS or plain."""
    return first == CALL_MAGIC or begins_tls(first)


def admit(
    sock: socket.socket, first: bytes, deadline: Deadline, tls: TlsContexts | None
) -> LinkSocket:
    """Return the link on which the caller's HELLO arrives; `first` are the first 8 bytes.

    Raises AuthenticationError or ProtocolError when the caller is refused; it has then been told.
    """
    if tls is None:
        if begins_tls(first):
            _say(sock, ANSWER_MAGIC, deadline)
            raise ProtocolError(
                "the caller speaks TLS, but security.ha is plain here; set it to tls on every node"
            )
        return sock
    if not begins_tls(first):
        _say(sock, NOT_TLS_ALERT, deadline)
        raise AuthenticationError(
            "the caller does not speak TLS, and nothing else is accepted here; set security.ha: "
            "tls on every node"
        )
    engine = TlsEngine(tls.server(require_certificate=True), server_side=True)
    try:
        link = TlsSocket.over(sock, engine, deadline.left_s, received=first)
    except AuthenticationError:
        _say(sock, b"", deadline)  # TLS has said why
        raise
    except TimeoutError as error:
        raise TimeoutError(
            "the caller did not finish its TLS handshake in time (ha.hello_timeout); nothing to do "
            "unless it is a node of this group"
        ) from error
    if receive_exactly(link, MAGIC_BYTES, deadline) != CALL_MAGIC:
        raise ProtocolError("the caller sent no HELLO of this version")
    return link


def _say(sock: socket.socket, last: bytes, deadline: Deadline) -> None:
    """Send the last bytes, and give the caller a moment to read them.

    If the socket were closed at once, while bytes of the caller wait to be read, the kernel would
    reset the connection, and the caller would not learn why.
    """
    try:
        begun_s = deadline.left_s()
        sock.settimeout(min(LINGER_S, begun_s))
        sock.sendall(last)
        sock.shutdown(socket.SHUT_WR)
        left = _LINGER_BYTES
        while left > 0:
            lingered_s = begun_s - deadline.left_s()
            if lingered_s >= LINGER_S:  # it sends byte by byte
                return
            sock.settimeout(LINGER_S - lingered_s)
            got = len(sock.recv(left))
            if not got:
                return
            left -= got
    except OSError as error:  # it has left, or is too slow; TimeoutError too
        log.debug("the caller did not wait for the reason: %s", error)
