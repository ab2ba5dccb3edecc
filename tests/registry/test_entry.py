"""The pure parts: addresses of ZooKeeper, objects of nodes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hastore.addresses import parse_group_address, parse_servers
from hastore.config.model import Role
from hastore.errors import RegistryError, UsageError
from hastore.registry.entry import NodeEntry, Once, foreign_problem, parse_entry, siblings_of

PLAIN = {"role": "SLAVE", "api": "tcp://h:1", "ha": "h:2", "http": "h:3"}


def entry(**changes):
    return NodeEntry(**{**PLAIN, "role": Role.SLAVE, **changes})


def test_an_object_of_an_operator_and_one_of_a_node():
    assert parse_entry(json.dumps(PLAIN).encode(), "/p") == entry()
    once = Once(id="i", command="promote", epoch=1, wall_ms=2, force_unclean=True)
    whole = entry(cluster="c", group="g", node=1, store="s", once=once)
    assert parse_entry(whole.encode(), "/p") == whole
    assert json.loads(entry().encode()) == PLAIN  # nothing but what is known


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_one_line(data):
    try:
        parse_entry(data, "/p")
    except RegistryError as wrong:
        assert str(wrong).startswith("/p") and "\n" not in str(wrong)


@given(
    st.dictionaries(
        st.sampled_from([*PLAIN, "cluster", "node", "once", "x"]),
        st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.sampled_from(Role)),
    )
)
def test_any_object_is_valid_or_one_line(changes):
    data = json.dumps({**PLAIN, **changes}, default=lambda role: role.value).encode()
    try:
        found = parse_entry(data, "/p")
    except RegistryError as wrong:
        assert str(wrong).startswith("/p") and "\n" not in str(wrong)
    else:
        assert isinstance(found.role, Role)


def test_whose_object_it_is():
    own = entry(cluster="c", group="g", node=1, store="s")
    assert foreign_problem(own, "/p", own) is None
    assert foreign_problem(entry(), "/p", own) is None
    moved = entry(cluster="c", group="g", node=1, store="s", api="tcp://old:1")
    assert foreign_problem(moved, "/p", own) is None  # the node itself has another address now
    assert "a copy of this one" in foreign_problem(moved, "/p", own, may_move=False)
    for other in (
        entry(cluster="d"), entry(group="h"), entry(node=2), entry(store="t"), entry(ha="x:9")
    ):  # fmt: skip
        assert foreign_problem(other, "/p", own) is not None
    # With another number two groups of one name would be one to clients: a put goes to either.
    assert "give one group another name" in foreign_problem(entry(store="t"), "/p", own)
    assert siblings_of({1: own, 2: own, 3: entry(ha="z:1")}, "c", "g") == {
        1: own.address, 3: entry(ha="z:1").address
    }  # fmt: skip


def test_addresses():
    assert parse_servers("zk://a:1,b:2,a:1") == "a:1,b:2"
    assert parse_servers("zk://[::1]:2181") == "[::1]:2181"
    group = parse_group_address(" zk://a:1,b:2/c/g ")
    assert (group.servers, group.path, str(group)) == (
        "a:1,b:2",
        "/hastore/c/g",
        "zk://a:1,b:2/c/g",
    )
    for wrong in ("a:1", "zk://", "zk://a", "zk://a:99999", "zk://a:x", "zk://a:1,", "zk://a:1/c",
                  "zk://1.2.3.999:1",
                  "zk://" + ",".join(f"h{n}:1" for n in range(20))):  # fmt: skip
        with pytest.raises(UsageError, match="zk://HOST:PORT"):
            parse_servers(wrong)
