"""The status page over HTTP: its headers, what may be in it, and who may see what."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import pathlib
import re
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.security.identities import Identities
from hastore.security.identity import Identity
from hastore.security.identity_editor import IdentityEditor
from hastore.server import status_page
from hastore.server.http_server import HttpAccess, HttpServer
from hastore.server.node import Node
from hastore.server.overview import overview
from hastore.server.status_history import Lag, Point
from hastore.server.status_page import StatusPage
from tests.server.http.kit import serve
from tests.server.http.test_access import ask
from tests.server.kit import config_of, running
from tests.server.test_overview import MASTER, NODES

HTML = pathlib.Path(status_page.__file__).with_name("status_page.html").read_text()
HOSTILE = "</script><img src=x onerror=alert(1)>"
ROWS = (Lag("billing", "orders", 4, 7), Lag("stock", "parts", 4, 0))


class History:
    """Groups without a node."""

    def shown(self, may_see: Any) -> dict[str, Any]:
        rows = [one._asdict() for one in ROWS if may_see(one)]
        points: dict[str, list[float]] = {name: [] for name in Point._fields}
        groups = {"read": True, "rows": rows, "more": 0}
        return {"now_ms": 0, "points": points, "changes": [], "groups": groups}


def page() -> StatusPage:
    shown = overview(MASTER | {"group": HOSTILE}, NODES, None, https=False)
    return StatusPage(lambda: shown, History())  # type: ignore[arg-type]


def groups_in(body: str) -> list[str]:
    return [one["group"] for one in json.loads(body)["groups"]["rows"]]


@contextlib.contextmanager
def secured(folder: pathlib.Path) -> Iterator[tuple[HttpServer, str]]:
    """A server that asks who its clients are, and the key of all its identities."""
    path, key = str(folder / "ids.yaml"), secrets.token_hex(32)
    editor = IdentityEditor(path, create=True)
    editor.add(Identity("prometheus"), key, 0)
    editor.add(Identity("shop", consume=("orders", "parts"), groups=("billing",)), key, 0)
    editor.add(Identity("ops", is_admin=True), key, 0)
    editor.save()
    access = HttpAccess(Identities(path), lambda _action, **_: None, SYSTEM_CLOCK)
    server = serve("127.0.0.1:0", lambda: {"node": 1}, lambda: b"m\n", access=access, page=page())
    server.start()
    try:
        yield server, key
    finally:
        assert server.stop(60)


@pytest.fixture
def server() -> Iterator[HttpServer]:
    made = serve("127.0.0.1:0", lambda: {"node": 1}, lambda: b"m\n", page=page())
    made.start()
    yield made
    assert made.stop(60)


def test_the_page_may_run_its_own_script_only(server: HttpServer) -> None:
    code, head, body = ask(server, "/")
    assert code == 200 and body == HTML and "Content-Type: text/html; charset=utf-8" in head
    (policy,) = re.findall(r"Content-Security-Policy: (.*)\r", head)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["connect-src"] == "'self'" and rules["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'", "the browser would not run it"
    for line in ("X-Content-Type-Options: nosniff", "X-Frame-Options: DENY", "no-referrer"):
        assert line in head
    assert "Cache-Control: no-store" in head


def test_the_page_fetches_nothing_from_elsewhere_and_writes_no_html() -> None:
    addresses = set(re.findall(r"[a-z]+://[^\"'` <]+", HTML))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG; nothing is fetched there"
    assert not re.search(r"\bsrc=|url\(|@import|\bstyle=|\son[a-z]+=", HTML)
    dangerous = "innerHTML|outerHTML|insertAdjacentHTML|document\\.write|eval\\(|Function\\("
    assert not re.search(dangerous, HTML), "values are text, never HTML"
    assert HTML.count("createElement(") == 1, "all elements come from one function"


def test_what_it_shows_is_json_that_no_browser_takes_for_html(server: HttpServer) -> None:
    code, head, body = ask(server, "/page.json")
    assert code == 200 and "Content-Type: application/json" in head and "nosniff" in head
    assert json.loads(body)["group"] == HOSTILE and groups_in(body) == ["billing", "stock"]
    assert ask(server, "/page.json?x=1")[0] == 200 and ask(server, "/page.jso")[0] == 404
    assert ask(server, "/status")[2] == '{"node": 1}\n'


def test_a_server_without_the_page_names_the_other_paths() -> None:
    server = serve("127.0.0.1:0", lambda: {"node": 1}, lambda: b"m\n")
    server.start()
    try:
        assert ask(server, "/")[0] == 404
    finally:
        assert server.stop(60)


def test_with_identities_each_sees_the_groups_that_it_may_read(tmp_path: pathlib.Path) -> None:
    with secured(tmp_path) as (server, key):
        for private in ("/", "/page.json"):
            code, head, _ = ask(server, private)
            assert code == 401
            assert 'WWW-Authenticate: Basic realm="hastore"' in head, "a browser asks for a name"
        seen = {"prometheus": [], "shop": ["billing"], "ops": ["billing", "stock"]}
        for name, groups in seen.items():
            _, _, body = ask(server, "/page.json", f"Authorization: Bearer {name}:{key}")
            assert groups_in(body) == groups


def test_a_node_serves_its_page(tmp_path: pathlib.Path) -> None:
    with running(Node(config_of(tmp_path), lambda: None)) as node:
        http = node._http
        assert http is not None and ask(http, "/")[2] == HTML
        found = json.loads(ask(http, "/page.json")[2])
    assert found["state"] == {"level": "good", "text": "This node is the master and takes puts."}
    assert [one["node"] for one in found["members"]] == [1]
    assert set(found["points"]) == {
        "wall_ms", "bytes_per_s", "messages_per_s", "wait_ms", "lag_bytes", "waiting_puts",
    }  # fmt: skip
