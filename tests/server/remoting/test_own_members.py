"""hastore's own members of groups, beside RocketMQ's: one list, the same locks, checked commits."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hastore import Admin, Consumer, Producer
from hastore.client.consumer.shared_consumer import SharedConsumer
from hastore.dead_letters import read_dead_letters, resend_dead_letters
from hastore.errors import ClientError, ForbiddenError, ProtocolError
from hastore.ha.master.group_transfer import Outcome
from hastore.protocol import api
from hastore.protocol.remoting import Answer, Code
from hastore.security.identity import Identity
from hastore.server.remoting.group_positions import GroupPositions
from hastore.server.remoting.group_requests import GAP_MS, GroupRequests
from hastore.server.remoting.lock_requests import LockRequests
from hastore.server.remoting.own_members import SESSION_MS, OwnMembers
from hastore.server.remoting.position_requests import PositionRequests
from hastore.server.remoting.queue_locks import LOCK_MS
from hastore.server.remoting.retries import Retries
from hastore.server.remoting.routes import TopicView
from hastore.server.remoting.subscriptions import Subscriptions
from tests.api_fakes import FakeBackend
from tests.client.consumer.shared_node import fill
from tests.process.api_attacks import any_request
from tests.server.api.kit import record
from tests.server.api.secured import Secured
from tests.server.remoting.desk import Desk, VirtualClient
from tests.server.remoting.test_groups import java
from tests.server.remoting.test_queue_locks import body, granted

NOTIFIED = Code.NOTIFY_CONSUMER_IDS_CHANGED


class Own:
    """A member's connection to a node."""

    remoting = False

    def __init__(self, node: Node, name: str) -> None:
        self._node = node
        self.name = name
        self.ended = False
        self.joined = False
        self.proof: Any = None
        self.meter = None
        self.peer, self.address = "127.0.0.1:7", ("127.0.0.1", 7)
        self.replies: list[Any] = []
        self._rids = itertools.count(1)

    def send(self, make: Callable[[int], Any]) -> int:
        """Send a request; return its number."""
        rid = next(self._rids)
        self._node.take(self, api.decode_request(api.encode(make(rid))))
        return rid

    def ask(self, make: Callable[[int], Any]) -> Any:
        """Send a request; return its answer, which must come without time passing."""
        rid = self.send(make)
        self._node.desk.run()
        return self.answer(rid)

    def answer(self, rid: int) -> Any:
        """Return, once, the answer to a request."""
        (found,) = [one for one in self.replies
                    if one.rid == rid and not isinstance(one, api.Notice)]  # fmt: skip
        self.replies.remove(found)
        return found

    def notices(self) -> list[api.Notice]:
        """Return, once, what the node has told."""
        found = [one for one in self.replies if isinstance(one, api.Notice)]
        self.replies = [one for one in self.replies if not isinstance(one, api.Notice)]
        return found

    def join(self, *topics: str, group: str = "G", token: int = 1) -> Any:
        wanted = [api.Subscription(topic) for topic in topics or ("T",)]
        return self.ask(lambda rid: api.Join(rid, group, self.name, token, wanted))

    def lock(self, *queues: int, places: bool = False) -> Any:
        return self.ask(lambda rid: api.Lock(rid, "G", self.name, {"T": list(queues)}, places))

    def unlock(self, *queues: int) -> Any:
        return self.ask(lambda rid: api.Unlock(rid, "G", self.name, {"T": list(queues)}))

    def commit(self, **places: int) -> Any:
        """Commit: q3=7 is offset 7 in queue 3."""
        return self.ask(self.commit_of(**places))

    def commit_of(self, **places: int) -> Callable[[int], api.Commit]:
        """Return what makes the request for a commit."""
        positions = {int(queue[1:]): api.Position(at) for queue, at in places.items()}
        back = list(positions)
        return lambda rid: api.Commit(rid, "G", "T", positions, 3_000, back, self.name)


class _Replies:
    def __init__(self, remoting: Any) -> None:
        self.send_frame = remoting.send_frame

    def send(self, connection: Own, reply: Any, *, is_answer: bool = True) -> None:
        assert is_answer != isinstance(reply, api.Notice)
        connection.replies.append(api.decode_reply(api.encode(reply)))


class Node:
    """A node's door with all that shares, in virtual time."""

    def __init__(self, backend: FakeBackend | None = None, now_ms: float = 1_000_000.0) -> None:
        self.backend = backend or FakeBackend()
        self.desk = Desk(self.backend)
        self.desk.clock.now_ms = now_ms
        replies: Any = _Replies(self.desk.replies)
        self.desk.replies = replies
        self.desk.door = door = type(self.desk.door)(self.desk._parts(), None)
        self.groups = GroupRequests(door)
        self.positions = GroupPositions(door)
        self.locks = LockRequests(door, self.positions)
        topics = TopicView(self.backend, auto_create=True)
        self.asked = PositionRequests(door, self.positions, self.groups.members, topics, "g0")
        for handlers in (self.groups, self.positions, self.locks, self.asked):
            door.join(handlers.handlers())
        self.members = OwnMembers(
            door, self.groups, self.locks, self.positions, topics,
            Retries(door, topics, Subscriptions(door, topics)),
        )  # fmt: skip

    def own(self, name: str) -> Own:
        return Own(self, name)

    def java(self, name: str) -> VirtualClient:
        client = self.desk.client()
        assert client.ask(Code.HEART_BEAT, {}, java(name)).code == 0
        return client

    def take(self, connection: Any, request: Any) -> None:
        def commit(taken: api.Commit) -> None:
            def answer(done: api.PutDone) -> None:
                fields = [getattr(done, name) for name in api.PutDone.__struct_fields__[1:]]
                connection.replies.append(api.PutDone(taken.rid, *fields))

            def fail(status: str, reason: str) -> None:
                connection.replies.append(api.Failed(taken.rid, status, reason))

            if not self.desk.has_read() or not self.desk.commits.begin(
                taken, self.desk.clock.now_ms, answer, fail
            ):
                self.desk.door.at(self.desk.clock.now_ms + 1.0, lambda: commit(taken))

        now = self.desk.clock.now_ms
        self.desk.door.receive_member(connection, request, now, commit)

    def close(self, own: Own) -> None:
        own.ended = True
        connection: Any = own
        self.desk.door.forget_ended([connection])
        self.desk.run()


@pytest.fixture
def node() -> Node:
    return Node()


def test_one_list_has_the_members_of_both_kinds_and_all_are_told(node: Node) -> None:
    other = node.java("c-java")
    other.told(NOTIFIED)
    node.desk.run(GAP_MS)
    own = node.own("b-own")
    joined = own.join()
    assert joined.members == ["b-own", "c-java"]
    assert len(other.told(NOTIFIED)) == 1
    listed = other.ask(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "G"})
    assert json.loads(listed.body)["consumerIdList"] == ["b-own", "c-java"]
    own.notices()
    node.desk.run(GAP_MS)
    third = node.java("a-java")
    node.desk.run(GAP_MS)
    assert [(one.group, one.topic) for one in own.notices()] == [("G", None)]
    again = own.join()
    assert again.members == ["a-java", "b-own", "c-java"]
    assert again.generation != joined.generation
    assert own.join().generation == again.generation
    third.close()
    node.desk.run(GAP_MS)
    assert own.join().members == ["b-own", "c-java"]
    other.told(NOTIFIED)
    node.close(own)
    node.desk.run(GAP_MS)
    assert len(other.told(NOTIFIED)) == 1
    shown = other.ask(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    assert b"b-own" not in shown.body


def test_mqadmin_shows_a_member_which_answers_no_question(node: Node) -> None:
    client, own = node.desk.client(), node.own("own")
    own.join()
    shown = client.ask(Code.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": "G"})
    (connection,) = json.loads(shown.body)["connectionSet"]
    assert (connection["clientId"], connection["language"]) == ("own", "PYTHON")
    asked = {"consumerGroup": "G", "clientId": "own", "jstackEnable": "false"}
    answer = client.ask(Code.GET_CONSUMER_RUNNING_INFO, asked)
    assert answer.code == Answer.SYSTEM_ERROR and "hastore's own client" in str(answer.remark)
    status = client.ask(Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, {"topic": "T", "group": "G"})
    assert status.code == 0 and b"own" not in status.body


def test_the_locks_of_own_members_do_not_say_that_a_group_consumes_in_order(node: Node) -> None:
    """What Java's concurrent consumers in the group send to its retries is no dead letter yet."""
    own, java = node.own("own"), node.java("java")
    own.join()
    assert own.lock(0, 1).queues == {"T": [0, 1]}
    locks, now = node.locks.locks, node.desk.clock.now_ms
    assert not locks.is_in_order("G", now)
    assert java.ask(Code.LOCK_BATCH_MQ, {}, body("java", 2)).code == 0
    assert locks.is_in_order("G", now), "Java's orderly ones ask for locks"


def test_a_member_that_leaves_or_is_silent_is_none_any_more(node: Node) -> None:
    one, two = node.own("one"), node.own("two")
    one.join()
    assert two.join().members == ["one", "two"]
    assert isinstance(one.ask(lambda rid: api.Leave(rid, "G", "somebody")), api.Left)
    assert two.join().members == ["one", "two"]
    assert isinstance(one.ask(lambda rid: api.Leave(rid, "G", "one")), api.Left)
    assert two.join().members == ["two"]
    one.join()
    for _ in range(7):
        node.desk.run(SESSION_MS / 8)
        two.join()
    assert two.join().members == ["one", "two"], "not quite so long"
    node.desk.run(20_000)
    assert two.join().members == ["two"]
    assert one.join().members == ["one", "two"], "it is heard again"


def test_the_same_id_is_refused_while_its_member_is_connected(node: Node) -> None:
    one, two = node.own("same"), node.own("same")
    one.join(token=1)
    refused = two.join(token=2)
    assert (refused.status, refused.master) == ("MEMBER_EXISTS", None)
    assert refused.reason == (
        "the group 'G' has a member 'same' already, at 127.0.0.1:7; each needs an id of its own"
    )
    assert two.join(token=1).members == ["same"]
    assert isinstance(two.join(group="H", token=2), api.Joined)
    node.close(one)
    assert two.join(token=2).members == ["same"]


def test_the_topics_of_a_join(node: Node) -> None:
    for queue in (0, 1):
        node.backend.store.put_encoded([record("T", queue=queue)])
    own = node.own("own")
    joined = own.join("T", "new")
    assert (joined.topics, joined.missing) == ({"T": 4, "new": 4}, ["new"])
    node.backend.store.put_encoded([record("%RETRY%G", queue=0)])
    assert own.join("T").topics == {"T": 4, "%RETRY%G": 1}


def test_what_falls_to_a_member_that_reads_other_topics_is_another_s(node: Node) -> None:
    """RocketMQ's consumers count every member in the shares of every topic."""
    node.java("b-java")  # reads T
    one, two, three = node.own("a"), node.own("c"), node.own("d")
    assert one.join("T", "U").more == {"U": [2, 3]}
    two.join("T", "U")
    three.join("U")
    assert one.join("T", "U").more == {"T": [3], "U": [1]}
    assert two.join("T", "U").more == three.join("U").more == {}
    node.close(one)
    assert two.join("T", "U").more == {"T": [3], "U": [0]}
    assert three.join("U").more == {"U": [1]}
    node.close(three)
    assert two.join("T", "U").more == {"U": [0, 1]}
    two.join("T")
    assert two.join("T").more == {}, "RocketMQ's consumers cannot be told"


def test_retries_that_fall_to_a_member_without_the_right_are_another_s(node: Node) -> None:
    def may(own: Own, **rights: Any) -> Own:
        own.proof = SimpleNamespace(identity=Identity(own.name, consume=("T",), **rights))
        return own

    node.backend.store.put_encoded([record("%RETRY%G", queue=0)])
    outsider, other, strict = may(node.own("a")), may(node.own("b")), node.own("c")
    may(strict, groups=("G",))
    joined = outsider.join()
    assert (joined.topics, joined.forbidden, joined.more) == ({"T": 4}, ["%RETRY%G"], {})
    other.join()
    joined = strict.join()
    assert joined.topics == {"T": 4, "%RETRY%G": 1} and joined.forbidden == []
    assert joined.more == {"%RETRY%G": [0]}
    assert other.join().more == {}


def test_a_lock_has_one_holder_of_both_kinds(node: Node) -> None:
    other, one, two = node.java("java"), node.own("one"), node.own("two")
    for own in (one, two):
        own.join()
    locked = one.lock(0, 1)
    assert (locked.queues, locked.lease_ms, locked.places) == ({"T": [0, 1]}, LOCK_MS, {})
    opaque = other.send(Code.LOCK_BATCH_MQ, {}, body("java", 1, 2))
    node.desk.run()
    assert granted(other, opaque) == [2]
    assert two.lock(0, 1, 2, 3).queues == {"T": [3]}
    node.desk.run(GAP_MS)
    for own in (one, two):
        own.notices()
    other.told(NOTIFIED)
    assert one.unlock(0).queues == {}
    node.desk.run(GAP_MS)
    assert two.notices() and other.told(NOTIFIED), "one of them waits for it"
    assert two.lock(0).queues == {"T": [0]}
    node.desk.run(LOCK_MS)
    assert two.lock(1).queues == {"T": [1]}


def test_an_operator_is_told_who_is_there_and_who_has_which_lock(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(group: str = "G") -> Any:
        return operator.ask(lambda rid: api.AskMembers(rid, group))

    operator, one = node.own("operator"), node.own("one")
    assert asked() == api.MembersListed(1, [], {}), "the locks of this epoch are learned for it"
    other = node.java("java")
    one.join()
    one.lock(0, 2)
    opaque = other.send(Code.LOCK_BATCH_MQ, {}, body("java", 1))
    node.desk.run()
    assert granted(other, opaque) == [1]
    listed = asked()
    assert [(found.id, found.client) for found in listed.members] == [
        ("java", "JAVA"), ("one", "hastore"),
    ]  # fmt: skip
    assert listed.members[1].address == "127.0.0.1:7"
    assert listed.owners == {"T": {0: "one", 1: "java", 2: "one"}} and not listed.cut
    assert asked("H") == api.MembersListed(3, [], {}), "asking makes nobody a member"
    monkeypatch.setattr(api, "MAX_OWNERS_LISTED", 1)
    assert (asked().owners, asked().cut) == ({"T": {0: "one"}}, True)
    monkeypatch.undo()
    monkeypatch.setattr(api, "MAX_MEMBERS_LISTED", 1)
    assert ([found.id for found in asked().members], asked().cut) == (["java"], True)
    node.desk.run(LOCK_MS)
    assert asked().owners == {}
    node.backend.writable = False
    assert asked().owners is None, "another node may be the master now"


def test_a_lock_says_where_the_group_is(node: Node) -> None:
    for _ in range(3):
        node.backend.store.put_encoded([record("T", queue=1)])
    other, own = node.java("java"), node.own("own")
    fields = {"consumerGroup": "G", "topic": "T", "queueId": "1", "commitOffset": "2"}
    other.send(Code.UPDATE_CONSUMER_OFFSET, fields, one_way=True)
    places = own.lock(1, 2, places=True).places["T"]
    assert places[1] == api.Place(api.Position(2), 0, 3), "what Java has committed just now, too"
    assert places[2] == api.Place(None, 0, 0)
    assert own.commit(q1=3).status is api.Status.PUT_OK
    node.desk.run(1_000)
    assert own.lock(1, places=True).places["T"][1].position.queue_offset == 3


def test_only_the_owner_commits(node: Node) -> None:
    one, two = node.own("one"), node.own("two")
    one.lock(0, 1)
    two.lock(2)
    assert one.commit(q0=5, q1=6).status is api.Status.PUT_OK
    assert one.commit(q0=3).status is api.Status.PUT_OK, "an owner may go back"
    refused = two.commit(q0=7, q2=7)
    assert (refused.status, refused.reason) == (
        "FENCED",
        "in the group 'G' queue 0 of topic 'T' belongs to 'one' now, not to 'two'",
    )
    one.unlock(0)
    assert one.commit(q0=9).reason.endswith("belongs to nobody now, not to 'one'")
    assert two.commit(q2=1).status is api.Status.PUT_OK, "nothing else was stored with it before"
    node.desk.run(LOCK_MS)
    assert one.commit(q1=9).status == "FENCED"
    kept = node.desk.commits.known("G", "T")
    assert {queue: at.queue_offset for queue, at in kept.items()} == {0: 3, 1: 6, 2: 1}


def test_a_commit_that_comes_late_does_not_move_the_group_back(node: Node) -> None:
    """Its connection was cut off; the member has committed on another one since."""
    one, again = node.own("one"), node.own("one")
    one.lock(0)
    late = one.commit_of(q0=5)(100)
    again.send(lambda _rid: again.commit_of(q0=50)(101))
    node.desk.run()
    assert again.answer(101).status is api.Status.PUT_OK
    one.send(lambda _rid: late)
    node.desk.run()
    refused = one.answer(100)
    assert (refused.status, refused.reason) == ("FENCED", "'one' has made a later commit already")
    kept = node.desk.commits.known("G", "T")
    assert {queue: at.queue_offset for queue, at in kept.items()} == {0: 50}


def test_a_new_master_decides_on_commits_once_it_knows_the_locks(node: Node) -> None:
    one, two = node.own("one"), node.own("two")
    one.lock(0)
    node.backend.entries = [*node.backend.entries, (131_073, node.backend.store.max_offset)]
    node.backend.transfer.hold = True
    rids = [own.send(own.commit_of(q0=4)) for own in (one, two)]
    node.desk.run()
    assert not one.replies and not two.replies
    for _ in range(3):
        node.backend.transfer.end_all()
        node.desk.run(5.0)
    assert one.answer(rids[0]).status is api.Status.PUT_OK
    assert two.answer(rids[1]).status == "FENCED"


def test_locks_that_cannot_be_decided_are_refused_for_now(node: Node) -> None:
    one = node.own("one")
    one.lock(0)
    node.desk.run(20_000)
    node.backend.transfer.hold = True
    rid = one.send(lambda rid: api.Lock(rid, "G", "one", {"T": [0, 1]}))
    node.desk.run()
    node.backend.transfer.end_all(Outcome.FLUSH_SLAVE_TIMEOUT)
    node.desk.run()
    assert one.answer(rid).status == "BUSY"
    node.backend.writable = False
    node.backend.nodes = {2: "tcp://127.0.0.1:2"}
    node.backend.master = 2
    refused = one.lock(0)
    assert (refused.status, refused.master) == ("SERVICE_NOT_AVAILABLE", "tcp://127.0.0.1:2")
    assert one.commit(q0=1).status is api.Status.SERVICE_NOT_AVAILABLE


def test_an_administrator_moves_its_members_too(node: Node) -> None:
    for _ in range(5):
        node.backend.store.put_encoded([record("T", queue=1)])
    own, client = node.own("own"), node.desk.client()
    own.join()
    own.notices()
    fields = {"topic": "T", "group": "G", "timestamp": "-1", "isForce": "true",
              "offset": "3", "queueId": "1"}  # fmt: skip
    assert client.ask(Code.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == 0
    (told,) = [one for one in own.notices() if one.topic]
    assert (told.topic, told.offsets[1]) == ("T", 3)


def test_too_many_queues_are_refused(node: Node) -> None:
    own = node.own("own")
    refused = own.lock(*range(api.MAX_LOCK_QUEUES + 1))
    assert refused.status == "UsageError" and "1001 queues; at most 1000" in refused.reason
    assert own.lock(*range(api.MAX_LOCK_QUEUES)).queues["T"] == list(range(1_000))


def test_rights_of_members(secured: Secured) -> None:
    shared: Any = SimpleNamespace()
    secured.identity("writer", produce='["*"]')
    anybody = secured.identity("anybody", consume='["a", "b*", "c"]', produce='["*"]')
    strict = secured.identity("strict", consume='["a"]', groups='["mine"]')
    boss = secured.identity("boss", admin="true")
    with secured.server(make_door=lambda parts: fill(parts, shared)) as server:
        with Producer([server.endpoint], security=anybody) as producer:
            for topic in ("a", "b1", "d", "%RETRY%mine", "%RETRY%other"):
                producer.send_sync(topic, topic.encode(), queue=0)

        def read(security: Any, topics: Any, group: str, count: int) -> set[bytes]:
            found: set[bytes] = set()
            with Consumer(topics, [server.endpoint], group=group, share=True,
                          security=security) as consumer:  # fmt: skip
                while len(found) < count:
                    found |= {one.body for one in consumer.poll(timeout_s=60.0)}
                consumer.commit()
                assert consumer.poll(timeout_s=0.2) == []
            return found

        assert read(anybody, "*", "other", 2) == {b"a", b"b1"}, "a pattern, as far as it may"
        assert read(strict, "a", "mine", 2) == {b"a", b"%RETRY%mine"}
        with pytest.raises(ForbiddenError, match="identity strict .* be in the group 'other'"):
            read(strict, "a", "other", 1)
        with pytest.raises(ForbiddenError, match="no right to consume b1$"):
            read(strict, ["a", "b1"], "mine", 3)
        with Admin([server.endpoint], security=strict) as admin:
            assert admin.group_members("mine").members == []
            with pytest.raises(ForbiddenError, match="identity strict .* be in the group 'other'"):
                admin.group_members("other")
        with Admin([server.endpoint], security=boss) as admin:
            assert admin.group_members("other").members == [], "an admin may see any group"


def test_who_may_not_read_the_retries_sends_nothing_back(secured: Secured) -> None:
    """An identity without `groups` may be in any group, and reads the retries of none of them."""
    shared: Any = SimpleNamespace()
    anybody = secured.identity("anybody", consume='["a"]', produce='["a"]')
    wide = secured.identity("wide", consume='["a", "%RETRY%*"]')
    strict = secured.identity("strict", consume='["a"]', groups='["g"]')
    with secured.server(make_door=lambda parts: fill(parts, shared)) as server:
        with Producer([server.endpoint], security=anybody) as producer:
            producer.send_sync("a", b"poison", queue=0)
        waits = secured.backend.store.queues
        for security, count in ((anybody, 0), (wide, 1), (strict, 2)):
            with SharedConsumer("a", [server.endpoint], group="g", security=security) as consumer:
                while not (found := consumer.poll(timeout_s=60.0)):
                    pass
                if count:
                    consumer.send_back(found[0])
                else:
                    with pytest.raises(ForbiddenError, match="identity anybody .*%RETRY%g.*groups"):
                        consumer.send_back(found[0])
                    consumer.send_back(found[0], dead_letter=True)
            assert (waits.queue_range("SCHEDULE_TOPIC_XXXX", 2) or (0, 0)) == (0, count)
        assert waits.queue_range("%DLQ%g", 0) == (0, 1)


def test_who_may_send_dead_letters_again(secured: Secured) -> None:
    shared: Any = SimpleNamespace()
    nobody = secured.identity("nobody", consume='["a"]', produce='["a"]', groups='["g"]')
    reader = secured.identity("reader", consume='["a", "%DLQ%g"]', groups='["g"]')
    sender = secured.identity(
        "sender", consume='["a", "%DLQ%g"]', produce='["a", "%DLQ%g"]', groups='["g"]'
    )
    with secured.server(make_door=lambda parts: fill(parts, shared)) as server:
        with Producer([server.endpoint], security=sender) as producer:
            producer.send_sync("%DLQ%g", b"poison", queue=0, properties={"RETRY_TOPIC": "a"})
        with pytest.raises(ForbiddenError, match="no right to consume '%DLQ%g'"):
            next(read_dead_letters("g", [server.endpoint], security=nobody))
        letters = list(read_dead_letters("g", [server.endpoint], security=reader))
        (done,) = resend_dead_letters(letters, [server.endpoint], security=reader)
        assert isinstance(done.error, ForbiddenError) and "produce 'a'" in str(done.error)
        (done,) = resend_dead_letters(letters, [server.endpoint], to="group", security=sender)
        assert isinstance(done.error, ForbiddenError) and "produce '%RETRY%g'" in str(done.error)
        (done,) = resend_dead_letters(letters, [server.endpoint], security=sender)
        assert done.result is not None and done.result.topic == "a"


def test_a_node_without_a_door_shares_nothing(secured: Secured) -> None:
    with secured.server(identities=False) as server:
        consumer = Consumer("t", [server.endpoint], group="g", share=True)
        with consumer, pytest.raises(ClientError, match="no queues are shared at this node"):
            consumer.poll(timeout_s=60.0)


def test_random_requests_of_members_get_one_answer_each(node: Node) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    owns = [node.own(f"own{number}") for number in range(3)]
    asked = 0
    while asked < 1_500:
        request: Any = any_request(chance)
        member = isinstance(request, api.Commit) and request.member is not None
        if not isinstance(request, api.Sharing) and not member:
            continue
        own = chance.choice(owns)
        try:
            request = api.decode_request(api.encode(request))
        except ProtocolError:
            continue  # the server ends such a connection
        asked += 1
        node.take(own, request)
        node.desk.run(chance.choice((0.0, 0.0, 5.0, 20_000.0)))
        answers = [one for one in own.replies if not isinstance(one, api.Notice)]
        if not answers:  # it waits for a record, or for one of its group
            node.desk.run(5.0)
            answers = [one for one in own.replies if not isinstance(one, api.Notice)]
        assert len(answers) == 1, (request, answers)
        own.replies.clear()
    assert not node.desk.failures.count
