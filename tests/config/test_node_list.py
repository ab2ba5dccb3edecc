"""One node more or less in `nodes`; all other bytes of the file stay."""

import pytest

from hastore.config.file import parse_names
from hastore.config.model import NodeAddress
from hastore.config.node_list import with_node, without_node

NEW = NodeAddress(api="tcp://h:31", ha="h:32", http="h:33")
HEAD = "cluster: c  # ours\ngroup: g\nnode: 1\nrole: SYNC_MASTER\n"
TAIL = "store:\n  root: data  # here\n"


def one(n):
    return f'{{api: "tcp://h:{n}1", ha: "h:{n}2", http: "h:{n}3"}}'


FORMS = {
    "lines": f"nodes:\n  1: {one(1)}\n  2: {one(2)}  # the second\n",
    "indented": f"nodes:\n      1: {one(1)}\n      # below\n      2: {one(2)}\n\n",
    "flow": f"nodes: {{1: {one(1)}, 2: {one(2)}}}  # both\n",
    "blocks": "nodes:\n"
    + "".join(
        f"  {n}:\n    api: tcp://h:{n}1\n    ha: h:{n}2  # ha\n    http: h:{n}3\n\n" for n in (1, 2)
    ),
    "spread": f"nodes: {{\n  1: {one(1)},\n  2: {one(2)},\n}}\n",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_node_comes_and_goes(form, place):
    parts = (HEAD, FORMS[form], TAIL) if place == "middle" else (HEAD, TAIL, FORMS[form].rstrip())
    text = "".join(parts)
    before = parse_names(text, "f")
    more = with_node(text, 3, NEW)
    config = parse_names(more, "f")
    assert config.nodes == {**before.nodes, 3: NEW}
    assert HEAD in more and TAIL in more
    assert [line for line in text.splitlines() if "#" in line and "nodes: {" not in line] == [
        line for line in more.splitlines() if "#" in line and "nodes: {" not in line
    ]
    back = without_node(more, 3)
    assert parse_names(back, "f").nodes == before.nodes
    assert back.rstrip("\n") == text.rstrip("\n")
    for gone in (1, 2):
        if gone == before.node:
            continue
        less = without_node(more, gone)
        assert set(parse_names(less, "f").nodes) == {1, 2, 3} - {gone}
        assert HEAD in less and TAIL in less


def test_a_node_that_is_not_there():
    with pytest.raises(KeyError):
        without_node(HEAD + FORMS["lines"] + TAIL, 7)
