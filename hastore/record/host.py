"""Hosts as a record holds them, and message ids, which contain the host that stored a record."""

import ipaddress
import struct
from dataclasses import dataclass

from hastore.errors import UsageError

_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")


@dataclass(frozen=True, slots=True)
class Host:
    """An address of 4 or 16 bytes and a port."""

    address: bytes
    port: int

    @classmethod
    def parse(cls, text: str) -> "Host":
        """Read "1.2.3.4:10911" or "[::1]:10911"; UsageError for anything else."""
        address, separator, port = text.rpartition(":")
        try:
            if not separator or not 0 <= int(port) <= 65535:
                raise ValueError("a port from 0 to 65535 is missing")
            if address.startswith("[") and address.endswith("]"):
                return cls(ipaddress.IPv6Address(address[1:-1]).packed, int(port))
            return cls(ipaddress.IPv4Address(address).packed, int(port))
        except ValueError as failure:
            raise UsageError(f"{text!r} is not ADDRESS:PORT ({failure})") from failure

    @property
    def text(self) -> str:
        """Return "1.2.3.4:10911", an IPv6 address in brackets."""
        if len(self.address) == 4:
            return f"{ipaddress.IPv4Address(self.address)}:{self.port}"
        return f"[{ipaddress.IPv6Address(self.address)}]:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the address has 16 bytes."""
        return len(self.address) == 16

    @property
    def packed(self) -> bytes:
        """Return address and port as bytes, as in records, message ids and replies."""
        return self.address + _INT.pack(self.port)


NO_HOST = Host(bytes(4), 0)


def message_id(host: Host, offset: int) -> str:
    """Return the upper-case hexadecimal id of the record that `host` stored at `offset`."""
    return (host.packed + _LONG.pack(offset)).hex().upper()


def parse_message_id(text: str) -> tuple[Host, int]:
    """Split a message id into the storing host and the physical offset. Raises UsageError."""
    try:
        raw = bytes.fromhex(text) if len(text) in (32, 56) else b""
    except ValueError:
        raw = b""
    if len(raw) * 2 != len(text) or not raw:
        raise UsageError(f"{text!r} is no message id of 32 (IPv6: 56) hexadecimal digits")
    size = len(raw) - 12
    host = Host(raw[:size], _INT.unpack_from(raw, size)[0])
    return host, _LONG.unpack_from(raw, size + 4)[0]
