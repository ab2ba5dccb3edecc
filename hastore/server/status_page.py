"""The status page of a node at its HTTP port: one HTML file, and the JSON that it shows.

    GET /            the page; it fetches nothing but
    GET /page.json   what it shows, every few seconds

Whoever may read /status may read both. The page changes nothing. Its Content-Security-Policy lets
the browser run and show only what is in the file itself, and connect to this node only; the script
writes what it got as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from hastore import __version__
from hastore.security.identity import Identity
from hastore.server.status_history import Lag, StatusHistory

PAGE, DATA = b"/", b"/page.json"
_FILE = "status_page.html"


class PageAnswer(NamedTuple):
    """An answer with code 200, and its headers beside those that every answer has."""

    body: bytes
    kind: str
    headers: tuple[tuple[str, str], ...]


class StatusPage:
    """Answer PAGE and DATA; one thread calls this."""

    def __init__(self, overview: Callable[[], dict[str, Any]], history: StatusHistory) -> None:
        """Read the page; `overview` returns what it shows of this moment."""
        text = importlib.resources.files("hastore.server").joinpath(_FILE).read_text("utf-8")
        self._page = PageAnswer(text.encode(), "text/html; charset=utf-8", _headers(text))
        self._overview = overview
        self._history = history

    def answer(self, path: bytes, identity: Identity | None, *, secured: bool) -> PageAnswer | None:
        """Return the answer to a path; None if it is neither of both.

        `secured`: the node asks who its clients are, and `identity` may read the positions of the
        groups that are shown.
        """
        if path == PAGE:
            return self._page
        if path != DATA:
            return None

        def may_see(row: Lag) -> bool:
            return not secured or (identity is not None and _may_see(identity, row))

        found = {"version": __version__, **self._overview(), **self._history.shown(may_see)}
        body = json.dumps(found).encode() + b"\n"
        return PageAnswer(body, "application/json", _NO_SNIFFING)


def _may_see(identity: Identity, row: Lag) -> bool:
    if identity.is_admin:
        return True
    return identity.may_consume(row.topic) and identity.may_move(row.group)


_NO_SNIFFING = (("X-Content-Type-Options", "nosniff"),)


def _headers(page: str) -> tuple[tuple[str, str], ...]:
    """Return the headers of the page: nothing but its own script and style is run or shown."""
    script, style = (_digests(page, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return (
        ("Content-Security-Policy", policy),
        ("Referrer-Policy", "no-referrer"),
        ("X-Frame-Options", "DENY"),
        *_NO_SNIFFING,
    )


def _digests(page: str, tag: str) -> str:
    """Return the digests of the elements of a tag, as a policy names them."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]
    return " ".join(f"'sha256-{one}'" for one in digests)
