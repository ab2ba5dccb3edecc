"""Questions to a RocketMQ broker, in its clients' protocol: one connection, one after the other."""

from __future__ import annotations

import struct

from hastore.clock import Clock
from hastore.config.classic_key import Credentials
from hastore.errors import ProtocolError
from hastore.ha.hello.peer import Deadline, connect, receive_exactly, split_address
from hastore.protocol.remoting import Answer, Code, Frame, decode_frame, encode_frame
from hastore.security.rocketmq_acl import ACCESS_KEY, SIGNATURE, sign

ANSWER_MAX = 64 * 1024 * 1024  # bytes of one answer
PIECE_MAX = 1024 * 1024  # received at once: only received bytes take memory
TIMEOUT_MS = 3_000.0  # of one question, as RocketMQ's slaves wait
REMARK_MAX = 300  # characters of what a broker says that are repeated
_SIZE = struct.Struct(">I")


class BrokerClient:
    """A connection to a broker; used by one thread, as a context manager."""

    def __init__(self, address: str, credentials: Credentials | None, clock: Clock) -> None:
        """Connect. Raises OSError."""
        self._clock = clock
        self._credentials = credentials
        self._opaque = 0
        self._sock = connect(split_address(address), TIMEOUT_MS / 1000.0)

    def __enter__(self) -> BrokerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def ask(self, code: int) -> bytes:
        """Return the body of the answer to a request without fields or a body.

        Raises ProtocolError if the broker refuses it or answers nonsense, OSError.
        """
        answer = self._exchange(code, {})
        self._check(code, answer)
        return answer.body

    def view(self, offset: int) -> bytes | None:
        """Return the record at an offset of the broker's log; None if it finds none there.

        Raises ProtocolError if the broker refuses that, OSError.
        """
        answer = self._exchange(Code.VIEW_MESSAGE_BY_ID, {"offset": str(offset)})
        if answer.code == Answer.SYSTEM_ERROR:
            return None
        self._check(Code.VIEW_MESSAGE_BY_ID, answer)
        return answer.body

    def _exchange(self, code: int, fields: dict[str, str]) -> Frame:
        self._opaque += 1
        if self._credentials is not None:
            fields[ACCESS_KEY] = self._credentials.access_key
            fields[SIGNATURE] = sign(self._credentials.secret_key, fields, b"")
        deadline = Deadline(self._clock, TIMEOUT_MS)
        self._sock.settimeout(deadline.left_s())
        self._sock.sendall(encode_frame(Frame(code, self._opaque, 0, fields, b"")))
        while True:
            answer = self._receive(deadline)
            if answer.is_answer and answer.opaque == self._opaque:
                return answer  # else it is a request of the broker's, or late

    def _check(self, code: int, answer: Frame) -> None:
        if answer.code != Answer.SUCCESS:
            remark = (answer.remark or "")[:REMARK_MAX]
            raise ProtocolError(f"it refuses request {code} with {answer.code}: {remark}")

    def _receive(self, deadline: Deadline) -> Frame:
        (size,) = _SIZE.unpack(receive_exactly(self._sock, _SIZE.size, deadline))
        if not 4 <= size <= ANSWER_MAX:
            raise ProtocolError(f"no RocketMQ broker: it sends a frame of {size} bytes")
        pieces, left = [], size
        while left:
            pieces.append(receive_exactly(self._sock, min(left, PIECE_MAX), deadline))
            left -= len(pieces[-1])
        return decode_frame(b"".join(pieces))
