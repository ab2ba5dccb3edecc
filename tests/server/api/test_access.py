"""Who a client is and what it may do, over the wire: strangers, proofs, rights, revocation."""

from __future__ import annotations

import asyncio
import contextlib
import pathlib
import socket
import threading
import time
from typing import Any

import pytest

from hastore import aio
from hastore.cli.common import run_code
from hastore.cli.main import cli
from hastore.client import Admin, Consumer, Producer
from hastore.client.connections.bulk_link import BulkLink
from hastore.client.connections.proving import make_prover
from hastore.client.connections.socket_transport import SocketTransport
from hastore.client.connections.transport import Arrival
from hastore.client.consumer.positions_client import Positions
from hastore.client.security import Security
from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig
from hastore.errors import (
    ConfigError,
    ForbiddenError,
    NotAuthenticatedError,
    ProtocolError,
    UsageError,
)
from hastore.protocol import api
from hastore.protocol.api import own_prefix
from hastore.record.codec import NO_HOST, build_record
from hastore.security.identity import Identity
from hastore.server.api import access
from hastore.server.api import connections as api_connections
from hastore.server.api.access import REFUSED_MAX
from tests.process.wire import MORE, Wire, command, frame, greeting, ready
from tests.server.api.kit import until
from tests.server.api.secured import Secured, ask, prove, sends

ALL = '["*"]'
SOON_S = 40.0  # far below every timeout of a client


def record(topic: str, body: bytes = b"x", properties: tuple[Any, ...] = ()) -> bytes:
    return build_record(
        topic, body, queue_id=0, born_timestamp_ms=1, born_host=NO_HOST, properties=properties
    )


def put(wire: Wire, payload: bytes, rid: int = 9) -> api.PutDone:
    wire.send(frame(api.encode(api.Put(rid, 1)), MORE), frame(payload))
    reply = api.decode_reply(wire.frame().body)
    assert isinstance(reply, api.PutDone)
    return reply


# -- strangers


def test_a_stranger_is_told_what_to_do_and_gets_nothing_else(secured: Secured) -> None:
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        for rid in range(1, REFUSED_MAX):
            reply = ask(wire, api.AskMap(rid))
            assert isinstance(reply, api.Failed) and reply.rid == rid
            assert reply.status == "UNAUTHENTICATED" and "key" in reply.reason
            assert reply.master is None
        wire.send(frame(api.encode(api.Put(1, 1)), MORE), frame(record("t")))
        last = wire.until_closed()
        assert isinstance(api.decode_reply(last[0].body), api.Failed)
        assert last[-1].body.startswith(b"\x05ERROR")
        counted = server.counted()
        assert (counted["logins"], counted["refused_logins"] > 0) == (0, True)
    assert not secured.backend.store.log


def test_a_stranger_may_not_send_large_frames(secured: Secured) -> None:
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        wire.send(frame(api.encode(api.Put(1, 1)), MORE), frame(bytes(8_000)))
        [error] = wire.until_closed()
        assert b"at most 4096" in error.body


def test_a_stranger_that_proves_nothing_is_ended_in_time(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_connections, "HANDSHAKE_MS", 300.0)
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        assert isinstance(ask(wire, api.AskMap(1)), api.Failed)
        [error] = wire.until_closed()
        assert b"identity was not finished" in error.body


def test_strangers_go_before_clients_when_connections_run_out(secured: Secured) -> None:
    mine = secured.identity("orders", produce=ALL)
    config = ApiConfig(max_connections=20)
    with secured.server(config=config) as server, contextlib.ExitStack() as stack:
        with Producer([server.endpoint], security=mine) as producer:
            producer.send_sync("orders", b"1", queue=0)
            crowd = [stack.enter_context(Wire(server.endpoint)) for _ in range(60)]
            for wire in crowd[::3]:
                # One that was ended for a later one has an ERROR, or nothing.
                with contextlib.suppress(OSError, AssertionError, ProtocolError):
                    wire.shake_hands()
                    ask(wire, api.AskMap(1))
            until(lambda: server._connections.refused >= 40)
            assert producer.send_sync("orders", b"2", queue=0).queue_offset == 1
            assert server._connections.count <= 20 and server.connections == 1


def test_an_identity_over_its_bound_gives_its_places_to_others(
    secured: Secured, caplog: pytest.LogCaptureFixture
) -> None:
    web, batch = secured.identity("web", produce=ALL), secured.identity("batch", produce=ALL)
    config = ApiConfig(
        max_connections=4, max_connections_of_identity=2, max_connections_of_address=9,
        evict_idle_ms=3_600_000,
    )  # fmt: skip
    with secured.server(config=config) as server, contextlib.ExitStack() as stack:

        def comes(mine: Security) -> tuple[Wire, api.Reply]:
            wire = stack.enter_context(Wire(server.endpoint))
            wire.shake_hands()
            return wire, prove(wire, mine)

        crowd = [comes(batch)[0] for _ in range(4)]  # it may have them all while nobody else comes
        first, welcome = comes(web)
        assert isinstance(welcome, api.Welcome) and not crowd[0].until_closed()
        last = stack.enter_context(Wire(server.endpoint))
        last.shake_hands()
        assert not crowd[1].until_closed()
        with pytest.raises(AssertionError, match="closed"):
            prove(last, batch)
        assert "api.max_connections_of_identity" in caplog.text
        assert isinstance(ask(first, api.AskMap(3)), api.Map)
        assert isinstance(ask(crowd[2], api.AskMap(3)), api.Map)


def test_a_node_without_identities_cannot_prove_itself(secured: Secured) -> None:
    mine = secured.identity("orders", produce=ALL)
    with secured.server(identities=False) as server:
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            assert isinstance(ask(wire, api.AskMap(1)), api.Map)
            refused = prove(wire, mine)
            assert isinstance(refused, api.Failed) and refused.status == "UNAUTHENTICATED"
        with Admin([server.endpoint], security=mine) as admin:
            with pytest.raises(NotAuthenticatedError, match=r"security\.identities"):
                admin.status()


# -- the exchange


def test_the_exchange_over_the_wire(secured: Secured) -> None:
    mine = secured.identity("orders", produce='["orders", "orders-*"]', consume=ALL)
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        welcome = prove(wire, mine)
        assert isinstance(welcome, api.Welcome)
        assert welcome.rights == api.Rights(["orders", "orders-*"], ["*"], False)
        assert isinstance(ask(wire, api.AskMap(1)), api.Map)
        again = prove(wire, mine)
        assert isinstance(again, api.Failed) and again.status == "FORBIDDEN"


@pytest.mark.parametrize("kind", ["wrong key", "unknown", "another group's", "no proof asked"])
def test_a_wrong_proof_is_refused_once_and_noted(secured: Secured, kind: str) -> None:
    mine = secured.identity("orders", produce=ALL)
    other = Secured(secured.folder / "other")
    other.folder.mkdir()
    theirs = other.identity("orders", produce=ALL)
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        if kind == "unknown":
            mine = Security(identity="nobody", key_file=mine.key_file)
        elif kind != "no proof asked":
            mine = theirs
        if kind == "no proof asked":
            reply = ask(wire, api.Prove(1, "c=biws,r=abc,p=AAAA"))
        else:
            reply = prove(wire, mine)
        assert isinstance(reply, api.Failed) and reply.status == "UNAUTHENTICATED"
        [error] = wire.until_closed()
        assert error.body.startswith(b"\x05ERROR")
        assert secured.notes[-1]["action"] == "authenticate"
        assert secured.notes[-1]["outcome"] == "refused"
        key = pathlib.Path(str(mine.key_file)).read_text().strip()
        assert key not in str(secured.notes) + reply.reason


class Recorder(Wire):
    """A connection on which somebody listens."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.said: list[bytes] = []

    def send(self, *parts: bytes) -> None:
        self.said.append(b"".join(parts))
        super().send(*parts)


def test_a_recorded_exchange_cannot_be_played_again(secured: Secured) -> None:
    mine = secured.identity("orders", produce=ALL)
    with secured.server() as server:
        with Recorder(server.endpoint) as wire:
            wire.shake_hands()
            assert isinstance(prove(wire, mine), api.Welcome)
        said = wire.said[-2:]
        with Wire(server.endpoint) as thief:
            thief.shake_hands()
            thief.send(said[0])
            assert isinstance(api.decode_reply(thief.frame().body), api.Challenge)
            thief.send(said[1])
            reply = api.decode_reply(thief.frame().body)
            assert isinstance(reply, api.Failed) and reply.status == "UNAUTHENTICATED"


def test_mechanisms_are_not_negotiated_down(secured: Secured) -> None:
    secured.identity("orders", produce=ALL)
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        for mechanism in ("PLAIN", "SCRAM-SHA-1", "SCRAM-SHA-256-PLUS"):
            reply = ask(wire, api.Auth(1, mechanism, "n,,n=orders,r=abcdefghijkl"))
            assert isinstance(reply, api.Failed) and "SCRAM-SHA-256 is" in reply.reason


# -- rights


def test_each_record_of_a_batch_is_checked_by_its_own_topic(secured: Secured) -> None:
    mine = secured.identity("orders", produce='["orders*"]')
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        assert isinstance(prove(wire, mine), api.Welcome)
        topics = ("orders", "money", "orders-2", "HASTORE_POSITIONS")
        done = put(wire, b"".join(map(record, topics)))
        ok, no = api.Status.PUT_OK, api.Status.FORBIDDEN
        assert done.statuses == [ok, no, ok, no]
        assert "orders" in done.reason and "'money'" in done.reason
        assert secured.backend.store.topics().keys() == {"orders", "orders-2"}
        whole = put(wire, record("money") * 3)
        assert whole.statuses == [no] * 3
        assert (whole.status, whole.epoch, whole.level) == (no, 0, "")
        assert put(wire, record("orders") * 3).statuses is None
    assert [note["outcome"] for note in secured.notes] == ["forbidden"] * 2


def test_the_producers_of_an_identity_are_its_own(secured: Secured) -> None:
    """Who reads their ids can neither hide their messages nor have them refused."""
    mine = secured.identity("orders", produce=ALL)
    other = secured.identity("other", produce=ALL, consume=ALL)
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        prove(wire, other)
        with Producer([server.endpoint], security=mine) as producer:
            assert producer.producer_id.startswith(own_prefix("orders"))
            producer.send_sync("t", b"0", queue=0)

            def numbered(producer_id: str, number: int) -> bytes:
                return record("t", b"?", (("HS_PID", producer_id), ("HS_SEQ", str(number))))

            theirs = own_prefix("other") + "1234567890abcdef"
            for number in (1, 5_000):  # the next one hides a message, a far one blocks them all
                done = put(wire, numbered(producer.producer_id, number))
                assert done.statuses == [api.Status.FORBIDDEN]
                assert "belongs to another identity than other" in done.reason
            assert put(wire, numbered(theirs, 1)).statuses is None
            assert put(wire, numbered("anybody", 1)).statuses is None
            reply = ask(wire, api.AskProducer(3, producer.producer_id))
            assert isinstance(reply, api.Failed) and reply.status == "FORBIDDEN"
            assert isinstance(ask(wire, api.AskProducer(3, theirs)), api.ProducerKnown)
            assert producer.send_sync("t", b"1", queue=0).queue_offset == 3
        assert [note["identity"] for note in secured.notes] == ["other"] * 3

        async def send() -> str:
            async with aio.Producer([server.endpoint], security=mine) as asynchronous:
                await asynchronous.send("t", b"2", queue=0)
                return asynchronous.producer_id

        assert asyncio.run(send()).startswith(own_prefix("orders"))


def test_star_does_not_stand_for_the_topic_of_positions(secured: Secured) -> None:
    mine = secured.identity("all", produce=ALL, consume=ALL)
    boss = secured.identity("boss", admin="true")
    with secured.server() as server:
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            prove(wire, mine)
            done = put(wire, record(api.POSITIONS_TOPIC))
            assert done.statuses == [api.Status.FORBIDDEN]
            pull = api.Pull(3, api.POSITIONS_TOPIC, 0, api.Position(0))
            reply = ask(wire, pull)
            assert isinstance(reply, api.Failed) and reply.status == "FORBIDDEN"
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            prove(wire, boss)
            assert put(wire, record("t")).statuses == [api.Status.FORBIDDEN]


REQUESTS = {
    "pull": api.Pull(1, "money", 0, api.Position(0)),
    "key": api.FindKey(1, "money", "k"),
    "time": api.FindTime(1, "money", 0, 0),
    "fetch": api.Fetch(1, "g", "money"),
    "commit": api.Commit(1, "g", "money", {0: api.Position(0)}),
    "members": api.AskMembers(1, "money-team"),
    "back": api.SendBack(1, "orders-team", "money", 0, 0, 0),
    "topics": api.AskTopics(1, "money"),
    "configs": api.AskConfigs(1, "money"),
    "at": api.FindOffset(1, 0),
    "digest": api.AskDigest(1, 0, 0),
    "bytes": api.AskBytes(1, 0, 0),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_each_request_needs_its_right(secured: Secured, request_: Any) -> None:
    secured.backend.store.put_encoded([record("money"), record("orders")])
    narrow = secured.identity(
        "narrow", consume='["orders"]', produce='["orders"]', groups='["orders-team"]'
    )
    wide = secured.identity("wide", consume=ALL)
    with secured.server() as server:
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            prove(wire, narrow)
            reply = ask(wire, request_)
            assert isinstance(reply, api.Failed) and reply.status == "FORBIDDEN", reply
            right = "groups" if isinstance(request_, api.AskMembers) else "consume"
            assert "narrow" in reply.reason and right in reply.reason
            assert isinstance(ask(wire, api.AskMap(2)), api.Map)
            assert isinstance(ask(wire, api.AskStatus(3)), api.NodeStatus)
        with Wire(server.endpoint) as wire:
            wire.shake_hands()
            prove(wire, wide)
            reply = ask(wire, request_)
            if isinstance(request_, api.AskMembers | api.SendBack):  # this node has none
                assert isinstance(reply, api.Failed) and "no queues are shared" in reply.reason
            else:
                assert not isinstance(reply, api.Failed), reply


def test_who_may_consume_nothing_does_not_see_the_members_of_a_group(secured: Secured) -> None:
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        prove(wire, secured.identity("nobody"))
        reply = ask(wire, api.AskMembers(1, "team"))
        assert isinstance(reply, api.Failed) and reply.status == "FORBIDDEN", reply
        assert "may consume no topic" in reply.reason


def test_who_is_about_to_change_a_topic_is_told_that_it_takes_an_admin(secured: Secured) -> None:
    """A right to consume it would not help."""
    shop = secured.identity("shop", produce='["orders"]')
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        prove(wire, shop)
        reply = ask(wire, api.AskConfigs(1, "zz"))
        assert reply.reason.startswith("identity shop is no admin, so it may not change topics")
        assert reply.reason.endswith("can set its `admin`")


def test_the_list_of_topics_names_none_that_an_identity_may_not_use(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = secured.backend.store
    store.put_encoded([record("money"), record("orders")])
    monkeypatch.setattr(store, "ended", lambda _topic, _log_start: {0: 0})
    narrow = secured.identity("narrow", consume='["orders"]')
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        prove(wire, narrow)
        assert ask(wire, api.AskTopics(1)) == api.Topics(
            1, {"orders": {0: (0, 1)}}, 4, {"orders": {0: 0}}
        )


def test_what_a_list_of_topics_names_is_chosen_by_the_thread_of_queries(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 50,000 topics and 20 patterns it took 0.7 s, and meanwhile no put was answered."""
    real, threads = access._may_see, set[str]()

    def may_see(identity: Identity, topic: str) -> bool:
        threads.add(threading.current_thread().name)
        return real(identity, topic)

    monkeypatch.setattr(access, "_may_see", may_see)
    secured.backend.store.put_encoded([record("money"), record("orders")])
    narrow = secured.identity("narrow", consume='["orders"]')
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        prove(wire, narrow)
        assert ask(wire, api.AskTopics(1)).topics.keys() == {"orders"}
        assert [one.name for one in ask(wire, api.AskConfigs(2)).topics] == ["orders"]
    assert threads == {"QueryService"}


def test_positions_need_the_group_where_groups_are_named(secured: Secured) -> None:
    secured.backend.store.put_encoded([record("money")])
    some = secured.identity("some", consume=ALL, groups='["g*"]')
    none = secured.identity("none", consume=ALL, groups="[]")
    places = {0: api.Position(0)}
    with secured.server() as server:
        for identity, group, allowed in (
            (some, "g1", True),
            (some, "other", False),
            (none, "g1", False),
        ):
            with Wire(server.endpoint) as wire:
                wire.shake_hands()
                prove(wire, identity)
                for asked in (
                    api.Fetch(1, group, "money"),
                    api.Commit(2, group, "money", places),
                ):
                    reply = ask(wire, asked)
                    assert isinstance(reply, api.Failed) is not allowed, reply
                    if not allowed:
                        assert reply.status == "FORBIDDEN" and f"group '{group}'" in reply.reason


def test_what_an_administrator_changes_is_noted_and_a_consumer_s_commits_are_not(
    secured: Secured,
) -> None:
    secured.backend.store.put_encoded([record("money")])
    boss = secured.identity("boss", admin="true", consume='["money"]')
    with secured.server() as server:
        where = [server.endpoint]
        with Admin(where, security=boss) as admin:
            admin.create_topic("victim", queues=2)
            admin.set_topic("victim", read_queues=3)
            admin.delete_topic("victim")
            admin.delete_topic("victim")
        with Positions(where, security=boss) as positions:
            positions.commit("team", "money", {0: 1})
            positions.commit("team", "money", {0: 0}, allow_back=True)
    assert {one["identity"] for one in secured.notes} == {"boss"}
    assert all(one["address"].startswith("127.0.0.1:") for one in secured.notes)
    found = [(one["action"], one["outcome"], one["reason"]) for one in secured.notes]
    assert [one[:2] for one in found] == [
        ("topic create", "done"), ("topic set", "done"), ("topic delete", "done"),
        ("topic delete", "unchanged"), ("positions moved", "done"),
    ]  # fmt: skip
    assert found[0][2].startswith("victim: 2 queues") and found[2][2] == "victim"
    assert found[4][2] == "group team, topic money: queue 0 to 0"


def test_topics_without_a_right_are_not_listed(secured: Secured) -> None:
    secured.backend.store.put_encoded([record("money"), record("orders"), record("in")])
    narrow = secured.identity("narrow", consume='["orders"]', produce='["in"]')
    with secured.server() as server, Admin([server.endpoint], security=narrow) as admin:
        assert admin.topics().keys() == {"orders", "in"}
        assert admin.topic_configs().keys() == {"orders", "in"}


def test_only_an_admin_changes_topics(secured: Secured) -> None:
    wide = secured.identity("wide", produce=ALL, consume=ALL)
    boss = secured.identity("boss", admin="true")
    with secured.server() as server:
        with Admin([server.endpoint], security=wide) as admin:
            with pytest.raises(ForbiddenError, match="no admin"):
                admin.create_topic("new")
            with pytest.raises(ForbiddenError, match="no admin"):
                admin.delete_topic("new")
        assert {note["identity"] for note in secured.notes} == {"wide"}
        with Admin([server.endpoint], security=boss) as admin:
            admin.create_topic("new", queues=2)
            assert admin.topic_configs()["new"].read_queues == 2
        with Admin([server.endpoint], security=wide) as admin:
            assert admin.topics()["new"] == {0: (0, 0), 1: (0, 0)}
            assert admin.topic_configs().keys() == {"new"}


# -- the clients


def test_all_clients_prove_who_they_are(secured: Secured) -> None:
    mine = secured.identity("orders", produce='["orders"]', consume='["orders"]')
    with secured.server() as server:
        where = [server.endpoint]
        with Producer(where, security=mine) as producer:
            sent = [producer.send_sync("orders", b"%d" % n, queue=0) for n in range(5)]
        with Consumer("orders", where, group="g", security=mine) as consumer:
            got = []
            until(lambda: got.extend(consumer.poll()) or len(got) == 5)
            consumer.commit()
        assert [message.body for message in got] == [b"%d" % n for n in range(5)]
        with Positions(where, security=mine) as positions:
            assert positions.committed("g", "orders")[0].queue_offset == 5
        with Admin(where, security=mine) as admin:
            assert admin.status()[0].node == 1
            assert sent[0].msg_id is not None
            with pytest.raises(ForbiddenError, match="consume"):
                admin.query_message_id(sent[0].msg_id)
        link = BulkLink(server.endpoint, 20.0, make_prover(mine))
        link.send(api.Pull(1, "orders", 0, api.Position(0), bulk=True))
        reply, payload = link.receive()
        assert isinstance(reply, api.Pulled) and reply.count == 5 and payload
        link.close()


def test_an_admin_sees_where_all_groups_are_and_moves_none(secured: Secured) -> None:
    """As `hastore groups` does, by the administrator that docs/security.md makes."""
    mine = secured.identity("orders", produce='["orders"]', consume='["orders"]')
    boss = secured.identity("boss", admin="true")
    with secured.server() as server:
        where = [server.endpoint]
        with Producer(where, security=mine) as producer:
            producer.send_sync("orders", b"1", queue=0)
        with Positions(where, security=mine) as positions:
            positions.commit("g", "orders", {0: 1})
            with pytest.raises(ForbiddenError, match="HASTORE_POSITIONS"):
                positions.all()
        with Positions(where, security=boss) as positions:
            assert positions.all() == {("g", "orders"): {0: 1}}
            with pytest.raises(ForbiddenError, match="consume"):
                positions.commit("g", "orders", {0: 0}, allow_back=True)
        with Consumer("orders", where, security=boss) as consumer:
            with pytest.raises(ForbiddenError, match="consume"):
                consumer.poll(timeout_s=60)


def test_the_environment_names_the_security_of_every_client(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    secured.identity("orders", produce=ALL)
    path = secured.folder / "client.yaml"
    path.write_text("identity: orders\nkey_file: orders.key\n")
    monkeypatch.setenv("HASTORE_SECURITY", str(path))
    with secured.server() as server:
        with Producer([server.endpoint]) as producer:
            assert producer.send_sync("orders", b"x", queue=0).status is api.Status.PUT_OK
        with Admin([server.endpoint], security=Security()) as admin:  # the environment is not used
            with pytest.raises(NotAuthenticatedError, match="asks its clients"):
                admin.status()


def test_a_forbidden_put_fails_at_once_and_others_go_on(secured: Secured) -> None:
    mine = secured.identity("orders", produce='["orders"]')
    with secured.server() as server, Producer([server.endpoint], security=mine) as producer:
        producer.send_sync("orders", b"1", queue=0)
        begun = time.monotonic()
        futures = [producer.send(topic, b"2", queue=0) for topic in ("orders", "money", "orders")]
        with pytest.raises(ForbiddenError, match="orders has no right to produce 'money'"):
            futures[1].result(SOON_S)
        assert futures[0].result(SOON_S).queue_offset == 1
        assert futures[2].result(SOON_S).queue_offset == 2
        assert time.monotonic() - begun < SOON_S


def test_a_forbidden_topic_ends_a_poll(secured: Secured) -> None:
    mine = secured.identity("orders", consume='["orders"]')
    with secured.server() as server:
        with Consumer("money", [server.endpoint], queues=[0], security=mine) as consumer:
            with pytest.raises(ForbiddenError, match="no right to consume 'money'"):
                until(lambda: consumer.poll(timeout_s=0.1))


@pytest.mark.parametrize("given", ["wrong", "none"])
def test_clients_without_the_right_key_end_at_once(secured: Secured, given: str) -> None:
    secured.identity("orders", produce=ALL, consume=ALL)
    wrong = secured.folder / "wrong.key"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    security = Security(identity="orders", key_file=str(wrong))
    if given == "none":
        security = Security()
    text = "orders" if given == "wrong" else "asks its clients who they are"
    with secured.server() as server:
        where = [server.endpoint]
        begun = time.monotonic()
        with Producer(where, security=security) as producer:
            with pytest.raises(NotAuthenticatedError, match=text):
                producer.send_sync("orders", b"x", queue=0)
            with pytest.raises(NotAuthenticatedError, match=text):
                producer.send("orders", b"x")
        with Consumer("orders", where, security=security) as consumer:
            with pytest.raises(NotAuthenticatedError, match=text):
                consumer.poll(timeout_s=60)
        with Admin(where, security=security) as admin:
            with pytest.raises(NotAuthenticatedError, match=text):
                admin.status()
        if given == "wrong":
            with pytest.raises(NotAuthenticatedError, match=text):
                BulkLink(server.endpoint, 20.0, make_prover(security))
        assert time.monotonic() - begun < SOON_S


def test_a_client_does_not_trust_a_node_that_does_not_know_its_key(secured: Secured) -> None:
    """A stranger's node that accepts everybody cannot pass for the group."""
    mine = secured.identity("orders", produce=ALL)
    fake = Secured(secured.folder / "fake")
    fake.folder.mkdir()
    fake.identity("orders", produce=ALL)
    with fake.server() as server:
        exchange = server._access._identities.exchange  # type: ignore[union-attr]

        def accepting() -> Any:
            one = exchange()

            def prove_anything(_message: str) -> str:
                one.name = "orders"
                one.verifier = fake_verifier(server)
                return "v=" + "A" * 43 + "="

            one.prove = prove_anything  # type: ignore[method-assign]
            return one

        server._access._identities.exchange = accepting  # type: ignore[union-attr,method-assign]
        with Producer([server.endpoint], security=mine) as producer:
            with pytest.raises(NotAuthenticatedError, match="not the node it claims to be"):
                producer.send_sync("orders", b"secret", queue=0)
    assert not fake.backend.store.log


def fake_verifier(server: Any) -> Any:
    return server._access._identities.find("orders").keys[0].verifier


# -- revocation


def test_a_revoked_identity_is_cut_off_with_its_parked_pulls(secured: Secured) -> None:
    mine = secured.identity("orders", produce=ALL, consume=ALL)
    stays = secured.identity("stays", produce=ALL)
    with secured.server() as server:
        with Wire(server.endpoint) as wire, Wire(server.endpoint) as other:
            for each, who in ((wire, mine), (other, stays)):
                each.shake_hands()
                assert isinstance(prove(each, who), api.Welcome)
            wire.send(frame(api.encode(api.Pull(7, "orders", 0, api.Position(0), 1, 1, 60_000))))
            until(lambda: server._pulls.parked == 1)
            secured.revoke("orders")
            [error] = wire.until_closed()
            assert b"revoked" in error.body
            until(lambda: server._pulls.parked == 0)
            assert isinstance(ask(other, api.AskMap(1)), api.Map)
        assert any(note["outcome"] == "ended" for note in secured.notes)


def test_a_client_whose_identity_is_revoked_ends_clearly(secured: Secured) -> None:
    mine = secured.identity("orders", produce=ALL, consume=ALL)
    with secured.server() as server:
        with Producer([server.endpoint], security=mine) as producer:
            producer.send_sync("orders", b"x", queue=0)
            with Consumer("orders", [server.endpoint], security=mine) as consumer:
                until(consumer.poll)
                secured.revoke("orders")
                with pytest.raises(NotAuthenticatedError, match="orders"):
                    until(lambda: consumer.poll(timeout_s=0.1))
            with pytest.raises(NotAuthenticatedError, match="orders"):
                until(lambda: sends(producer) and False)


def test_changed_rights_count_for_open_connections(secured: Secured) -> None:
    mine = secured.identity("orders", produce='["orders"]')
    with secured.server() as server, Producer([server.endpoint], security=mine) as producer:
        with pytest.raises(ForbiddenError):
            producer.send_sync("money", b"x", queue=0)
        entry = secured.text.entries["orders"]
        secured.text.entries["orders"] = entry.replace('["orders"]', '["money"]')
        secured.save()

        def allowed() -> bool:
            try:
                return bool(producer.send_sync("money", b"x", queue=0))
            except ForbiddenError:
                return False

        until(allowed)
        with pytest.raises(ForbiddenError):
            producer.send_sync("orders", b"x", queue=0)


# -- arguments


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"identity": "orders"}, "key_file is missing"),
        ({"key_file": "k"}, "identity is missing"),
        ({"tls_certificate": "c", "tls_key": "k"}, "tls_ca is missing"),
        ({"tls_ca": "c", "tls_key": "k"}, "tls_certificate is missing"),
        ({"tls_ca": 5}, "tls_ca"),
        ({"identity": "a", "key_file": "0f" * 32}, "^((?!0f0f).)*a key stands((?!0f0f).)*$"),
        ({"user": "x"}, "'user' is unknown"),
        (5, "security"),
    ],
)
def test_wrong_arguments_are_refused(given: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Producer(["tcp://127.0.0.1:1"], security=given)


def test_wrong_files_are_refused(secured: Secured) -> None:
    mine = secured.identity("orders")
    assert mine.key_file is not None
    folder = secured.folder
    bad = folder / "bad.yaml"
    for text, told in (
        ("identity: [", "not valid YAML"),
        ("just text", "has no keys"),
        ("user: me", "'user' is unknown"),
        ("identity: orders", "key_file is missing"),
    ):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=told):
            Admin(["tcp://127.0.0.1:1"], security=str(bad))
    with pytest.raises(ConfigError, match="cannot be read"):
        Admin(["tcp://127.0.0.1:1"], security=str(folder / "missing.yaml"))
    (folder / "orders.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Admin(["tcp://127.0.0.1:1"], security=mine)
    (folder / "orders.key").chmod(0o600)
    (folder / "orders.key").write_text("not a key")
    with pytest.raises(ConfigError, match="holds no key") as told_:
        Admin(["tcp://127.0.0.1:1"], security=mine)
    assert "not a key\n" not in str(told_.value)


# -- strangers that cost as much as they can


def test_a_stranger_may_not_send_much(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PINGs are no requests, and each one is answered: without a bound, replies would pile up."""
    monkeypatch.setattr(api_connections, "HANDSHAKE_MS", 600_000.0)
    ping = command(b"PING", b"\0\0" + b"c" * 16)
    with secured.server() as server, Wire(server.endpoint) as wire:
        wire.shake_hands()
        with contextlib.suppress(ConnectionError):  # the node has closed it
            wire.send(ping * 20_000)
        until(lambda: server._connections.count == 0)
        assert server._connections.unsent_bytes == 0
        assert "before it has proved who it is" in caplog.text


def test_strangers_do_not_crowd_out_those_who_are_known(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest unfinished message goes first, but before it all those of strangers."""
    mine = secured.identity("orders", produce=ALL)
    monkeypatch.setattr(api_connections, "HELD_BYTES_MAX", 64 * 1024)
    monkeypatch.setattr(api_connections, "CROWDED_MS", 0.0)
    payload = record("t", body=bytes(50_000))
    message = frame(api.encode(api.Put(9, 1)), MORE) + frame(payload)
    with secured.server() as server, contextlib.ExitStack() as open_ones:
        wire = open_ones.enter_context(Wire(server.endpoint))
        wire.shake_hands()
        assert isinstance(prove(wire, mine), api.Welcome)
        wire.send(message[:-10])
        until(lambda: server._connections.held_bytes > 40_000)
        for _ in range(10):
            stranger = open_ones.enter_context(Wire(server.endpoint))
            stranger.shake_hands()
            stranger.send(frame(bytes(4_000))[:-10])
        until(lambda: server._connections.ended > 0)
        wire.send(message[-10:])
        reply = api.decode_reply(wire.frame().body)
        assert isinstance(reply, api.PutDone) and reply.status is api.Status.PUT_OK


def test_a_key_that_is_gone_when_a_node_pings_at_once(secured: Secured) -> None:
    """The connection is given up in the middle of what has arrived; nothing more is sent on it."""
    mine = secured.identity("orders", produce=ALL)
    assert mine.key_file is not None
    transport = SocketTransport(SYSTEM_CLOCK, make_prover(mine))
    pathlib.Path(mine.key_file).unlink()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        transport.open([address])
        transport.wait(1.0)
        node, _ = listener.accept()
        with node:
            ping = command(b"PING", b"\0\0")
            node.sendall(greeting() + ready(b"ROUTER") + ping + frame(api.encode(api.Found(0, 0))))
            arrivals: list[Arrival] = []
            until(lambda: bool(arrivals.extend(transport.wait(0.1)) or arrivals))
    transport.close()
    [down] = arrivals
    assert down.refused is not None and "cannot be read" in down.refused


def test_the_command_consume_says_that_a_right_is_missing(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A topic without a right is not listed, so it must not count as one without messages."""
    shop = secured.identity("shop", produce='["carts"]', consume='["orders"]')
    file = secured.folder / "shop.yaml"
    file.write_text(f"identity: shop\nkey_file: {shop.key_file}\n")
    monkeypatch.setenv("HASTORE_SECURITY", str(file))
    status = {**secured.backend.status(), "writable": False}
    monkeypatch.setattr(secured.backend, "status", lambda: status)
    with secured.server() as server:
        for topic, code, says in (
            ("payments", 1, "FORBIDDEN: identity shop has no right to consume 'payments'"),
            ("orders", 0, "topic orders has no messages yet"),
        ):
            words = ["consume", topic, "--bootstrap", server.endpoint]
            assert run_code(cli, "hastore", words) == code
            assert says in capsys.readouterr().err
