"""Requests of administrators at the API: who may send them, the audit line, the thread's turns."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from hastore.errors import ConfigError, UsageError
from hastore.protocol import api
from hastore.server.api import access
from hastore.server.api.administering import MAX_CHANGES_OF_ONE
from tests.process.wire import Wire, frame
from tests.server.api.kit import until
from tests.server.api.secured import Secured, ask, prove

CHANGE = api.NodesChange(gone=3)
VERSION = "f" * 64


def order(rid: int = 9, version: str | None = VERSION) -> api.Administer:
    return api.Administer(rid, "c", "g", 1, CHANGE, version)


class Orders:
    """What the node is asked for; `answer` is what it says."""

    def __init__(self) -> None:
        self.taken: list[api.Administer] = []
        self.answer: Any = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def carry_out(self, request: api.Administer) -> api.Administered | api.Failed:
        self.taken.append(request)
        assert self.may_go_on.wait(60)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer  # type: ignore[no-any-return]
        return api.Administered(request.rid, True, "/n.yaml", VERSION)


def test_only_an_admin_may_and_each_use_is_a_line_of_the_audit_log(secured: Secured) -> None:
    orders = Orders()
    shop, ops = secured.identity("shop", produce='["*"]'), secured.identity("ops", admin="true")
    with secured.server(carry_out=orders.carry_out) as server:
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            reply = ask(wire, order())
            assert isinstance(reply, api.Failed) and reply.status == "UNAUTHENTICATED"
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            assert isinstance(prove(wire, shop), api.Welcome)
            reply = ask(wire, order())
            assert isinstance(reply, api.Failed) and reply.status == "FORBIDDEN"
            assert "shop is no admin" in reply.reason and "\n" not in reply.reason
        assert not orders.taken
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            assert isinstance(prove(wire, ops), api.Welcome)
            assert ask(wire, order()) == api.Administered(9, True, "/n.yaml", VERSION)
            ask(wire, order(version=None))
            orders.answer = api.Administered(9, False, "/n.yaml", VERSION)
            ask(wire, order())
            orders.answer = api.Failed(9, api.FILE_CHANGED, "it was changed")
            reply = ask(wire, order())
            assert isinstance(reply, api.Failed) and reply.status == api.FILE_CHANGED
            orders.answer = UsageError("not so")
            reply = ask(wire, order())
            assert isinstance(reply, api.Failed) and reply.reason == "not so"
            orders.answer = ConfigError("/n.yaml: cannot be written")
            reply = ask(wire, order())
            assert isinstance(reply, api.Failed) and reply.status == "ConfigError"
            orders.answer = None
            wire.send(frame(api.encode(api.Administer(
                9, "c", "g", 1, api.MembersChange("12345678", "replace", 3, 7, [1, 2, 3], 4)
            ))))  # fmt: skip
            assert isinstance(api.decode_reply(wire.frame().body), api.Administered)
            once = api.OnceOptions("promote", 7, force_unclean=True, needed_node=2)
            change = api.RoleChange("12345678", "SYNC_MASTER", once)
            ask(wire, api.Administer(9, "c", "g", 1, change, VERSION))
    lines = [one for one in secured.notes if one["action"].startswith("administer")]
    assert {one["identity"] for one in lines} == {"ops"}
    assert all(one["address"].startswith("127.0.0.1:") for one in lines)
    assert [(one["action"], one["outcome"], one["reason"]) for one in lines] == [
        ("administer nodes", "done", "remove node 3: /n.yaml"),
        ("administer nodes", "checked", "remove node 3: /n.yaml"),
        ("administer nodes", "unchanged", "remove node 3: /n.yaml"),
        ("administer nodes", "refused", "remove node 3: it was changed"),
        ("administer nodes", "refused", "remove node 3: not so"),
        ("administer nodes", "refused", "remove node 3: /n.yaml: cannot be written"),
        ("administer members", "asked", "replace node 3 by node 4: request 12345678"),
        (
            "administer role",
            "done",
            "SYNC_MASTER --force-unclean (node 2 must answer): /n.yaml",
        ),
    ]
    [refused] = [one for one in secured.notes if one["outcome"] == "forbidden"]
    assert (refused["action"], refused["identity"]) == ("Administer", "shop")


def test_no_change_hides_behind_others_and_an_address_is_told(secured: Secured) -> None:
    orders, ops = Orders(), secured.identity("ops", admin="true")
    places = api.NodePlaces("tcp://192.0.2.1:1", "192.0.2.1:2", "192.0.2.1:3")
    with secured.server(carry_out=orders.carry_out) as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        assert isinstance(prove(wire, ops), api.Welcome)
        ask(wire, api.Administer(9, "c", "g", 1, api.NodesChange(3, 4, places), VERSION))
        ask(wire, order(version=None))
        ask(wire, api.Administer(9, "c", "g", 1, api.MembersChange("12345678", "add", 4, 7, [1])))
    lines = [one for one in secured.notes if one["action"].startswith("administer")]
    assert [one["whole"] for one in lines] == [True, False, True]
    assert lines[0]["reason"] == (
        "remove node 3, add node 4 at tcp://192.0.2.1:1, ha 192.0.2.1:2, http 192.0.2.1:3: /n.yaml"
    )


def test_a_node_without_identities_refuses_in_one_line(secured: Secured) -> None:
    orders = Orders()
    with secured.server(identities=False, carry_out=orders.carry_out) as server:
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            reply = ask(wire, order())
    assert isinstance(reply, api.Failed) and reply.status == "FORBIDDEN"
    assert "set security.identities in its file" in reply.reason and "\n" not in reply.reason
    assert not orders.taken


def test_beyond_loopback_only_over_tls() -> None:
    admin: Any = SimpleNamespace(name="ops", is_admin=True)
    for host, tls, is_safe in (
        ("127.0.0.1", None, True), ("::1", None, True), ("10.0.0.7", None, False),
        ("10.0.0.7", object(), True), ("", None, False), ("fe80::1%eth0", None, False),
    ):  # fmt: skip
        connection: Any = SimpleNamespace(
            tls=tls, address=(host, 1), peer=f"{host}:1", proof=SimpleNamespace(identity=admin)
        )
        noted: Any = SimpleNamespace(forbidden=mock.Mock())
        found = access.Access.refusal(noted, connection, order())
        assert (found is None) == is_safe == (not noted.forbidden.called), host
        assert is_safe or "security.api: tls" in str(found)


def test_a_change_that_waits_for_its_file_holds_up_nobody(secured: Secured) -> None:
    orders, ops = Orders(), secured.identity("ops", admin="true")
    orders.may_go_on.clear()
    with secured.server(carry_out=orders.carry_out) as server:
        with Wire(server.endpoint) as wire, Wire(server.endpoint) as other:
            for each in (wire, other):
                each.shake_hands()
                assert isinstance(prove(each, ops), api.Welcome)
            for rid in range(MAX_CHANGES_OF_ONE + 1):
                wire.send(frame(api.encode(order(rid))))
            busy = api.decode_reply(wire.frame().body)
            assert isinstance(busy, api.Failed) and busy.status == "BUSY"
            assert busy.rid == MAX_CHANGES_OF_ONE
            assert isinstance(ask(other, api.AskMap(1)), api.Map)
            orders.may_go_on.set()
            rids = [api.decode_reply(wire.frame().body).rid for _ in range(MAX_CHANGES_OF_ONE)]
            assert rids == list(range(MAX_CHANGES_OF_ONE))


def test_a_flood_of_requests_leaves_time_for_puts(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, ops, rested = Orders(), secured.identity("ops", admin="true"), threading.Event()
    with secured.server(carry_out=orders.carry_out) as server, Wire(server.endpoint) as wire:
        assert server._admin is not None
        monkeypatch.setattr(server._admin._pace, "rests", lambda: rested.wait(60))
        wire.shake_hands()
        assert isinstance(prove(wire, ops), api.Welcome)
        wire.send(frame(api.encode(order(1))) + frame(api.encode(order(2))))
        assert api.decode_reply(wire.frame().body).rid == 1
        assert isinstance(ask(wire, api.AskMap(3)), api.Map)
        assert len(orders.taken) == 1, "the second has to wait, and the map has not"
        rested.set()
        assert api.decode_reply(wire.frame().body).rid == 2


def test_a_change_that_was_made_is_not_called_busy(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its administrator reads slowly what he has asked for besides."""
    orders, ops = Orders(), secured.identity("ops", admin="true")
    with secured.server(carry_out=orders.carry_out) as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        assert isinstance(prove(wire, ops), api.Welcome)
        monkeypatch.setattr(server._replies, "has_room", lambda _one: not orders.taken)
        assert isinstance(ask(wire, order()), api.Administered)


def test_what_a_revoked_administrator_has_asked_for_is_not_done(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, ops = Orders(), secured.identity("ops", admin="true")
    orders.may_go_on.clear()
    with secured.server(carry_out=orders.carry_out) as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        assert isinstance(prove(wire, ops), api.Welcome)
        for rid in (1, 2):
            wire.send(frame(api.encode(order(rid))))
        until(lambda: len(orders.taken) == 1)
        secured.revoke("ops")
        wire.until_closed()
        orders.may_go_on.set()
        until(lambda: len([one for one in secured.notes if "administer" in one["action"]]) == 2)
        assert [one.rid for one in orders.taken] == [1]
        assert "the connection has ended" in secured.notes[-1]["reason"]
