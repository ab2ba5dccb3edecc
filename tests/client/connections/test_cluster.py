"""Who is followed: the greatest epoch, never back."""

import pytest

from hastore.client.connections.bootstrap import is_connectable, parse_bootstrap
from hastore.client.connections.cluster import MAX_ADDRESSES, ClusterView
from hastore.client.connections.transport import Arrival, NoAnswer, Quiet
from hastore.errors import UsageError
from hastore.protocol.api import MapInfo

A, B, C = "tcp://h:1", "tcp://h:2", "tcp://h:3"


def info(node: int, epoch: int, writable: bool, **more: object) -> MapInfo:
    role = "SYNC_MASTER" if writable else "SLAVE"
    return MapInfo(node, role, epoch, writable, **more)  # type: ignore[arg-type]


def test_the_greatest_epoch_is_followed_never_back() -> None:
    view = ClusterView([A, B])
    assert view.learn(A, info(1, 10, True))
    assert not view.learn(A, info(1, 10, True))
    assert view.learn(B, info(2, 20, True))
    assert view.master == B
    assert not view.learn(A, info(1, 10, True))
    assert view.master == B and view.epoch == 20
    view.lose()
    assert not view.learn(A, info(1, 10, True))
    assert view.master is None
    assert view.learn(B, info(2, 20, True))


def test_a_new_epoch_of_the_same_master_is_a_move() -> None:
    view = ClusterView([A])
    view.learn(A, info(1, 10, True))
    assert view.learn(A, info(1, 20, True))


def test_a_master_of_several_addresses_is_followed_by_the_first_while_it_is_connected() -> None:
    """As one that is given as localhost, and states 127.0.0.1: A and B are node 1."""
    view = ClusterView([A], of_group=("c", "g"))
    mine: dict[str, object] = {"cluster": "c", "group": "g", "nodes": {1: B, 2: C}}
    assert view.learn(A, info(1, 10, True, **mine))
    assert [view.learn(each, info(1, 10, True, **mine)) for each in (B, A, B)] == [False] * 3
    assert view.master == A
    assert view.lose_connection(Arrival(A, None, up=False)) and view.master is None
    assert view.learn(B, info(1, 10, True, **mine)) and view.master == B
    assert not view.learn(A, info(1, 10, True, **mine)) and view.master == B
    view.lose()  # it has refused
    assert view.learn(A, info(1, 10, True, **mine))
    assert view.learn(C, info(2, 20, True, **mine)) and view.master == C  # a failover
    assert not view.learn(B, info(1, 10, True, **mine)) and view.master == C
    assert view.learn(B, info(1, 30, True, **mine)) and view.master == B  # and back
    assert not view.learn(A, info(1, 30, True, **mine)) and view.master == B


def test_a_master_that_says_it_is_none_is_lost() -> None:
    view = ClusterView([A, B])
    view.learn(A, info(1, 10, True))
    assert not view.learn(A, info(1, 10, False, reason="fenced"))
    assert view.master is None
    assert "fenced" in view.reason()


def test_a_master_of_an_earlier_epoch_is_no_node_that_does_not_answer() -> None:
    """As of a group whose stores were emptied, and which was begun anew under the old name."""
    view = ClusterView([A])
    view.learn(A, info(1, 10, True))
    view.lose()
    assert not view.learn(A, info(1, 1, True)) and view.master is None
    assert view.reason() == (
        f"{A}: SYNC_MASTER of epoch 1, and this client has seen epoch 10: if the group was begun "
        "anew, start the client again"
    )


def test_addresses_that_nodes_name_are_remembered_within_bounds() -> None:
    view = ClusterView([A])
    view.learn(A, info(1, 10, True, nodes={1: A, 2: B, 3: "tcp://h:0", 4: "nonsense"}))
    assert view.addresses == [A, B]
    view.learn(B, info(2, 10, False, nodes={n: f"tcp://x:{n}" for n in range(1, 200)}))
    assert len(view.addresses) == MAX_ADDRESSES


def test_a_node_of_another_group_is_not_used() -> None:
    view = ClusterView([A, B])
    assert view.learn(A, info(1, 10, True, cluster="c", group="g"))
    assert not view.learn(B, info(1, 99, True, cluster="c", group="h", nodes={1: C}))
    assert (view.master, view.epoch, view.addresses) == (A, 10, [A, B]) and B not in view.maps
    assert view.refused is None
    # The address of the master is given to another group.
    assert not view.learn(A, info(1, 11, True, cluster="d", group="g"))
    assert view.master is None and view.maps == {}
    assert "node 1 of cluster d, group g, and this client uses cluster c, group g" in view.refused
    assert view.learn(A, info(1, 12, True))  # of an older version: it names none
    assert view.refused is None
    everybody = ClusterView([A, B], any_group=True)
    for address, group in ((A, "g"), (B, "h")):
        everybody.learn(address, info(1, 10, False, cluster="c", group=group))
    assert list(everybody.maps) == [A, B]


def test_the_first_answer_does_not_choose_the_group_of_a_client_that_was_given_one() -> None:
    """As that of a node which has the address that a former node has left in ZooKeeper."""
    view = ClusterView([A, B], of_group=("c", "g"))
    assert not view.learn(B, info(1, 99, True, cluster="c", group="h", nodes={1: C}))
    assert (view.master, view.maps, view.addresses) == (None, {}, [A, B])
    assert view.silence("within 1 s").startswith(f"no answer from {A} within 1 s; {B}: it is node")
    assert view.reason().startswith(f"no answer from {A}; {B}: it is node 1 of")
    assert view.learn(A, info(1, 10, True, cluster="c", group="g")) and view.master == A


def test_the_error_says_of_each_silent_address_why() -> None:
    """A name that does not exist looked like a node that is down."""
    whys = {A: NoAnswer(Quiet.UNREACHABLE, "Name or service not known"), B: None}
    view = ClusterView([A, B], why_silent=whys.__getitem__)
    said = f"({A}: Name or service not known)"
    assert view.silence("within 1 s") == f"no answer from {A}, {B} within 1 s {said}"
    assert view.reason() == f"no answer from {A}, {B} {said}"


def test_a_node_of_another_group_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """The first answer decides which group it is: a stale address may be the one that is right."""
    view = ClusterView([A, B])
    view.learn(A, info(1, 10, True, cluster="c", group="g"))
    for epoch in (10, 11):
        view.learn(B, info(1, epoch, True, cluster="c", group="h"))
    assert view.master == A and view.refused is None
    (said,) = caplog.messages
    assert said.startswith(f"client: {B} is not used: it is node 1 of cluster c, group h")
    assert "correct the addresses" in said


def test_slaves_are_read_first() -> None:
    view = ClusterView([A, B, C])
    view.learn(A, info(1, 10, True))
    view.learn(B, info(2, 10, False))
    assert view.replicas() == [B, A, C]


def test_bootstrap_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_bootstrap("h:1, tcp://h:2") == (A, B)
    assert parse_bootstrap([A, A, B]) == (A, B)
    assert parse_bootstrap(["h:1,h:2", "h:2"]) == (A, B), "a variable of the environment in a list"
    assert parse_bootstrap("[::1]:5") == ("tcp://[::1]:5",)
    monkeypatch.setenv("HASTORE_BOOTSTRAP", "h:3")
    assert parse_bootstrap(None) == (C,)
    monkeypatch.setenv("HASTORE_BOOTSTRAP", "nowhere")
    with pytest.raises(UsageError, match="^HASTORE_BOOTSTRAP: expected tcp://HOST:PORT"):
        parse_bootstrap(None)
    monkeypatch.delenv("HASTORE_BOOTSTRAP")
    assert len(parse_bootstrap(None)) == 2
    assert is_connectable(A) and not is_connectable("tcp://h:0") and not is_connectable("h:1")


@pytest.mark.parametrize(
    "bad",
    ["", [], ",", "h", "h:port", "http://h:1", "tcp://:5", "h:70000", "h:1:2", "h/1:2"],
)
def test_addresses_that_are_none(bad: str) -> None:
    with pytest.raises(UsageError):
        parse_bootstrap(bad)


def test_nodes_that_refuse_for_the_same_reason_are_named_together() -> None:
    view = ClusterView(["tcp://a:1", "tcp://b:2", "tcp://c:3"])
    for address, why in (("tcp://a:1", "who"), ("tcp://b:2", "expired"), ("tcp://c:3", "who")):
        assert view.refused is None
        assert not view.lose_connection(Arrival(address, None, up=False, refused=why))
    assert view.refused == "tcp://a:1, tcp://c:3: who; tcp://b:2: expired"


def test_the_end_of_a_connection() -> None:
    view = ClusterView([A, B])
    view.learn(A, info(1, 10, True))
    view.learn(B, info(2, 10, False))
    assert not view.lose_connection(Arrival(B, None, up=False, refused="who"))
    assert (view.master, list(view.maps), view.refusals) == (A, [A], {B: "who"})
    assert view.lose_connection(Arrival(A, None, up=False))
    assert (view.master, view.maps, view.addresses) == (None, {}, [A, B])
    view.lose_connection(Arrival(B, None, up=False, gone=True))
    assert (view.addresses, view.refusals) == ([A], {})


def test_why_no_master_is_known_can_be_asked_while_the_connections_change() -> None:
    """By a thread that gives up to wait for a master; the producer's own goes on meanwhile."""
    view = ClusterView([A, B])

    class Changing(str):
        def __format__(self, _spec: str) -> str:
            view.learn(C, info(3, 10, False))
            view.lose_connection(Arrival(f"{C}0", None, up=False, refused="no identity"))
            return str(self)

    view.learn(A, info(1, 10, False, reason=Changing("fenced")))
    assert "fenced" in view.reason()
    view = ClusterView([A, B])
    for address in (A, B):
        view.refusals[Changing(address)] = Changing("no identity")
    assert "no identity" in view.refusal_text
