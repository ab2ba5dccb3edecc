"""A connection to a node in RocketMQ's protocol, for what only that protocol can ask."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING

from hastore.client.connections.bootstrap import connect
from hastore.client.connections.proving import Prover
from hastore.client.security import Security
from hastore.errors import (
    AuthenticationError,
    ClientError,
    ConfigError,
    ForbiddenError,
    HastoreError,
    NotAuthenticatedError,
    ProtocolError,
    UnreachableError,
)
from hastore.fs.private_files import MAX_KEY_FILE_BYTES, read_private
from hastore.protocol.remoting import Answer, Code, Frame, RemotingWire, encode_frame
from hastore.security.rocketmq_acl import ACCESS_KEY, SIGNATURE, sign

if TYPE_CHECKING:
    from hastore.security.tls_socket import TlsSocket

_PIECE_BYTES = 65_536
_REMARK_MAX = 300  # characters of a node's refusal that are repeated
_NO_CONSUMER = "no consumer for this group"  # the begin of the refusal for a group without members


class RemotingLink:
    """A connection to one node; used by one thread, as a context manager.

    Requests are signed with the identity's key, which the node must know as it is (`hastore keys
    new --rocketmq`).
    """

    def __init__(self, address: str, security: Security | None, timeout_s: float) -> None:
        """Connect, with TLS if `security` has a CA. `timeout_s` bounds this, and each answer.

        Raises UnreachableError, NotAuthenticatedError, ConfigError for the files of `security`.
        """
        self.address = address
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._wire = RemotingWire()
        self._frames: list[Frame] = []
        self._opaque = 0
        self._signer = None if security is None else _signer(security)
        self._sock: socket.socket | TlsSocket
        target = address.replace("zmq+tcp://", "tcp://")
        try:
            engine = None if security is None else Prover(security).engine(target)
            self._sock = sock = connect(target, timeout_s)
            if engine is not None:
                from hastore.security.tls_socket import TlsSocket

                try:
                    self._sock = TlsSocket.over(sock, engine, self._left_s)
                except BaseException:
                    sock.close()
                    raise
        except AuthenticationError as failure:
            raise NotAuthenticatedError(f"{address}: {failure}") from failure
        except (OSError, UnicodeError) as failure:
            raise UnreachableError(f"{address}: {failure}") from failure

    def __enter__(self) -> RemotingLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def members(self, group: str) -> list[str]:
        """Return the client ids of a consumer group's members; raises as `ask` does."""
        answer = self._answer(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
        if answer.code == Answer.SYSTEM_ERROR and (answer.remark or "").startswith(_NO_CONSUMER):
            return []
        self._check(answer)
        try:
            found = json.loads(answer.body)["consumerIdList"]
            return [str(one) for one in found]
        except (ValueError, KeyError, TypeError, RecursionError) as failure:
            raise ClientError(f"{self.address} answers with no list of consumers") from failure

    def knows_group(self, group: str) -> bool:
        """Whether the node has settings or retries of a group; raises as `ask` does."""
        answer = self._answer(Code.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": group})
        if answer.code == Answer.SUBSCRIPTION_GROUP_NOT_EXIST:
            return False
        self._check(answer)
        return True

    def ask(self, code: Code, fields: dict[str, str]) -> Frame:
        """Send a request without a body; return its answer, if that is SUCCESS.

        Raises UnreachableError without an answer in time: the request may be carried out then.
        Raises ForbiddenError and ClientError for a refusal.
        """
        answer = self._answer(code, fields)
        self._check(answer)
        return answer

    def _check(self, answer: Frame) -> None:
        if answer.code == Answer.SUCCESS:
            return
        told = (answer.remark or "")[:_REMARK_MAX]
        kind: type[HastoreError] = ClientError
        if answer.code == Answer.NO_PERMISSION:
            kind = ForbiddenError
            told += "; an identity for this is made with `hastore keys new --rocketmq`"
        raise kind(f"{self.address} refuses: {told}")

    def _answer(self, code: Code, fields: dict[str, str]) -> Frame:
        self._end = time.monotonic() + self._timeout_s
        self._opaque += 1
        if self._signer is not None:
            name, key = self._signer
            fields = {**fields, ACCESS_KEY: name}
            fields[SIGNATURE] = sign(key, fields, b"")
        try:
            self._sock.settimeout(self._left_s())
            self._sock.sendall(encode_frame(Frame(code, self._opaque, 0, fields, b"")))
            while True:
                answer = self._next()
                if answer.is_answer and answer.opaque == self._opaque:
                    return answer  # else it is a request of the node's
        except AuthenticationError as failure:
            raise NotAuthenticatedError(f"{self.address}: {failure}") from failure
        except (OSError, ProtocolError) as failure:
            raise UnreachableError(f"{self.address}: {failure}") from failure

    def _next(self) -> Frame:
        buffer = memoryview(bytearray(_PIECE_BYTES))
        while not self._frames:
            self._sock.settimeout(self._left_s())
            size = self._sock.recv_into(buffer)
            if not size:
                raise ProtocolError(
                    "it ends the connection: it may not serve RocketMQ's protocol (`remoting` in "
                    "its file)"
                )
            self._frames += self._wire.receive(bytes(buffer[:size]))
            if self._wire.failure is not None:
                raise ProtocolError(self._wire.failure)
        return self._frames.pop(0)

    def _left_s(self) -> float:
        left_s = self._end - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s")
        return left_s


def _signer(security: Security) -> tuple[str, str] | None:
    """Return the identity's name and key; None without an identity."""
    if security.identity is None or security.key_file is None:
        return None
    data = read_private(security.key_file, MAX_KEY_FILE_BYTES)
    try:
        return security.identity, data.decode("ascii").strip()
    except UnicodeDecodeError as failure:
        raise ConfigError(
            f"{security.key_file}: it holds no key; make one with `hastore keys new`"
        ) from failure
