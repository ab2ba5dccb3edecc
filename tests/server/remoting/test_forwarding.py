"""Requests that a node forwards to the master: what clients are told, whatever happens in between.

Two or three APIs with fake stores in this process; between them real links, over socket pairs.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import ApiConfig, Config, RemotingConfig
from hastore.errors import HastoreError, ProtocolError
from hastore.ha.hello.forward_link import NOT_TAKEN, ForwardedRequest, ForwardPort
from hastore.ha.hello.peer import Call, ClosedError
from hastore.protocol.forward_link import (
    KEEP_ALIVE,
    ClientRequest,
    answer_frame,
    refused_frame,
    request_frame,
    unknown_frame,
)
from hastore.protocol.hello import Answer as HelloAnswer
from hastore.protocol.hello import Forwarding as Limits
from hastore.protocol.hello import Purpose, Refused
from hastore.protocol.remoting import (
    JSON,
    MAX_HEADER_BYTES,
    ROCKETMQ,
    Answer,
    Code,
    Frame,
    encode_frame,
)
from hastore.server.api.server import ApiServer
from hastore.server.remoting import forwarding
from hastore.server.remoting.door import Door, RemotingRequest
from hastore.server.remoting.forwarding import ForwardCounts, Forwarding, Network
from hastore.service import raise_failure
from tests.api_fakes import FakeBackend
from tests.process.api_attacks import any_remoting, damaged
from tests.protocol.test_hello import make_hello
from tests.server.api.kit import until
from tests.server.kit import config_of
from tests.server.remoting.kit import RemotingClient, served

STORED = frozenset({0, 10, 11, 12})
PUT, BACK = Code.SEND_MESSAGE_V2, Code.CONSUMER_SEND_MSG_BACK
UPDATE, QUERY = Code.UPDATE_CONSUMER_OFFSET, Code.QUERY_CONSUMER_OFFSET
MEMBERS = Code.GET_CONSUMER_LIST_BY_GROUP


class Node:
    """One node: its door answers puts as the test says; by default with its own number."""

    def __init__(self, group: Group, number: int, hold_ms: int) -> None:
        self.group = group
        self.number = number
        self.hold_ms = hold_ms
        self.backend = FakeBackend(number)
        self.port = ForwardPort(SYSTEM_CLOCK)
        self.counts = ForwardCounts()
        self.got: list[RemotingRequest] = []
        self.does: Callable[[RemotingRequest], None] = self.acknowledge
        self.served: contextlib.ExitStack = contextlib.ExitStack()
        self.api: ApiServer
        self.door: Door
        self.forwarding: Forwarding
        self.links: list[socket.socket] = []
        self.reachable = True

    def start(self) -> Node:
        self.api = self.served.enter_context(
            served(self.backend, self.fill, config=ApiConfig(max_pending_puts=self.group.held_max))
        )
        return self

    def fill(self, door: Door) -> None:
        config: Config = msgspec.structs.replace(
            config_of(self.group.root),
            node=self.number,
            api=ApiConfig(max_pending_puts=self.group.held_max),
            remoting=RemotingConfig(hold_timeout_ms=self.hold_ms),
        )
        self.door = door
        network = Network(
            self.port, partial(self.group.dial, self.number), lambda *_: None, raise_failure,
            self.counts,
        )  # fmt: skip
        self.forwarding = Forwarding(door, config, network)
        door.join(dict.fromkeys((PUT, BACK, UPDATE, QUERY, MEMBERS, 1_001), self.take))

    def take(self, request: RemotingRequest) -> None:
        self.got.append(request)
        self.does(request)

    def acknowledge(self, request: RemotingRequest) -> None:
        fields = {
            "by": str(self.number), "born": request.address[0], **request.frame.fields
        }  # fmt: skip
        request.answer(Answer.SUCCESS, fields, request.frame.body)

    def keep(self, request: RemotingRequest) -> None:
        """Answer nothing now."""

    def cut(self) -> None:
        """End the links that other nodes have to this one."""
        links, self.links = self.links, []
        for one in links:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """Be gone at once, as after kill -9."""
        self.reachable = False
        self.cut()

    def in_api(self, call: Callable[[], None]) -> None:
        """Do something in the API's thread, and wait for it."""
        done = threading.Event()
        self.door.later(lambda: (call(), done.set()) and None)
        assert done.wait(60)

    def call(self, ask: Callable[[], bool]) -> bool:
        """Return what a call in the API's thread returns."""
        found: list[bool] = []
        self.in_api(lambda: found.append(ask()))
        return found[0]


class Group:
    def __init__(self, root: object, held_max: int) -> None:
        self.root = root
        self.held_max = held_max
        self.nodes: dict[int, Node] = {}
        self.clients: list[RemotingClient] = []
        self.answer: HelloAnswer | None = None  # to every call, if it is set
        self.calls = 0
        self.broken = 0  # links that a caller has ended by what is no frame
        self.closed_calls = 0  # so many calls more are closed, as by a node that ends

    def add(self, number: int, hold_ms: int = 60_000) -> Node:
        node = self.nodes[number] = Node(self, number, hold_ms)
        return node.start()

    def dial(self, caller: int, node: int, timeout_ms: float) -> Call:
        """Call a node, as HELLO does; the called end has a thread, as on the HA port."""
        self.calls += 1
        called = self.nodes[node]
        if not called.reachable:
            raise HastoreError("refused by the test")
        if self.closed_calls:
            self.closed_calls -= 1
            raise ClosedError("closed by the test")
        answer = self.answer or called.port.decide("127.0.0.1:1", proved=True)
        ours, theirs = socket.socketpair()
        if isinstance(answer, Refused):
            theirs.close()
        else:
            called.links.append(theirs)
            threading.Thread(target=self.serve, args=(called, theirs, caller), daemon=True).start()
        return Call(ours, make_hello(purpose=Purpose.FORWARD, node=node), answer)

    def serve(self, called: Node, sock: socket.socket, caller: int) -> None:
        """Serve an accepted link as the HA port does."""
        try:
            called.port.serve(sock, caller, "test", raise_failure)
        except ProtocolError:
            self.broken += 1

    def master(self, number: int | None) -> None:
        """Let every node know this master."""
        for node in self.nodes.values():
            node.backend.master = number

    def client(self, node: Node) -> RemotingClient:
        self.clients.append(RemotingClient(node.api.endpoint))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for node in self.nodes.values():
            node.kill()
            node.served.close()


@pytest.fixture
def make_group(tmp_path: object) -> Iterator[Callable[..., Group]]:
    made: list[Group] = []

    def make(nodes: int = 2, *, held_max: int = 10_000, hold_ms: int = 60_000) -> Group:
        group = Group(tmp_path, held_max)
        made.append(group)
        for number in range(1, nodes + 1):
            group.add(number, hold_ms)
        group.master(1)
        return group

    yield make
    for one in made:
        one.close()


def pair(group: Group) -> tuple[Node, Node]:
    return group.nodes[1], group.nodes[2]


def held(node: Node, count: int) -> None:
    until(lambda: node.forwarding.waiting == count)


# -- the way there and back


@pytest.mark.parametrize("kind", [JSON, ROCKETMQ])
def test_a_put_at_a_slave_is_answered_by_the_master(
    make_group: Callable[..., Group], kind: int
) -> None:
    group = make_group()
    one, two = pair(group)
    client = group.client(two)
    for number in range(5):
        answer = client.ask(PUT, {"n": str(number)}, b"x" * number * 100_000, kind=kind)
        assert (answer.code, answer.kind) == (Answer.SUCCESS, kind)
        assert answer.fields["by"] == "1" and answer.fields["n"] == str(number)
        assert answer.fields["born"] == "127.0.0.1"
        assert answer.body == b"x" * number * 100_000
    assert not two.got and all(request.is_forwarded for request in one.got)
    assert group.calls == 1, "one link for all"


def test_go_hears_of_success_only_when_it_sends_a_message_back(
    make_group: Callable[..., Group],
) -> None:
    """Its client takes any answer for a success, and never consumed the message again."""
    group = make_group()
    one, two = pair(group)
    client = group.client(two)
    assert client.answer_of(client.send(BACK, language="GO")).code == Answer.SUCCESS
    one.does = lambda request: request.answer(Answer.SYSTEM_ERROR, remark="it was cut")
    client.send(BACK, language="GO")
    for language in ("GO", "JAVA"):  # `answer_of` fails if another request is answered before
        code = PUT if language == "GO" else BACK
        answer = client.answer_of(client.send(code, language=language))
        assert (answer.code, answer.remark) == (Answer.SYSTEM_ERROR, "it was cut")


def test_many_are_under_way_at_a_time_and_answered_in_any_order(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    one.does = one.keep
    clients = [group.client(two) for _ in range(3)]
    asked = [(client, client.send(PUT)) for _ in range(50) for client in clients]
    until(lambda: len(one.got) == len(asked))
    kept = list(reversed(one.got))
    one.in_api(lambda: [one.acknowledge(request) for request in kept] and None)
    for client in clients:
        opaques = sorted(client.next().opaque for _ in range(50))
        assert opaques == sorted(opaque for other, opaque in asked if other is client)


def test_what_a_slave_may_do_is_not_forwarded(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    assert group.client(two).ask(1_001).fields["by"] == "2"
    assert group.client(one).ask(PUT).fields["by"] == "1"
    assert not group.calls


def test_a_query_of_a_position_is_answered_by_the_master_or_here_without_one(
    make_group: Callable[..., Group],
) -> None:
    """A node that has just started lags, and would send a consumer back by as much."""
    group = make_group()
    one, two = pair(group)
    client = group.client(two)
    assert client.ask(QUERY).fields["by"] == "1"
    assert group.client(one).ask(QUERY).fields["by"] == "1"
    waited = two.counts.held  # for the link
    group.master(None)
    assert client.ask(QUERY).fields["by"] == "2"
    assert two.counts.held == waited


def test_a_node_asks_any_other_and_keeps_that_link_whoever_is_the_master(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(3)
    one, two, three = group.nodes.values()
    for node in (one, two, three):
        node.does = node.acknowledge
    said: list[tuple[int, str]] = []

    def ask(asking: Node, number: int) -> None:
        question = Frame(MEMBERS, 0, fields={"consumerGroup": "G"})

        def then(answer: Frame | None) -> None:
            said.append((number, "" if answer is None else answer.fields["by"]))

        until(lambda: asking.call(lambda: asking.forwarding.ask(question, then, number)))

    ask(one, 2)
    ask(one, 3)
    until(lambda: len(said) == 2)
    assert sorted(said) == [(2, "2"), (3, "3")], "a master asks its slaves"
    calls = group.calls
    ask(one, 2)
    until(lambda: len(said) == 3)
    assert group.calls == calls, "on the same link"
    ask(two, 3)
    ask(two, 1)
    until(lambda: len(said) == 5)
    assert said[3:] == [(3, "3"), (1, "1")]
    client = group.client(two)
    assert client.ask(PUT).fields["by"] == "1"
    group.master(3)  # the link to the former master ends, that to the other one carries puts now
    assert client.ask(PUT).fields["by"] == "3"
    ask(two, 1)
    until(lambda: len(said) == 6)
    assert said[5] == (1, "1"), "it may be asked again over a new link"
    three.kill()
    ask(two, 1)
    until(lambda: len(said) == 7)


def test_a_question_to_another_node_leaves_the_link_to_the_master_as_it_is(
    make_group: Callable[..., Group],
) -> None:
    """It was left for a new one: requests of clients waited for half a second."""
    group = make_group(3)
    two, three = group.nodes[2], group.nodes[3]
    client = group.client(two)
    assert client.ask(PUT).fields["by"] == "1"
    link = two.forwarding._lines[1].link
    heard: list[Frame | None] = []

    def ask() -> bool:
        return two.forwarding.ask(Frame(MEMBERS, 0), heard.append, three.number)

    until(lambda: two.call(ask))
    until(lambda: bool(heard))
    assert two.forwarding._lines[1].link is link and not two.forwarding._lines[1].probing
    assert client.ask(PUT).fields["by"] == "1"
    assert two.forwarding._lines[1].link is link


def test_one_way_requests_are_forwarded_and_forgotten(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    client = group.client(two)
    for _ in range(20):
        client.send(Code.UPDATE_CONSUMER_OFFSET, {"topic": "t"}, one_way=True)
    assert client.ask(PUT).code == Answer.SUCCESS, "and no other answer came"
    assert len(one.got) == 21
    held(two, 0)


def test_the_master_refuses_or_leaves_open_as_for_its_own_clients(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    one.does = lambda request: request.answer(Answer.MESSAGE_ILLEGAL, remark="too long")
    client, other = group.client(two), group.client(two)
    answer = client.ask(PUT)
    assert (answer.code, answer.remark) == (Answer.MESSAGE_ILLEGAL, "too long")
    one.does = lambda request: request.leave_open("TERM_CHANGED")
    client.send(PUT)
    assert client.ended() and not client.frames
    one.does = lambda request: request.leave_open("too late", is_late=True)
    other.send(PUT)
    until(lambda: len(one.got) == 3)
    one.does = one.acknowledge
    assert other.ask(PUT).code == Answer.SUCCESS, "who waits no more keeps the connection"
    assert len(one.got) == 4


def test_a_defect_of_a_handler_leaves_the_request_open_or_fails_it(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)

    def fail(request: RemotingRequest) -> None:
        raise LookupError("a bug")

    one.does = fail
    answer = group.client(two).ask(PUT)
    assert answer.code == Answer.SYSTEM_ERROR and "a bug" in str(answer.remark)
    held(two, 0)


# -- no master, another master


def test_requests_wait_for_a_master_and_go_on_here(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    one.kill()
    group.master(None)
    client = group.client(two)
    asked = [client.send(PUT, {"n": str(n)}) for n in range(30)]
    held(two, 30)
    group.master(2)
    for number, opaque in enumerate(asked):
        answer = client.answer_of(opaque)
        assert (answer.code, answer.fields["by"]) == (0, "2")
        assert answer.fields["n"] == str(number), "in their order"
    assert not one.got and not any(request.is_forwarded for request in two.got)


def test_requests_wait_for_a_master_and_go_on_at_another_node(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(3)
    three = group.nodes[3]
    client = group.client(three)
    assert client.ask(PUT).fields["by"] == "1"
    group.nodes[1].kill()
    until(lambda: three.forwarding._lines[1].limits is None)
    asked = [client.send(PUT) for _ in range(30)]  # node 3 still takes node 1 for the master
    held(three, 30)
    group.master(2)
    assert [client.answer_of(opaque).fields["by"] for opaque in asked] == ["2"] * 30


def test_what_was_sent_to_a_master_that_died_has_an_unknown_outcome(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    one.does = one.keep
    client, idle = group.client(two), group.client(two)
    client.send(PUT)
    until(lambda: len(one.got) == 1)
    client.send(PUT, one_way=True)
    until(lambda: len(one.got) == 2)
    one.kill()
    group.master(2)
    assert client.was_reset(), "RocketMQ 4's clients would wait for their timeout"
    assert not client.frames, "neither stored nor refused"
    assert idle.ask(PUT).fields["by"] == "2"
    assert len(two.got) == 1, "what may be stored is not sent again"


def unanswered(group: Group) -> RemotingClient:
    """Return a client of node 2 with a request that the master, node 1, keeps."""
    one, two = pair(group)
    one.does = one.keep
    client = group.client(two)
    client.send(PUT)
    until(lambda: len(one.got) == 1)
    return client


def behind_an_unknown_one(group: Group) -> tuple[RemotingClient, int]:
    """Return a client with two requests, and the second; of the first nobody knows the outcome."""
    one, two = pair(group)
    client = unanswered(group)
    group.master(None)
    waits = client.send(PUT)
    held(two, 2)
    one.kill()
    held(two, 1)
    return client, waits


@pytest.mark.parametrize("late", [False, True], ids=["", "carried out before it is looked for"])
def test_what_waits_beside_an_unknown_outcome_is_answered_before_the_connection_ends(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Else its client would try again at the next node, whose connections end in this moment."""
    group = make_group()
    two = group.nodes[2]
    if late:
        monkeypatch.setattr(two.forwarding, "_part", lambda: None)
    client, waits = behind_an_unknown_one(group)
    two.does = two.keep
    if not late:
        two.in_api(two.forwarding._part)
    group.master(2)
    until(lambda: len(two.got) == 1)  # carried out here, and not answered yet
    monkeypatch.undo()
    two.in_api(two.forwarding._part)
    client.send(PUT)  # it came later, so nothing waits for it
    until(lambda: len(two.got) == 2)

    def answer_and_look() -> None:
        two.acknowledge(two.got[0])
        two.forwarding._part()

    two.in_api(answer_and_look)  # in one iteration: the answer has not been sent yet
    assert client.answer_of(waits).fields["by"] == "2"
    assert client.ended()


def test_a_request_that_comes_while_its_connection_is_about_to_end_is_answered_first(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is its client's next try, after another node's connection has ended."""
    group = make_group()
    one, two = pair(group)
    client = unanswered(group)
    group.master(None)
    look = two.forwarding._part
    monkeypatch.setattr(forwarding, "QUIET_MS", 60_000.0)
    monkeypatch.setattr(two.forwarding, "_part", lambda: None)
    one.kill()
    until(lambda: bool(two.forwarding._parting))
    sent: list[int] = []

    def send_and_look() -> None:
        sent.append(client.send(PUT))
        look()  # the request is not read yet

    two.in_api(send_and_look)
    held(two, 1)
    two.in_api(look)
    group.master(2)
    assert client.answer_of(sent[0]).fields["by"] == "2"
    monkeypatch.undo()
    two.in_api(look)
    assert client.ended()


@pytest.mark.parametrize("master", [2, 3], ids=["here", "at another node"])
def test_a_connection_with_an_unknown_outcome_ends_once_there_is_a_master(
    make_group: Callable[..., Group], master: int
) -> None:
    """A client whose tries all come before the election has failed the message."""
    group = make_group(3)
    one, two = pair(group)
    client = unanswered(group)
    group.master(None)
    one.kill()
    until(lambda: bool(two.forwarding._parting))
    for _ in range(3):
        two.in_api(two.forwarding._part)
    assert two.forwarding._parting, "its connection goes on"
    group.master(master)
    assert client.ended()


def test_the_quiet_moment_of_a_connection_that_ends_begins_once_there_is_a_master(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a long election, too: what its client sends meanwhile gets an answer first."""
    group = make_group()
    one, two = pair(group)
    client = unanswered(group)
    group.master(None)
    look = two.forwarding._part
    monkeypatch.setattr(two.forwarding, "_part", lambda: None)
    one.kill()
    until(lambda: bool(two.forwarding._parting))

    def age_and_look() -> None:
        for parting in two.forwarding._parting.values():
            parting.since_ms -= 2 * forwarding.QUIET_MS  # so long there was no master
        look()

    two.in_api(age_and_look)
    opaque = client.send(PUT)
    held(two, 1)

    def find_a_master() -> None:
        two.backend.master = 2
        look()

    two.in_api(find_a_master)
    assert client.answer_of(opaque).fields["by"] == "2"
    monkeypatch.undo()
    assert client.ended()


def test_without_a_master_a_connection_with_an_unknown_outcome_ends_in_time(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(hold_ms=300)
    client, _ = behind_an_unknown_one(group)
    assert client.ended()
    group.master(2)
    assert group.client(group.nodes[2]).ask(PUT).fields["by"] == "2"
    assert len(group.nodes[2].got) == 1, "what is dropped is not carried out later"


def test_a_client_that_leaves_with_an_unknown_outcome_costs_nothing(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    two = group.nodes[2]
    client, _ = behind_an_unknown_one(group)
    client.close()
    until(lambda: not two.forwarding._parting)


def test_a_former_master_refuses_and_the_request_goes_to_the_new_one(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(3)
    one, two, three = group.nodes.values()
    client = group.client(three)
    assert client.ask(PUT).fields["by"] == "1"
    one.backend.master = two.backend.master = 2  # node 3 does not know it yet
    opaque = client.send(PUT)
    held(three, 1)
    assert len(one.got) == 1
    three.backend.master = 2
    assert client.answer_of(opaque).fields["by"] == "2"
    assert group.client(one).ask(PUT).fields["by"] == "2", "the former master forwards"


def test_a_put_that_was_refused_before_its_append_goes_to_the_new_master(
    make_group: Callable[..., Group],
) -> None:
    """The master admits a put, and is superseded before the append."""
    group = make_group(3)
    one, two, three = group.nodes.values()

    def superseded(request: RemotingRequest) -> None:
        one.backend.master = 2
        request.answer(Answer.SERVICE_NOT_AVAILABLE, remark="superseded")

    one.does = superseded
    own, forwarded = group.client(one), group.client(three)
    two.backend.master = 2
    assert own.ask(PUT).fields["by"] == "2"
    one.backend.master = 1
    opaque = forwarded.send(PUT)
    until(lambda: len(one.got) == 2)
    three.backend.master = 2
    assert forwarded.answer_of(opaque).fields["by"] == "2"


def test_a_master_that_cannot_write_refuses_with_its_reason(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    one.does = lambda request: request.answer(
        Answer.SERVICE_NOT_AVAILABLE, remark="the disk is full"
    )
    one.backend.writable = False
    for node in (one, two):
        answer = group.client(node).ask(PUT)
        assert (answer.code, answer.remark) == (Answer.SERVICE_NOT_AVAILABLE, "the disk is full")


def confirmed(node: Node) -> Callable[[RemotingRequest], None]:
    """Handle puts as a master does that needs slaves."""

    def put(request: RemotingRequest) -> None:
        why = node.backend.unconfirmable
        if why is None:
            node.acknowledge(request)
        else:
            request.answer(Answer.SERVICE_NOT_AVAILABLE, remark=why)

    return put


def test_a_new_master_lets_puts_wait_for_its_slaves(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    one.does = confirmed(one)
    clients = [group.client(one), group.client(two)]
    asked = [(client, client.send(PUT, {"n": str(n)})) for n in range(20) for client in clients]
    until(lambda: one.forwarding.waiting == len(asked))
    assert len(one.got) == len(asked), "nothing is tried again before there are slaves"
    one.backend.unconfirmable = None
    for client, opaque in asked:
        assert client.answer_of(opaque).fields["by"] == "1"


def test_what_waits_for_slaves_keeps_its_order_whatever_the_links_delays_are(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    one, two = pair(group)
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    one.does = confirmed(one)
    ages = itertools.count(0, 10)  # as if each came sooner over the link than the one before
    monkeypatch.setattr(
        forwarding, "ClientRequest",
        lambda host, port, data, _age_ms: ClientRequest(host, port, data, next(ages)),
    )  # fmt: skip
    client = group.client(two)
    asked = [client.send(PUT, {"n": str(n)}) for n in range(20)]
    until(lambda: one.forwarding.waiting == len(asked))
    one.backend.unconfirmable = None
    for number, opaque in enumerate(asked):
        assert client.answer_of(opaque).fields["n"] == str(number)


def test_a_new_master_lets_sends_wait_for_the_topics_of_a_broker(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slaves confirm, so it would try 20 times within 0.2 s, and refuse then."""
    group = make_group()
    one, two = pair(group)
    waits = [True]
    monkeypatch.setattr(one.backend, "topics_wait", lambda: waits[0])

    def put(request: RemotingRequest) -> None:
        if waits[0]:
            request.answer(Answer.SERVICE_NOT_AVAILABLE, remark="not yet")
        else:
            one.acknowledge(request)

    one.does = put
    asked = [(client, client.send(PUT)) for client in (group.client(one), group.client(two))]
    until(lambda: one.forwarding.waiting == 2)
    assert len(one.got) == 2, "nothing is tried again before the topics are known"
    waits[0] = False
    for client, opaque in asked:
        assert client.answer_of(opaque).fields["by"] == "1"


def test_a_lack_of_slaves_that_lasts_is_answered_at_once(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(hold_ms=300)
    one, two = pair(group)
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    one.does = confirmed(one)
    client = group.client(one)
    for expected in (2, 1, 1, 1):  # how often it is tried
        answer = client.ask(PUT)
        assert (answer.code, answer.remark) == (14, "0 of 1 slaves in sync")
        assert len(one.got) == expected
        one.got.clear()
    one.backend.unconfirmable = None
    assert client.ask(PUT).code == Answer.SUCCESS


def test_what_a_master_refuses_for_now_is_tried_a_few_times_only(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    one.does = lambda request: request.answer(Answer.SERVICE_NOT_AVAILABLE, remark="a failed disk")
    for node in (one, two):
        answer = group.client(node).ask(PUT)
        assert (answer.code, answer.remark) == (14, "a failed disk")
        assert len(one.got) == forwarding.TRIES_MAX + 1
        one.got.clear()


def test_requests_do_not_go_in_circles(make_group: Callable[..., Group]) -> None:
    group = make_group(3, hold_ms=200)
    one, two, three = group.nodes.values()
    one.backend.master, two.backend.master, three.backend.master = 2, 3, 1
    answer = group.client(one).ask(PUT)
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE
    assert "not the master" in str(answer.remark)
    assert not one.got and not two.got and not three.got


def test_the_time_that_a_request_has_waited_counts_at_the_master_too(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    one.does = confirmed(one)
    group.master(None)
    client = group.client(two)
    opaque = client.send(PUT)
    held(two, 1)

    def go_on() -> None:
        two.forwarding._held[0].request.came_ms -= 59_999  # of the 60,000 that it may wait
        group.master(1)

    two.in_api(go_on)
    until(lambda: len(one.got) >= 1)
    age_ms = SYSTEM_CLOCK.monotonic_ms() - one.got[0].came_ms
    assert 59_999 <= age_ms < 119_000
    answer = client.answer_of(opaque)
    assert (answer.code, answer.remark) == (14, "0 of 1 slaves in sync")


def test_who_has_waited_longer_is_refused_first(make_group: Callable[..., Group]) -> None:
    """A demoted master has requests that waited for its slaves, after others have come."""
    group = make_group()
    one, _ = pair(group)
    group.master(None)
    client = group.client(one)
    young = client.send(PUT)
    held(one, 1)
    answers: list[Frame | None] = []

    def hold_an_old_one() -> None:
        frame = Frame(PUT, 1, 0, {}, b"")
        old = RemotingRequest(
            frame, SYSTEM_CLOCK.monotonic_ms() - 60_000, one.api._connections.all()[0],
            ("127.0.0.1", 1), lambda _request, answer: answers.append(answer),
        )  # fmt: skip
        one.door.handle(old)

    one.in_api(hold_an_old_one)
    until(lambda: len(answers) == 1)
    assert answers[0] is not None and answers[0].code == Answer.SERVICE_NOT_AVAILABLE
    held(one, 1)
    group.master(1)
    assert client.answer_of(young).code == Answer.SUCCESS


def test_a_call_that_is_closed_once_refuses_nobody(make_group: Callable[..., Group]) -> None:
    """A node that ends, or has no room for the connection, closes it as an old one does."""
    group = make_group()
    group.closed_calls = 1
    answer = group.client(group.nodes[2]).ask(PUT)
    assert (answer.code, answer.fields.get("by")) == (Answer.SUCCESS, "1"), answer.remark


def test_a_master_of_the_version_before_is_named_soon(make_group: Callable[..., Group]) -> None:
    group = make_group()
    group.closed_calls = 1_000_000
    answer = group.client(group.nodes[2]).ask(PUT)
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE and "upgrade it" in str(answer.remark)


def test_what_a_master_has_that_stops_goes_to_the_next_one(
    make_group: Callable[..., Group],
) -> None:
    """What waits for slaves, what is not carried out yet, and what comes now."""
    group = make_group(3)
    one, two, three = group.nodes.values()
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    one.does = confirmed(one)
    clients = [group.client(three) for _ in range(3)]
    asked = [clients[0].send(PUT)]
    until(lambda: one.forwarding.waiting == 1)
    one.does = one.keep
    asked.append(clients[1].send(PUT))
    until(lambda: len(one.got) == 2)
    one.in_api(one.forwarding.end)
    kept = one.got[1]
    one.in_api(lambda: kept.answer(Answer.SERVICE_NOT_AVAILABLE, remark="the node stops"))
    asked.append(clients[2].send(PUT))
    until(lambda: three.forwarding.waiting == 3)
    group.master(2)
    for client, opaque in zip(clients, asked, strict=True):
        answer = client.answer_of(opaque)
        assert (answer.code, answer.fields.get("by")) == (0, "2"), answer.remark


def test_a_master_that_begins_to_stop_leaves_requests_to_the_next_one(
    make_group: Callable[..., Group],
) -> None:
    """It refuses puts before it steps down; for a full disk it would be refused for good."""
    group = make_group(3)
    one, two, three = group.nodes.values()

    def refuse(request: RemotingRequest) -> None:
        request.answer(Answer.SERVICE_NOT_AVAILABLE, remark="the node is shutting down")

    one.does, one.backend.writable, one.backend.ends = refuse, False, True
    client = group.client(three)
    opaque = client.send(PUT)
    until(lambda: len(one.got) >= 2)
    group.master(2)
    answer = client.answer_of(opaque)
    assert (answer.code, answer.fields.get("by")) == (0, "2"), answer.remark


def test_what_becomes_of_requests_is_counted(make_group: Callable[..., Group]) -> None:
    group = make_group(hold_ms=500)
    one, two = pair(group)
    assert two.counts.status() == {
        "waiting": 0, "forwarded": 0, "received": 0, "held": 0, "refused": 0, "unknown": 0,
    }  # fmt: skip
    client = group.client(two)
    for _ in range(3):
        assert client.ask(PUT).code == Answer.SUCCESS
    sent = two.counts.forwarded
    assert sent == one.counts.received == 3, "the first one may have waited for the link"
    one.does = one.keep
    client.send(PUT, one_way=True)
    until(lambda: two.counts.status()["waiting"] == 1)
    until(lambda: len(one.got) == 4)
    one.kill()
    until(lambda: two.counts.unknown == 1)
    group.master(None)
    held_before = two.counts.held
    assert client.ask(PUT).code == Answer.SERVICE_NOT_AVAILABLE
    counts = two.counts.status()
    assert (counts["held"], counts["refused"]) == (held_before + 1, 1)
    assert (counts["waiting"], counts["forwarded"], counts["unknown"]) == (0, 4, 1)
    one.backend.master, one.backend.unconfirmable = 1, "0 of 1 slaves in sync"
    one.does = confirmed(one)
    assert group.client(one).ask(PUT).code == Answer.SERVICE_NOT_AVAILABLE
    assert (one.counts.held, one.counts.refused, one.counts.forwarded) == (1, 1, 0)


def test_a_node_that_stops_or_starts_is_no_node_without_remoting(
    make_group: Callable[..., Group],
) -> None:
    starting = ForwardPort(SYSTEM_CLOCK).decide("127.0.0.1:1", proved=True)
    assert isinstance(starting, Refused) and "starts" in starting.reason
    group = make_group()
    one, two = pair(group)
    one.in_api(one.forwarding.end)
    client = group.client(two)
    opaque = client.send(PUT)
    until(lambda: group.calls >= 3)
    line = two.forwarding._lines[1]
    assert "stops" in str(line.problem) and not line.lasting
    group.master(2)
    assert client.answer_of(opaque).fields["by"] == "2"


def test_a_one_way_request_with_an_unknown_outcome_costs_nobody_anything(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    one.does = lambda request: request.leave_open("TERM_CHANGED")
    near, far = group.client(one), group.client(two)
    for client in (near, far):
        client.send(PUT, one_way=True)
    until(lambda: len(one.got) == 2)
    one.does = one.keep
    far.send(PUT, one_way=True)
    until(lambda: len(one.got) == 3)
    one.kill()  # the link breaks: the outcome is unknown
    held(two, 0)
    group.master(2)
    one.does = one.acknowledge
    assert far.ask(PUT).fields["by"] == "2"
    assert near.ask(1_001).fields["by"] == "1"


def test_a_former_master_may_still_answer_for_a_moment(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "LEFT_MS", 60_000.0)
    group = make_group(3)
    one, _, three = group.nodes.values()
    one.does = one.keep
    client, other = group.client(three), group.client(three)
    opaque = client.send(PUT)
    until(lambda: len(one.got) == 1)
    group.master(2)
    assert other.ask(PUT).fields["by"] == "2"
    one.in_api(lambda: one.acknowledge(one.got[0]))
    assert client.answer_of(opaque).fields["by"] == "1"


def test_a_former_master_that_says_nothing_is_left_soon(make_group: Callable[..., Group]) -> None:
    group = make_group(3)
    one, _, three = group.nodes.values()
    one.does = one.keep
    client, other = group.client(three), group.client(three)
    client.send(PUT)
    until(lambda: len(one.got) == 1)
    group.master(2)
    assert other.ask(PUT).fields["by"] == "2"
    assert client.ended() and not client.frames


def test_a_link_that_was_opened_by_a_question_is_left_once_it_carries_requests(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(3)
    one, two, three = group.nodes.values()
    one.does = one.keep
    asked = Frame(MEMBERS, 0, fields={"consumerGroup": "G"})
    until(lambda: three.call(lambda: three.forwarding.ask(asked, lambda _answer: None)))
    client, other = group.client(three), group.client(three)
    client.send(PUT)
    until(lambda: len(one.got) == 2)
    group.master(2)
    assert other.ask(PUT).fields["by"] == "2"
    assert client.ended() and not client.frames
    assert len(two.got) == 1


def test_a_node_that_becomes_master_leaves_the_former_one(
    make_group: Callable[..., Group],
) -> None:
    """Nothing else is under way: no other request makes it look for the master."""
    group = make_group()
    one, two = pair(group)
    one.does = one.keep
    client = group.client(two)
    client.send(PUT)
    until(lambda: len(one.got) == 1)
    group.master(2)
    assert client.ended() and not client.frames


def test_nothing_is_sent_to_a_master_that_hangs(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group()
    one, two = pair(group)
    client = group.client(two)
    assert client.ask(PUT).fields["by"] == "1"
    monkeypatch.setattr(forwarding, "SILENT_MS", -1.0)  # as if it had been silent for so long
    opaque = client.send(PUT)
    held(two, 1)
    monkeypatch.setattr(forwarding, "SILENT_MS", 60_000.0)
    assert client.answer_of(opaque).fields["by"] == "1"
    assert len(one.got) == 2


# -- bounds, refusals


def test_who_waits_too_long_is_refused_and_nothing_was_done(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(hold_ms=50)
    one, two = pair(group)
    one.kill()
    client = group.client(two)
    for master in (None, 1):
        group.master(master)
        answer = client.ask(PUT)
        assert answer.code == Answer.SERVICE_NOT_AVAILABLE and answer.code not in STORED
        assert "nothing was done" in str(answer.remark)
    assert not one.got and not two.got
    held(two, 0)


def test_too_many_are_refused_at_once(make_group: Callable[..., Group]) -> None:
    group = make_group(held_max=5)
    one, two = pair(group)
    group.master(None)
    client = group.client(two)
    asked = [client.send(PUT) for _ in range(8)]
    for opaque in asked[5:]:
        answer = client.answer_of(opaque)
        assert answer.code == Answer.SYSTEM_BUSY and "max_pending_puts" in str(answer.remark)
    group.master(1)
    for opaque in asked[:5]:
        assert client.answer_of(opaque).fields["by"] == "1"


def test_too_many_bytes_are_refused_at_once(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    group.master(None)
    two.forwarding._held_bytes_max = 1_000_000
    client = group.client(two)
    first, second = client.send(PUT, {}, bytes(900_000)), client.send(PUT, {}, bytes(900_000))
    assert client.answer_of(second).code == Answer.SYSTEM_BUSY
    group.master(1)
    assert client.answer_of(first).fields["by"] == "1"


def test_what_waits_for_slaves_is_bounded_by_its_bytes(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    one.does = confirmed(one)
    one.forwarding._held_bytes_max = 1_000_000
    client = group.client(one)
    first, second = client.send(PUT, {}, bytes(900_000)), client.send(PUT, {}, bytes(900_000))
    assert client.answer_of(second).code == Answer.SERVICE_NOT_AVAILABLE
    one.backend.unconfirmable = None
    assert client.answer_of(first).fields["by"] == "1"
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    third = client.send(PUT, {}, bytes(900_000))  # there is room again
    until(lambda: one.forwarding.waiting == 1)
    one.backend.unconfirmable = None
    assert client.answer_of(third).fields["by"] == "1"


def test_what_waited_for_slaves_is_dropped_when_its_client_has_gone(
    make_group: Callable[..., Group],
) -> None:
    """The client sends it again on another connection: it would be stored twice."""
    group = make_group()
    one, two = pair(group)
    one.backend.unconfirmable = "0 of 1 slaves in sync"
    one.does = confirmed(one)
    client = group.client(one)
    client.send(PUT)
    until(lambda: one.forwarding.waiting == 1)
    client.close()
    until(lambda: one.api.connections == 0)
    one.backend.unconfirmable = None
    held(one, 0)
    assert group.client(one).ask(PUT).code == Answer.SUCCESS
    assert len(one.got) == 2, "the first try, and the other client's"


def test_what_the_master_does_not_take_at_once_waits_here(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    one, two = pair(group)
    group.answer = Limits(3, 1 << 20)
    one.does = one.keep
    client = group.client(two)
    asked = [client.send(PUT) for _ in range(10)]
    held(two, 10)
    until(lambda: len(one.got) == 3)
    answered = 0
    while answered < 10:
        until(lambda count=answered: len(one.got) > count)  # type: ignore[misc]
        one.in_api(partial(one.acknowledge, one.got[answered]))
        assert client.answer_of(asked[answered]).fields["by"] == "1"
        answered += 1
        assert len(one.got) - answered <= 3


def test_a_master_that_takes_nothing_is_named_at_once(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    one.port.handler, one.port.refusal = None, NOT_TAKEN
    answer = group.client(two).ask(PUT)
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE and "remoting.enabled" in str(answer.remark)


def test_a_code_that_is_never_forwarded_is_refused_by_the_master(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(hold_ms=100)
    one, two = pair(group)
    monkeypatch.setattr(forwarding, "FORWARDED", forwarding.FORWARDED | {1_001})
    client = group.client(two)
    received = Forwarding._receive

    def as_before(self: Forwarding, requests: object) -> None:
        monkeypatch.setattr(forwarding, "FORWARDED", forwarding.FORWARDED - {1_001})
        received(self, requests)  # type: ignore[arg-type]

    monkeypatch.setattr(Forwarding, "_receive", as_before)
    answer = client.ask(1_001)
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE and "1001" in str(answer.remark)
    assert not one.got


def test_a_header_that_no_master_can_read_is_refused_here(
    make_group: Callable[..., Group],
) -> None:
    """It was taken for a refusal for now, so every request of the node waited behind it."""
    group = make_group()
    one, two = pair(group)
    good, odd = group.client(two), group.client(two)
    assert good.ask(PUT).code == Answer.SUCCESS  # the link is open
    # Below the node's own limit of 256 KiB; numbers become texts, which are longer.
    fields = b",".join(b'"%x":1' % n for n in range(27_000))
    header = b'{"code":310,"opaque":1,"extFields":{' + fields + b"}}"
    assert len(header) < MAX_HEADER_BYTES
    odd.sock.sendall(struct.pack(">II", 4 + len(header), len(header)) + header)
    answer = odd.answer_of(1)
    assert answer.code == Answer.MESSAGE_ILLEGAL and "at most 262144" in str(answer.remark)
    assert one.counts.received == 1 and not two.forwarding.waiting
    assert two.counts.refused == 1
    assert good.ask(PUT).fields["by"] == "1"


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("it cannot be read: a frame of 3 bytes", Answer.MESSAGE_ILLEGAL),
        ("request code 310 is not one that is forwarded", Answer.SERVICE_NOT_AVAILABLE),
    ],
)
def test_what_a_master_will_never_take_holds_up_nobody(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, reason: str, code: Answer
) -> None:
    """A master of an older version may not know what this node forwards."""
    group = make_group()
    two = group.nodes[2]
    client = group.client(two)
    assert client.ask(PUT).code == Answer.SUCCESS  # the link is open

    def refuse(_: Forwarding, requests: list[ForwardedRequest]) -> None:
        for each in requests:
            each.refuse(reason)

    with monkeypatch.context() as patched:
        patched.setattr(Forwarding, "_receive", refuse)
        answer = client.ask(PUT)
    assert answer.code == code and answer.remark == f"node 1 refuses it: {reason}"
    assert client.ask(PUT).code == Answer.SUCCESS
    assert (two.counts.forwarded, two.counts.refused) == (3, 1) and not two.forwarding.waiting


def test_a_client_that_leaves_costs_nothing(make_group: Callable[..., Group]) -> None:
    group = make_group()
    one, two = pair(group)
    one.does = one.keep
    client = group.client(two)
    client.send(PUT)
    until(lambda: len(one.got) == 1)
    group.master(None)
    client.send(PUT)
    held(two, 2)
    client.close()
    until(lambda: two.api.connections == 0)
    one.in_api(lambda: one.acknowledge(one.got[0]))
    group.master(1)
    held(two, 0)
    assert len(one.got) == 1, "what nobody waits for is not carried out"


def test_a_node_that_stops_refuses_what_waits(
    make_group: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    group = make_group()
    one, two = pair(group)
    group.master(None)
    client = group.client(two)
    opaque = client.send(PUT)
    held(two, 1)
    stopping = threading.Thread(target=two.api.stop, args=(60,))
    with caplog.at_level(logging.WARNING):
        stopping.start()
        answer = client.answer_of(opaque)
        stopping.join()
    assert answer.code == Answer.SERVICE_NOT_AVAILABLE and "stops" in str(answer.remark)
    assert not caplog.records


# -- hostile frames, also by `make fuzz-api`

SECONDS = float(os.environ.get("HASTORE_FUZZ_API_SECONDS") or 0)
SEED = int(os.environ.get("HASTORE_FUZZ_API_SEED") or 0) or random.SystemRandom().getrandbits(32)
ROUNDS, CALLED_ROUNDS = 20, 8  # at least; each call after one in vain waits up to 0.3 s


def hostile_frame(chance: random.Random) -> bytes:
    """Return a frame of the link, whole or wrong."""
    number = chance.choice([0, 1, 2, chance.randrange(300), 2**64 - 1])
    host = chance.choice([bytes(4), bytes(16), bytes([10, 1, 2, 3])])
    inner = any_remoting(chance)
    inner = chance.choice([inner, inner, damaged(chance, inner), inner[: chance.randrange(9)]])
    inner = inner[: 1 << 20]
    age_ms = chance.choice([0, 5, 2_000, 2**31, 2**32 - 1])
    client = ClientRequest(host, chance.getrandbits(16), inner, age_ms)
    frame = chance.choice([
        request_frame(number, client), request_frame(number, client, aged=True),
        request_frame(number, client, aged=True), answer_frame(number, inner),
        refused_frame(number, "why"), unknown_frame(number, "why", is_late=True), KEEP_ALIVE,
    ])  # fmt: skip
    return damaged(chance, frame) if chance.random() < 0.05 else frame


def hostile_bytes(chance: random.Random) -> bytes:
    """Return what one connection says: mostly requests, so that some are handled."""
    data = b"".join(hostile_frame(chance) for _ in range(chance.randrange(1, 12)))
    return data[: chance.choice([len(data), chance.randrange(len(data) + 1)])]


def rounds(least: int) -> Iterator[random.Random]:
    """Return what each round draws from; print the seed."""
    print(f"make fuzz-api SECONDS={SECONDS:g} SEED={SEED}")
    ends = time.monotonic() + SECONDS
    for number in itertools.count():
        if number >= least and time.monotonic() >= ends:
            return
        yield random.Random(SEED + number)


@pytest.mark.timeout(SECONDS + 300)
def test_fuzz_a_node_that_forwards_what_no_client_has_sent(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(3)
    one, two, _ = group.nodes.values()
    client = group.client(two)
    right = request_frame(1, ClientRequest(bytes(4), 1, encode_frame(Frame(PUT, 1)), 0))
    with group.dial(3, 1, 60_000).sock as sock:  # both kinds, whatever is drawn after it
        sock.sendall(right)
        assert isinstance(sock, socket.socket) and sock.recv(65_536)
        sock.sendall(b"\xff" * 13)
        with contextlib.suppress(ConnectionError):
            while sock.recv(65_536):
                continue
    for chance in rounds(ROUNDS):
        sock = group.dial(3, 1, 60_000).sock
        assert isinstance(sock, socket.socket)
        data = hostile_bytes(chance)
        at = chance.randrange(len(data) + 1)
        sock.settimeout(60)
        with contextlib.suppress(OSError):  # the node has ended the connection
            sock.sendall(data[:at])
            if chance.random() < 0.1:
                sock.recv(100)
            sock.sendall(data[at:])
            sock.shutdown(socket.SHUT_WR)
            while chance.random() < 0.9 and sock.recv(65_536):
                continue
        sock.close()
        answer = client.ask(PUT)
        assert answer.fields["by"] == "1", answer.remark
    assert group.broken and one.counts.received > ROUNDS, "both kinds were met"
    for pending in one.port._pending.values():
        until(lambda of=pending: (of.requests, of.size) == (0, 0))  # type: ignore[misc]


@pytest.mark.timeout(SECONDS + 300)
def test_fuzz_a_master_that_answers_what_nobody_asked(
    make_group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "LEFT_MS", 0.0)
    group = make_group()
    _, two = pair(group)
    said: list[int] = []  # rounds in which a link has said all

    def answer(sock: socket.socket, chance: random.Random) -> None:
        with contextlib.suppress(OSError), sock:
            sock.recv(65_536)
            with contextlib.suppress(OSError):  # the node has ended the link
                for _ in range(chance.randrange(1, 30)):
                    sock.sendall(hostile_bytes(chance))
            said.append(1)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65_536):
                continue

    for chance in rounds(CALLED_ROUNDS):
        seeds = itertools.count(chance.getrandbits(32))

        def dial(_node: int, _timeout_ms: float, seeds: Iterator[int] = seeds) -> Call:
            ours, theirs = socket.socketpair()
            own = random.Random(next(seeds))
            threading.Thread(target=answer, args=(theirs, own), daemon=True).start()
            limits = Limits(4_096, 1 << 26, aged=True)
            return Call(ours, make_hello(purpose=Purpose.FORWARD, node=1), limits)

        two.forwarding._network = two.forwarding._network._replace(dial=dial)
        group.master(1)
        before = two.counts.forwarded
        said.clear()
        client = group.client(two)
        with contextlib.suppress(ConnectionError):  # a first outcome is unknown already
            for _ in range(5):
                client.send(PUT, one_way=chance.random() < 0.5)
        until(lambda before=before: two.counts.forwarded > before and said)  # type: ignore[misc]
        group.master(2)
        until(lambda: two.forwarding.waiting == 0)
        client.close()
        other = group.client(two)  # only now: one that is silent for 5 s is ended
        assert other.ask(PUT).fields["by"] == "2"
        other.close()
    assert two.counts.forwarded >= CALLED_ROUNDS
    assert two.forwarding._held_bytes == 0
