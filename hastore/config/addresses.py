"""Addresses of nodes and servers: HOST:PORT or [IPV6]:PORT. Pure: no host name is resolved."""

import ipaddress
import re

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}")


def parse_address(text: str) -> tuple[str, int] | None:
    """Return host and port of `HOST:PORT` or `[IPV6]:PORT`; None when `text` is neither."""
    host, colon, port_text = text.rpartition(":")
    if not colon or not (port_text.isascii() and port_text.isdigit()) or len(port_text) > 5:
        return None
    port = int(port_text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            ipaddress.IPv6Address(host)
        except ValueError:
            return None
    elif re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.IPv4Address(host)
        except ValueError:
            return None
    elif not _HOST.fullmatch(host):
        return None
    return (host, port) if port <= 65_535 else None


def address_text(host: str, port: int) -> str:
    """Return `HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or `localhost`; False for other names."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
