"""A node with identities asks RocketMQ's clients for signatures, and gives each its rights."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import secrets
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from hastore.client.security import Security
from hastore.config import model
from hastore.config.model import RemotingConfig, SecurityConfig
from hastore.protocol import api
from hastore.protocol.remoting import ROCKETMQ, Answer, Code, Frame
from hastore.record.codec import decode_record
from hastore.security.identity import Identity, Quota
from hastore.security.identity_editor import IdentityEditor
from hastore.security.tls_engine import NodeName
from hastore.server.metrics.from_status import render_metrics
from hastore.server.node import Node
from hastore.server.remoting.acl import SOURCES_MAX, WRONG_MAX, WRONG_PER_S, Wrong
from hastore.server.remoting.rights import NEEDS
from tests.ha.nodes import wait_for
from tests.process.harness import audit_lines
from tests.process.wire import Wire
from tests.security.pki import Pki
from tests.server.api.secured import ask, prove
from tests.server.kit import config_of, running
from tests.server.remoting.desk import VirtualClock
from tests.server.remoting.kit import RemotingClient
from tests.server.remoting.signing import send_fields, signed
from tests.server.remoting.test_request_codes import PAGE, WholeDesk

SHOP = Identity("shop", ("Shop*",), ("Shop*",), groups=("shop*",))
READER = Identity("reader", (), ("Shop",), groups=("reader",))
MAKER = Identity("maker", ("Shop",), (), groups=None)
OPS = Identity("ops", is_admin=True)
ALL = (SHOP, READER, MAKER, OPS)


class Identified:
    """A node with identities, and their secrets."""

    def __init__(self, folder: pathlib.Path, **remoting: Any) -> None:
        self.path = str(folder / "ids.yaml")
        self.secrets = {one.name: secrets.token_hex(32) for one in ALL}
        editor = IdentityEditor(self.path, create=True)
        for one in ALL:
            editor.add(one, None, 0, secret=self.secrets[one.name])
        editor.save()
        security = SecurityConfig(identities=self.path)
        config = replace(
            config_of(folder / "store"), security=security, remoting=RemotingConfig(**remoting)
        )
        self.node = Node(config, lambda: None)
        self._ends = contextlib.ExitStack()

    def client(self) -> RemotingClient:
        made = RemotingClient(self.node.api.endpoint)
        self._ends.callback(made.close)
        return made

    def ask(
        self, name: str, code: int, fields: dict[str, str] | None = None, body: bytes = b"",
        client: RemotingClient | None = None,
    ) -> Frame:  # fmt: skip
        given = signed(name, self.secrets[name], fields, body)
        return (client or self.client()).ask(code, given, body)

    def settled(self) -> None:
        """Wait until readers may see all that is stored."""
        store = self.node.backend.store
        wait_for(lambda: store.dispatched_offset == store.readable_offset == store.max_offset)

    def edit(self, change: Callable[[IdentityEditor], object]) -> None:
        editor = IdentityEditor(self.path)
        change(editor)
        editor.save()

    def audit(self, action: str) -> list[dict[str, Any]]:
        return audit_lines(self.node.config.store.root, action)

    @contextlib.contextmanager
    def own(self, who: Identity, **quota: str) -> Iterator[Wire]:
        """Add an identity with a key; connect as its client of hastore's own protocol."""
        key, path = secrets.token_hex(32), pathlib.Path(f"{self.path}.{who.name}.key")
        path.write_text(key + "\n")
        path.chmod(0o600)
        self.edit(lambda editor: editor.add(who, key, 0))
        self.edit(lambda editor: editor.set_rights(editor.find(who.name), quota))
        with Wire(self.node.api.endpoint) as wire:
            wire.shake_hands()
            security = Security(identity=who.name, key_file=str(path))
            assert isinstance(prove(wire, security), api.Welcome)
            yield wire

    def add(self, name: str, rights: str) -> str:
        """Add an identity with a secret and these lines; return its name."""
        self.secrets[name] = secrets.token_hex(32)
        path = pathlib.Path(self.path)
        path.write_text(
            path.read_text() + f"  {name}:\n    {rights}\n"
            f"    secrets:\n      - secret: {self.secrets[name]}\n"
        )
        return name

    def close(self) -> None:
        self._ends.close()


@pytest.fixture
def known(tmp_path: pathlib.Path) -> Iterator[Identified]:
    made = Identified(tmp_path)
    with running(made.node):
        yield made
        made.close()


def pull_fields(topic: str, group: str) -> dict[str, str]:
    return {
        "consumerGroup": group, "topic": topic, "queueId": "0", "queueOffset": "0",
        "sysFlag": "0", "maxMsgNums": "32", "commitOffset": "0", "subVersion": "0",
    }  # fmt: skip


def heartbeat(*groups: str) -> bytes:
    consumers = [{"groupName": one, "consumeType": "CONSUME_PASSIVELY"} for one in groups]
    return json.dumps({"clientID": "c", "consumerDataSet": consumers}).encode()


def subscribing(client: str, group: str, tags: dict[str, str], version: int) -> bytes:
    """Return the heartbeat of a consumer that wants these tags of these topics."""
    wanted = [
        {"topic": topic, "subString": tag, "expressionType": "TAG", "subVersion": version}
        for topic, tag in tags.items()
    ]
    consumer = {
        "groupName": group, "consumeType": "CONSUME_PASSIVELY", "subscriptionDataSet": wanted,
    }  # fmt: skip
    return json.dumps({"clientID": client, "consumerDataSet": [consumer]}).encode()


# -- who


def test_a_signed_send_is_stored_and_read(known: Identified) -> None:
    assert known.ask("shop", Code.SEND_MESSAGE_V2, send_fields("Shop"), b"x").code == 0
    known.settled()
    found = known.ask("reader", Code.PULL_MESSAGE, pull_fields("Shop", "reader"))
    assert found.code == 0 and decode_record(found.body).body == b"x"
    assert known.node.backend.status()["acl"] == {"signed": 2, "unproved": 0, "forbidden": 0}


def test_a_first_request_may_be_large(known: Identified) -> None:
    body = secrets.token_bytes(1_000_000)  # of 64 KiB this node's log takes
    answer = known.ask("shop", Code.SEND_MESSAGE_V2, send_fields("Shop"), body)
    assert answer.code == Answer.MESSAGE_ILLEGAL and "a record of" in str(answer.remark)


def test_a_field_that_comes_twice_in_binary_is_read_once(known: Identified) -> None:
    fields = signed("shop", known.secrets["shop"], send_fields("Shop"), b"x")
    client = known.client()
    assert client.answer_of(client.send(310, fields, b"x", kind=ROCKETMQ)).code == 0


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("no signature", lambda fields: fields.pop("Signature")),
        ("an empty one", lambda fields: fields.update(Signature="")),
        ("no AccessKey", lambda fields: fields.pop("AccessKey")),
        ("nothing", lambda fields: (fields.pop("AccessKey"), fields.pop("Signature"))),
        ("empty, as C++ sends it", lambda fields: fields.update(AccessKey="", Signature="")),
        ("a wrong signature", lambda fields: fields.update(Signature="A" * 27 + "=")),
        ("a short one", lambda fields: fields.update(Signature="A")),
        ("a huge one", lambda fields: fields.update(Signature="A" * 100_000)),
        ("one that is not ASCII", lambda fields: fields.update(Signature="é" * 28)),
        ("an unknown AccessKey", lambda fields: fields.update(AccessKey="nobody")),
        ("a huge AccessKey", lambda fields: fields.update(AccessKey="a" * 100_000)),
        ("one that is not ASCII", lambda fields: fields.update(AccessKey="shöp")),
        ("one with a line break", lambda fields: fields.update(AccessKey="shop\n")),
        ("another value", lambda fields: fields.update(b="Shop2")),
        ("another field", lambda fields: fields.update(extra="1")),
        ("one field less", lambda fields: fields.pop("g")),
    ],
)
def test_what_is_not_signed_right_is_refused(
    known: Identified, what: str, change: Callable[[dict[str, str]], object]
) -> None:
    del what
    fields = signed("shop", known.secrets["shop"], send_fields("Shop"), b"x")
    change(fields)
    answer = known.client().ask(Code.SEND_MESSAGE_V2, fields, b"x")
    assert answer.code == Answer.NO_PERMISSION
    assert "AccessKey" in str(answer.remark) and "SecretKey" in str(answer.remark)
    assert known.secrets["shop"] not in str(answer.remark)
    assert known.node.backend.store.max_offset == 0
    (noted,) = wait_for(lambda: known.audit("authenticate"))
    assert noted["outcome"] == "refused" and noted["address"].startswith("127.0.0.1:")


def test_a_wrong_key_and_a_wrong_signature_are_told_the_same(known: Identified) -> None:
    fields = signed("shop", "x" * 32, send_fields("Shop"), b"x")
    wrong = known.client().ask(310, fields, b"x")
    unknown = known.client().ask(310, signed("nobody", "x" * 32, send_fields("Shop"), b"x"), b"x")
    keyless = known.client().ask(310, {**fields, "AccessKey": "."}, b"x")
    assert wrong.remark == unknown.remark == keyless.remark
    assert {wrong.code, unknown.code, keyless.code} == {Answer.NO_PERMISSION}


def test_a_body_that_is_not_the_signed_one_is_refused(known: Identified) -> None:
    fields = signed("shop", known.secrets["shop"], send_fields("Shop"), b"ten pears")
    assert known.client().ask(310, fields, b"two pears").code == Answer.NO_PERMISSION
    assert known.client().ask(310, fields, b"ten pears").code == 0
    # Nothing in a signature is fresh: who has read a request can send it again.
    assert known.client().ask(310, fields, b"ten pears").code == 0


def test_a_request_that_has_no_body_must_have_none(known: Identified) -> None:
    answer = known.ask("reader", Code.PULL_MESSAGE, pull_fields("Shop", "reader"), b"ballast")
    assert answer.code == Answer.MESSAGE_ILLEGAL and "has no body" in str(answer.remark)


def test_a_connection_belongs_to_one_identity(known: Identified) -> None:
    client = known.client()
    assert known.ask("shop", 310, send_fields("Shop"), b"x", client).code == 0
    refused = known.ask("ops", Code.GET_BROKER_CONFIG, {}, b"", client)
    assert refused.code == Answer.NO_PERMISSION and "is shop's already" in str(refused.remark)
    assert known.ask("shop", 310, send_fields("Shop"), b"x", client).code == 0


def wrong_codes(client: RemotingClient) -> list[int]:
    """Send requests with wrong signatures until the node ends the connection."""
    codes: list[int] = []
    with contextlib.suppress(AssertionError, ConnectionError):
        while len(codes) < 10_000:
            codes.append(client.ask(310, signed("shop", "x" * 32)).code)
    return codes


def test_wrong_signatures_end_their_connection(known: Identified) -> None:
    good = known.client()
    assert known.ask("shop", 310, send_fields("Shop"), b"x", good).code == 0
    codes = wrong_codes(known.client())
    assert codes.count(Answer.NO_PERMISSION) <= WRONG_MAX
    assert set(codes) <= {Answer.NO_PERMISSION, Answer.SYSTEM_BUSY}
    # Who is known already is served all the same; who is new, a second later.
    assert known.ask("shop", 310, send_fields("Shop"), b"x", good).code == 0
    wait_for(lambda: known.ask("shop", 310, send_fields("Shop"), b"x").code == 0)
    assert wrong_codes(good) == [Answer.NO_PERMISSION] * WRONG_MAX


def test_a_host_of_wrong_signatures_is_not_checked_for_a_second() -> None:
    clock = VirtualClock()
    wrong = Wrong(clock)
    for _ in range(WRONG_PER_S):
        assert not wrong.is_over("10.0.0.1")
        wrong.note("10.0.0.1")
    assert wrong.is_over("10.0.0.1") and not wrong.is_over("10.0.0.2")
    clock.now_ms += 999.0
    assert wrong.is_over("10.0.0.1")
    clock.now_ms += 1.0
    assert not wrong.is_over("10.0.0.1")


def test_no_strangers_lock_others_out_by_their_number() -> None:
    """One machine has a whole network of 64 bits, which is one source."""
    wrong = Wrong(VirtualClock())
    for number in range(2 * SOURCES_MAX):
        wrong.note(f"2001:db8::{number + 1:x}")
    assert len(wrong._of) == 1 and wrong.is_over("2001:db8::ffff")
    assert not wrong.is_over("2001:db8:0:1::1") and not wrong.is_over("10.0.0.1")
    for number in range(2 * SOURCES_MAX):
        wrong.note(f"2001:db8:0:{number:x}::1")
    assert len(wrong._of) == SOURCES_MAX
    assert not wrong.is_over("10.0.0.1"), "who has proved nothing wrong is checked"
    for _ in range(WRONG_PER_S):
        wrong.note("10.0.0.1")
    assert wrong.is_over("10.0.0.1")


def test_tls_is_independent_of_signatures(tmp_path: pathlib.Path) -> None:
    """Under TLS a request is signed as without; the first one may be large there, too."""
    pki = Pki(tmp_path / "pki")
    files = pki.node(NodeName("test", "g0", 1))
    known = Identified(tmp_path)
    security = replace(
        known.node.config.security,
        ca=files.ca, certificate=files.certificate, key=files.key, api=model.Wire.TLS,
    )  # fmt: skip
    known.node = Node(replace(known.node.config, security=security), lambda: None)
    trusts = ssl.create_default_context(cafile=pki.ca)
    with running(known.node):
        for secret, code in ((known.secrets["shop"], 0), ("x" * 32, Answer.NO_PERMISSION)):
            client = RemotingClient(known.node.api.endpoint, trusts)
            body = bytes(60_000)
            fields = signed("shop", secret, send_fields("Shop"), body)
            assert client.ask(310, fields, body).code == code
            client.close()


# -- changes of the file


def test_a_new_secret_counts_at_once_and_a_revoked_one_no_more(known: Identified) -> None:
    client, old = known.client(), known.secrets["shop"]
    assert known.ask("shop", 310, send_fields("Shop"), b"x", client).code == 0
    known.secrets["shop"] = new = secrets.token_hex(32)
    known.edit(lambda editor: editor.rotate_secret("shop", new, None, 0))
    assert known.ask("shop", 310, send_fields("Shop"), b"x", client).code == 0, "on the same one"
    assert known.client().ask(310, signed("shop", old, send_fields("Shop"), b"x"), b"x").code == 0
    known.edit(lambda editor: editor.revoke_old("shop"))
    late = known.client().ask(310, signed("shop", old, send_fields("Shop"), b"x"), b"x")
    assert late.code == Answer.NO_PERMISSION
    assert known.ask("shop", 310, send_fields("Shop"), b"x", client).code == 0
    known.edit(lambda editor: editor.revoke("shop"))
    assert client.ended(), "a pull of it might still wait"
    assert wait_for(lambda: known.audit("connection"))[0]["identity"] == "shop"


def test_the_identity_needs_a_secret_of_its_own(known: Identified) -> None:
    """A key proves nothing here: the node has only its verifier."""
    known.edit(lambda editor: editor.add(Identity("app", ("*",)), "0" * 64, 0))
    fields = signed("app", "0" * 64, send_fields("Shop"), b"x")
    assert known.client().ask(310, fields, b"x").code == Answer.NO_PERMISSION


# -- rights


def refused(known: Identified, name: str, code: int, fields: Any = None, body: bytes = b"") -> str:
    answer = known.ask(name, code, fields, body)
    assert answer.code == Answer.NO_PERMISSION, (answer.code, answer.remark)
    return str(answer.remark)


def test_each_right_is_asked_for(known: Identified) -> None:
    assert known.ask("shop", 310, send_fields("Shop"), b"x").code == 0
    known.settled()
    for code, fields in ((310, send_fields("Pay")), (320, send_fields("Pay")),
                         (10, {"topic": "Pay"}), (310, send_fields("%RETRY%reader"))):  # fmt: skip
        assert "no right to produce" in refused(known, "shop", code, fields, b"x")
    assert "no right to produce" in refused(known, "reader", 310, send_fields("Shop"), b"x")
    assert "no right to consume 'Pay'" in refused(known, "shop", 11, pull_fields("Pay", "shop1"))
    assert "group 'reader'" in refused(known, "shop", 11, pull_fields("Shop", "reader"))
    assert "group 'g'" in refused(known, "maker", 34, {}, heartbeat("g"))
    assert "group 'reader'" in refused(known, "shop", 34, {}, heartbeat("shop1", "reader"))
    assert known.ask("shop", 34, {}, heartbeat("shop1", "shop2")).code == 0
    place = {"consumerGroup": "shop1", "topic": "Shop", "queueId": "0", "commitOffset": "1"}
    assert known.ask("shop", 15, place).code == 0
    assert "no right to consume" in refused(known, "shop", 15, {**place, "topic": "Pay"})
    assert "group 'shop1'" in refused(known, "reader", 14, place)
    assert known.ask("ops", 14, place).fields["offset"] == "1", "an administrator's"
    body = json.dumps({"consumerGroup": "shop1", "clientId": "c", "mqSet": []}).encode()
    assert "group 'shop1'" in refused(known, "reader", 41, {}, body)
    assert "no admin" in refused(known, "shop", 17, {"topic": "Shop"})
    assert "no right to produce" in refused(known, "ops", 310, send_fields("Shop"), b"x")
    wait_for(lambda: len(known.audit("SEND_MESSAGE_V2")) >= 3)


def test_a_group_reads_its_own_retries_and_no_others(known: Identified) -> None:
    own, other = pull_fields("%RETRY%shop1", "shop1"), pull_fields("%RETRY%reader", "shop1")
    assert known.ask("shop", 310, send_fields("%RETRY%shop1"), b"x").code == 0
    assert known.ask("shop", 11, own).code in (0, Answer.PULL_NOT_FOUND)
    assert "no right to consume" in refused(known, "shop", 11, other)
    assert "no right to consume" in refused(known, "shop", 11, pull_fields("%DLQ%shop1", "shop1"))


def answer_of(wire: Wire, request: api.Request) -> api.Reply:
    """Send a request and return its answer, which a Notice to the member may precede."""
    answer = ask(wire, request)
    while isinstance(answer, api.Notice):
        answer = api.decode_reply(wire.frame().body)
    return answer


class Reading:
    """A consumer of Java's in the group reader, which reads the topic Shop."""

    def __init__(self, known: Identified) -> None:
        self._known = known
        self._java = known.client()
        sent = send_fields("Shop", "TAGS\x01a\x02WAIT\x01false\x02")
        assert known.ask("shop", 310, sent, b"x").code == 0
        known.settled()
        beat = subscribing("java", "reader", {"Shop": "*", "%RETRY%reader": "*"}, 7)
        assert known.ask("reader", Code.HEART_BEAT, {}, beat, self._java).code == 0

    def reads(self) -> bool:
        fields = pull_fields("Shop", "reader") | {"subVersion": "7"}
        answer = self._known.ask("reader", Code.PULL_MESSAGE, fields, b"", self._java)
        return answer.code == 0 and bool(answer.body)

    def shown(self, code: int, field: str) -> Any:
        answer = self._known.ask("reader", code, {"consumerGroup": "reader"})
        return json.loads(answer.body)[field]

    @property
    def members(self) -> Any:
        return self.shown(Code.GET_CONSUMER_LIST_BY_GROUP, "consumerIdList")

    @property
    def topics(self) -> set[str]:
        return set(self.shown(Code.GET_CONSUMER_CONNECTION_LIST, "subscriptionTable"))


@pytest.mark.parametrize("consume", [(), ("Other",)])
def test_who_may_read_nothing_of_a_group_is_no_member_of_it(
    known: Identified, consume: tuple[str, ...]
) -> None:
    """Or the group would skip what this member does not want, and leave its queues unread."""
    group = Reading(known)
    assert group.reads()
    unwanted = [api.Subscription("Shop", "nothing", "TAG", 2**62)]
    with known.own(Identity("watch", (), consume)) as wire:
        answer = answer_of(wire, api.Join(3, "reader", "zz", 1, unwanted))
        if consume:
            assert isinstance(answer, api.Joined) and answer.forbidden == ["Shop"]
            assert (answer.members, answer.topics) == (["java"], {})
            own = [*unwanted, api.Subscription("Other")]
            joined = answer_of(wire, api.Join(4, "reader", "zz", 1, own))
            assert isinstance(joined, api.Joined) and joined.members == ["java", "zz"]
            assert group.reads() and group.topics == {"Shop", "%RETRY%reader", "Other"}
            answer_of(wire, api.Join(5, "reader", "zz", 1, unwanted))
        else:
            assert isinstance(answer, api.Failed) and answer.status == "FORBIDDEN"
            assert "may consume no topic" in answer.reason
            nothing = answer_of(wire, api.Join(4, "reader", "zz", 1, []))
            assert isinstance(nothing, api.Failed) and nothing.status == "FORBIDDEN"
            wait_for(lambda: len(known.audit("Join")) == 2)
        assert group.reads() and group.members == ["java"]


def test_who_waits_for_a_topic_that_it_may_read_is_a_member(known: Identified) -> None:
    """A pattern stands for no topic yet, a topic does not exist yet, and some are not its own."""
    group = Reading(known)
    with known.own(Identity("early", (), ("Shop*",))) as wire:
        asked: list[tuple[list[str], list[str], list[str]]] = [
            ([], [], []),
            (["ShopNew"], ["ShopNew"], []),
            (["Pay", "ShopNew"], ["ShopNew"], ["Pay"]),
        ]
        for topics, missing, forbidden in asked:
            wanted = [api.Subscription(one) for one in topics]
            joined = answer_of(wire, api.Join(3, "reader", "own", 1, wanted))
            assert isinstance(joined, api.Joined) and joined.members == ["java", "own"]
            assert (joined.missing, joined.forbidden) == (missing, forbidden)
        assert group.topics == {"Shop", "%RETRY%reader", "ShopNew"} and group.reads()


def test_a_heartbeat_says_nothing_of_topics_that_its_identity_may_not_read(
    known: Identified,
) -> None:
    group = Reading(known)
    name = known.add("limited", "groups: ['reader']")
    unwanted = subscribing("zz", "reader", {"Shop": "nothing", "%RETRY%reader": "*"}, 9)
    assert known.ask(name, Code.HEART_BEAT, {}, unwanted).code == 0, "a member by its `groups`"
    assert group.reads() and group.topics == {"Shop", "%RETRY%reader"}


def test_where_a_group_is_tells_nothing_of_topics_that_may_not_be_read(known: Identified) -> None:
    for topic in ("Shop", "ShopPayments"):
        assert known.ask("shop", 310, send_fields(topic), b"x").code == 0
        place = {"consumerGroup": "reader", "topic": topic, "queueId": "0", "commitOffset": "1"}
        assert known.ask("ops", Code.UPDATE_CONSUMER_OFFSET, place).code == 0
    known.settled()
    group = {"consumerGroup": "reader"}

    def told(name: str) -> set[str]:
        body = known.ask(name, Code.GET_CONSUME_STATS, group).body.decode()
        return set(re.findall('"topic":"(\\w+)"', body.replace(" ", "")))

    wait_for(lambda: told("ops") == {"Shop", "ShopPayments"})
    assert told("reader") == {"Shop"}
    for named in ({"topic": "ShopPayments"}, {"topicList": "Shop;ShopPayments"},
                  {"topic": "Shop", "topicList": "ShopPayments"}):  # fmt: skip
        asked = group | named
        assert "consume 'ShopPayments'" in refused(known, "reader", Code.GET_CONSUME_STATS, asked)
        assert b"ShopPayments" in known.ask("ops", Code.GET_CONSUME_STATS, asked).body
    for topic in ("Shop", "%RETRY%reader"):
        asked = group | {"topic": topic}
        assert known.ask("reader", Code.GET_CONSUME_STATS, asked).code == 0


def test_no_group_copies_a_message_of_a_topic_that_it_may_not_read(known: Identified) -> None:
    """A message that is sent back goes to the group's retries, whatever its topic is."""
    known.edit(lambda editor: editor.add(Identity("pay", ("Pay",)), None, 0, secret="p" * 32))
    known.secrets["pay"] = "p" * 32
    assert known.ask("pay", 310, send_fields("Pay"), b"secret").code == 0
    back = {"offset": "0", "group": "shop1", "delayLevel": "0"}
    for more in ({}, {"originTopic": "Pay"}, {"originTopic": "Shop"}):
        answer = known.ask("shop", 36, {**back, **more})
        assert answer.code in (Answer.NO_PERMISSION, Answer.SYSTEM_ERROR), answer
    end = known.node.backend.store.max_offset
    assert known.ask("shop", 310, send_fields("Shop"), b"own").code == 0
    assert known.node.backend.store.reader.record_at(end).topic == "Shop"
    assert known.ask("shop", 36, {**back, "offset": str(end)}).code == 0


def test_what_a_handler_forbids_is_counted_and_audited(known: Identified) -> None:
    def place(answer: Frame) -> int:
        return int(answer.fields["msgId"][-16:], 16)

    sent = known.ask("shop", 310, send_fields("ShopPay"), b"x")
    more = "TRAN_MSG\x01true\x02PGROUP\x01g\x02UNIQ_KEY\x01u\x02WAIT\x01false\x02"
    half = known.ask("shop", 310, send_fields("ShopPay", more), b"half")
    known.settled()
    back = {"group": "reader", "offset": str(place(sent)), "delayLevel": "0"}
    assert "not yours" in refused(known, "reader", Code.CONSUMER_SEND_MSG_BACK, back)
    queue_offset = int(half.fields["queueOffset"])
    end = {
        "commitOrRollback": "12", "producerGroup": "g", "msgId": "u", "transactionId": "u",
        "commitLogOffset": str(place(half)), "tranStateTableOffset": str(queue_offset),
    }  # fmt: skip
    assert "not yours" in refused(known, "reader", Code.END_TRANSACTION, end)
    with known.own(Identity("other", ("Other",))) as wire:
        done = ask(wire, api.EndTransaction(3, False, place(half), queue_offset, "g", "u"))
        assert isinstance(done, api.PutDone) and done.status is api.Status.FORBIDDEN
    limited = known.add("limited", "produce: ['Lot*']\n    quota: {topics: 1}")
    assert known.ask(limited, 310, send_fields("Lot1"), b"x").code == 0
    assert "quota.topics" in refused(known, limited, 310, send_fields("Lot2"), b"x")
    noted = {"CONSUMER_SEND_MSG_BACK": "reader", "END_TRANSACTION": "reader",
             "EndTransaction": "other", "SEND_MESSAGE_V2": limited}  # fmt: skip
    for action, name in noted.items():
        (line,) = wait_for(lambda action=action: known.audit(action))
        assert (line["outcome"], line["identity"]) == ("forbidden", name)
        assert line["address"].startswith("127.0.0.1:") and line["reason"]
    assert known.node.backend.status()["acl"]["forbidden"] == 3, "of RocketMQ's clients"


def test_what_an_administrator_changes_is_noted(known: Identified) -> None:
    topic = {"topic": "Victim", "readQueueNums": "2", "writeQueueNums": "2", "perm": "6"}
    assert known.ask("ops", Code.UPDATE_AND_CREATE_TOPIC, topic).code == Answer.SUCCESS
    assert known.ask("ops", Code.DELETE_TOPIC_IN_BROKER, {"topic": "Victim"}).code == 0
    group = json.dumps({"groupName": "team"}).encode()
    code = Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
    assert known.ask("ops", code, None, group).code == Answer.SUCCESS
    assert known.ask("ops", code, None, b"no JSON").code != Answer.SUCCESS
    gone = known.ask("ops", Code.DELETE_SUBSCRIPTIONGROUP, {"groupName": "team"})
    assert gone.code == Answer.SUCCESS
    for action, outcomes in (
        ("topic set", ["done"]), ("topic delete", ["done"]), ("group set", ["done", "refused"]),
        ("group delete", ["done"]),
    ):  # fmt: skip
        last = len(outcomes) - 1
        wait_for(lambda a=action, n=last: known.audit(a)[n:])
        found = known.audit(action)
        assert [one["outcome"] for one in found] == outcomes, found
        assert {one["identity"] for one in found} == {"ops"}
        assert all(one["address"].startswith("127.0.0.1:") for one in found)
    assert "topic Victim" in known.audit("topic delete")[0]["reason"]
    assert '"groupName": "team"' in known.audit("group set")[0]["reason"]


def test_only_who_may_send_to_its_topic_ends_a_transaction_or_is_asked(
    tmp_path: pathlib.Path,
) -> None:
    made = Identified(tmp_path, transaction_timeout_ms=100, transaction_check_interval_ms=100)
    with running(made.node):
        half = send_fields("Shop")
        half["i"] = half.get("i", "") + "UNIQ_KEY\x01u\x02TRAN_MSG\x01true\x02PGROUP\x01g\x02"
        beat = json.dumps({"clientID": "c", "producerDataSet": [{"groupName": "g"}]}).encode()
        stranger, owner = made.client(), made.client()
        assert made.ask("reader", 34, {}, beat, stranger).code == 0
        sent = made.ask("maker", 310, half, b"x", owner)
        assert sent.code == 0, sent
        end = {
            "producerGroup": "g", "tranStateTableOffset": sent.fields["queueOffset"],
            "commitLogOffset": str(int(sent.fields["msgId"][-16:], 16)), "commitOrRollback": "8",
            "msgId": "u", "transactionId": "u",
        }  # fmt: skip
        halves = made.node.backend.store.transactions.halves
        wait_for(lambda: any(one.checks > 2 for one in halves()))
        assert not stranger.pushed, "it has no right to see the message"
        answer = made.ask("reader", 37, end, client=stranger)
        assert answer.code == Answer.NO_PERMISSION and "not yours" in (answer.remark or "")
        assert not [one for one in stranger.pushed if one.code == 39]
        assert made.ask("maker", 34, {}, beat, owner).code == 0
        while not any(one.code == 39 for one in owner.pushed):
            owner.pushed.append(owner.next())
        assert made.ask("maker", 37, end, client=owner).code == 0
        wait_for(lambda: not halves())
        made.close()


def test_a_topic_that_may_not_be_seen_has_the_route_of_new_ones(known: Identified) -> None:
    known.edit(lambda editor: editor.add(Identity("pay", ("Pay",)), None, 0, secret="p" * 32))
    known.secrets["pay"] = "p" * 32
    made = {**send_fields("Pay"), "d": "1"}
    assert known.ask("pay", 310, made, b"x").code == 0
    wait_for(lambda: known.node.backend.store.topic_table.find("Pay"))
    routes = {topic: known.ask("shop", 105, {"topic": topic}).body for topic in ("Pay", "Nothing")}
    assert routes["Pay"] == routes["Nothing"] and b'"writeQueueNums":4' in routes["Pay"].replace(
        b" ", b""
    )
    assert known.ask("pay", 105, {"topic": "Pay"}).body != routes["Pay"]


def test_without_new_topics_a_route_is_refused(tmp_path: pathlib.Path) -> None:
    known = Identified(tmp_path, auto_create_topics=False)
    with running(known.node):
        for topic in ("Pay", "Nothing"):
            assert "no right" in refused(known, "shop", 105, {"topic": topic})
        known.close()


def test_a_message_of_another_identity_s_producer_may_be_sent_again(known: Identified) -> None:
    """As a consumer does with a dead letter; no record has the other one's HS_PID by that."""
    from hastore.protocol.api import own_prefix

    def props(name: str) -> str:
        return f"HS_PID\x01{own_prefix(name)}-1\x02HS_SEQ\x011\x02"

    numbers = [props("maker"), props("maker"), props("shop") + props("maker")]
    sent = [known.ask("shop", 310, send_fields("Shop", one), b"x") for one in numbers]
    assert [one.code for one in sent] == [0, 0, 0]
    assert len({one.fields["msgId"] for one in sent}) == 3, "none is taken for a repeat"


def test_a_consumer_is_not_told_the_signature_of_who_asks(known: Identified) -> None:
    member = known.client()
    assert known.ask("shop", 34, {}, heartbeat("shop1"), member).code == 0
    asked = known.client()
    fields = {"consumerGroup": "shop1", "clientId": "c", "jstackEnable": "0"}
    asked.send(Code.GET_CONSUMER_RUNNING_INFO, signed("ops", known.secrets["ops"], fields))
    while (question := member.next()).code != Code.GET_CONSUMER_RUNNING_INFO:
        pass
    assert question.fields == fields


def test_a_code_that_nobody_handles_is_answered_3_to_who_is_known(known: Identified) -> None:
    assert known.ask("shop", 999).code == Answer.REQUEST_CODE_NOT_SUPPORTED
    assert known.client().ask(999).code == Answer.NO_PERMISSION


def test_without_identities_the_fields_are_ignored(tmp_path: pathlib.Path) -> None:
    """The C++ client always sends them."""
    with running(Node(config_of(tmp_path / "s"), lambda: None)) as node:
        client = RemotingClient(node.api.endpoint)
        fields = {**send_fields("Shop"), "AccessKey": "x", "Signature": "y"}
        assert client.ask(310, fields, b"x").code == 0
        client.close()


# -- how much


@pytest.fixture
def limited(known: Identified) -> Callable[[Quota], str]:
    """Return a function that adds an identity with a quota and returns its name."""

    def add(quota: Quota) -> str:
        rights = "produce: ['Shop*']\n    consume: ['Shop*']\n    groups: ['shop*']"
        limits = ", ".join(
            f"{name}: {value}"
            for name in ("requests_per_s", "bytes_per_s", "topics", "positions")
            if (value := getattr(quota, name)) is not None
        ).replace("bytes_per_s: 1000", "bytes_per_s: 1000B")
        return known.add("limited", f"{rights}\n    quota: {{{limits}}}")

    return add


def test_requests_beyond_the_quota_wait_and_then_are_refused(
    known: Identified, limited: Callable[[Quota], str]
) -> None:
    name, client = limited(Quota(requests_per_s=4)), known.client()
    fields = signed(name, known.secrets[name], send_fields("Shop"), b"x")
    begun = time.monotonic()
    asked = [client.send(310, fields, b"x") for _ in range(30)]
    found = {(answer := client.next()).opaque: answer for _ in asked}
    took_s = time.monotonic() - begun
    codes = sorted(answer.code for answer in found.values())
    stored = codes.count(0)
    assert set(codes) == {0, Answer.SYSTEM_BUSY} and 9 <= stored <= 10 + 4 * took_s
    assert any("requests_per_s 4" in str(answer.remark) for answer in found.values())
    taken = [found[opaque] for opaque in asked if found[opaque].code == 0]
    places = [int(answer.fields["queueOffset"]) for answer in taken]
    assert places == sorted(places), "what waits keeps its order"
    counts = known.node.backend.status()["quotas"]["identities"]["limited"]
    assert counts["slowed"] >= 4 and counts["refused"] == 30 - stored
    metrics = render_metrics(known.node.backend.status()).decode()
    assert re.search('hastore_quota_refused_total{.*node="1",identity="limited"}', metrics)
    assert known.ask("shop", 310, send_fields("Shop"), b"x").code == 0, "others are not concerned"


def test_bytes_of_answers_count(known: Identified, limited: Callable[[Quota], str]) -> None:
    name, client = limited(Quota(bytes_per_s=1000)), known.client()
    assert known.ask("shop", 310, send_fields("Shop"), bytes(20_000)).code == 0
    known.settled()
    pull = pull_fields("Shop", "shop1")
    assert len(known.ask(name, 11, pull, b"", client).body) > 20_000
    refused_ = known.ask(name, 11, pull, b"", client)
    assert refused_.code == Answer.SYSTEM_BUSY and "bytes_per_s 1,000" in str(refused_.remark)


def test_a_member_over_its_quota_stays_in_its_group(known: Identified) -> None:
    """A refused Join or Lock would cost it its queues, and the others would read them again."""
    slow = Identity("slow", ("Shop*",), ("Shop*",), groups=("shop*",))
    with known.own(slow, requests_per_s="2") as wire:

        def is_busy(request: api.Request) -> bool:
            answer = answer_of(wire, request)
            assert not isinstance(answer, api.Failed) or "requests_per_s 2" in answer.reason
            return isinstance(answer, api.Failed) and answer.status == "BUSY"

        while not is_busy(api.Fetch(3, "shop1", "Shop")):
            pass
        joined = answer_of(wire, api.Join(4, "shop1", "m", 1, [api.Subscription("Shop")]))
        assert isinstance(joined, api.Joined) and joined.members == ["m"]
        queues = {"Shop": [0]}
        assert not is_busy(api.Lock(5, "shop1", "m", queues))
        assert not is_busy(api.Unlock(6, "shop1", "m", queues))
        assert not is_busy(api.AskTopics(7, "Shop"))
        assert not is_busy(api.Leave(8, "shop1", "m"))
        while not is_busy(api.AskTopics(9)):
            pass


def test_bytes_of_properties_count(known: Identified, limited: Callable[[Quota], str]) -> None:
    name, client = limited(Quota(bytes_per_s=1000)), known.client()
    sent = send_fields("Shop", "WAIT\x01false\x02P\x01" + "x" * 20_000 + "\x02")
    assert known.ask(name, 310, sent, b"x", client).code == 0
    assert known.ask(name, 310, sent, b"x", client).code == Answer.SYSTEM_BUSY
    counts = known.node.backend.status()["quotas"]["identities"]["limited"]
    assert counts["bytes"] > 20_000


def test_retries_count_as_topics_if_produce_stands_for_them(known: Identified) -> None:
    """A consumer's may be made all the same: those that it may only send to for its group."""
    counted = known.add("counted", "produce: ['*']\n    groups: ['*']\n    quota: {topics: 1}")
    assert known.ask(counted, 310, send_fields("%RETRY%g1"), b"x").code == 0
    assert "quota.topics" in refused(known, counted, 310, send_fields("%RETRY%g2"), b"x")
    reads = "produce: ['Shop']\n    groups: ['*']\n    quota: {topics: 1}"
    consumer = known.add("consumer", reads)
    for topic in ("Shop", "%RETRY%g3", "%RETRY%g4"):
        assert known.ask(consumer, 310, send_fields(topic), b"x").code == 0


def test_a_message_sent_back_makes_no_topic_beyond_the_quota(known: Identified) -> None:
    """As one that is put there: each group made another topic."""
    back = known.add(
        "back", "produce: ['*']\n    consume: ['*']\n    groups: ['*']\n    quota: {topics: 2}"
    )
    place = known.node.backend.store.max_offset
    assert known.ask(back, 310, send_fields("Shop"), b"x").code == 0
    known.settled()
    asked = {"offset": str(place), "delayLevel": "0"}
    assert known.ask(back, 36, {**asked, "group": "g1"}).code == 0
    for more in ({"group": "g2"}, {"group": "g2", "delayLevel": "-1"}):
        assert "quota.topics" in refused(known, back, 36, {**asked, **more})
    assert known.ask(back, 36, {**asked, "group": "g1"}).code == 0, "it is there"
    with known.own(Identity("own", ("*",), ("*",)), topics="2") as wire:
        for level in (0, -1):
            sent = api.SendBack(3, "g3", "Shop", 0, 0, place, level=level)
            answer = answer_of(wire, sent)
            assert isinstance(answer, api.Failed) and "quota.topics" in answer.reason, answer
    names = {one.name for one in known.node.backend.store.topic_table.all()}
    assert not any(name.endswith(("g2", "g3")) for name in names), names


def test_who_reads_which_queue_is_not_told_of_topics_that_may_not_be_seen(
    known: Identified,
) -> None:
    assert known.ask("shop", 310, send_fields("Shop"), b"x").code == 0
    known.settled()
    team = Identity("team", ("Shop",), ("Shop",))
    others = (Identity("other", (), ("Pay",)), Identity("maker2", ("Shop",), ("Pay",)),
              Identity("boss", is_admin=True))  # fmt: skip
    with known.own(team) as wire:
        answer_of(wire, api.Join(3, "g", "m", 1, [api.Subscription("Shop")]))
        locked = answer_of(wire, api.Lock(4, "g", "m", {"Shop": [0]}))
        assert isinstance(locked, api.Locked) and locked.queues == {"Shop": [0]}
        told = {}
        for one in others:
            with known.own(one) as asking:
                answer = answer_of(asking, api.AskMembers(5, "g"))
                assert isinstance(answer, api.MembersListed), answer
                assert [member.id for member in answer.members] == ["m"]
                told[one.name] = answer.owners
    owned = {"Shop": {0: "m"}}
    assert told == {"other": {}, "maker2": owned, "boss": owned}


def test_topics_and_positions_beyond_the_quota_are_not_made(
    known: Identified, limited: Callable[[Quota], str]
) -> None:
    name = limited(Quota(topics=1, positions=1))
    table = known.node.backend.store.topic_table
    assert known.ask(name, 310, send_fields("Shop1"), b"x").code == 0
    wait_for(lambda: table.find("Shop1"))
    assert "quota.topics" in refused(known, name, 310, send_fields("Shop2"), b"x")
    assert known.ask(name, 310, send_fields("Shop1"), b"x").code == 0
    place = {"consumerGroup": "shop1", "topic": "Shop1", "queueId": "0", "commitOffset": "1"}
    assert known.ask(name, 15, place).code == 0
    assert "quota.positions" in refused(known, name, 15, {**place, "consumerGroup": "shop2"})
    assert known.ask(name, 15, {**place, "commitOffset": "0"}).code == 0
    committing = {**pull_fields("Shop1", "shop3"), "sysFlag": "1", "commitOffset": "1"}
    for flags in ("1", "+1", "0" * 20 + "1"):
        answer = known.ask(name, 11, committing | {"sysFlag": flags})
        assert answer.code == 0, "it reads, and keeps nothing"
    for flags in ("1" * 5_000, "-1", "one", ""):
        assert known.ask(name, 11, committing | {"sysFlag": flags}).code == Answer.SYSTEM_ERROR
    asked = {**place, "consumerGroup": "shop3", "setZeroIfNotFound": "false"}
    time.sleep(0.6)  # of a commit that waits for others
    assert known.ask(name, 14, asked).code == Answer.QUERY_NOT_FOUND
    assert known.node.backend.status()["quotas"]["kept_out"] >= 3


# -- the table


def test_each_code_that_is_handled_needs_something(tmp_path: pathlib.Path) -> None:
    assert WholeDesk(tmp_path).door.codes == NEEDS.keys()


def test_the_page_has_what_each_code_needs() -> None:
    text = PAGE.read_text().split("\n### Rights\n", 1)[1].split("\n## ", 1)[0].split("\n### ", 1)[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == ["codes", "need"]
    found = {int(code): need for codes, need in rows[1:] for code in codes.split(", ")}
    assert found == {int(code): need.text for code, need in NEEDS.items()}
