"""What a node knows of its own past and of its group: lost state files, other stores and groups."""

import pathlib
import shutil

import pytest

from hastore.errors import StoreBrokenError
from tests.dledger.driver.groups import running_group
from tests.ha.nodes import wait_for

HASTORE_FILES = ("limits", "votes.json", "node.json", "entries.json")


@pytest.fixture
def group(tmp_path):
    with running_group(tmp_path) as made:
        yield made
        assert [node.failures for node in made.nodes.values()] == [[] for _ in made.nodes]


def state_file(node, name):
    if name in HASTORE_FILES:
        return pathlib.Path(node.config.store.root) / "hastore" / name
    return pathlib.Path(node.store.messages.directory) / name


def one_behind(group):
    """Acknowledge 20 messages on two nodes, then kill all three; return (leader, both others).

    The first of the others has the messages, the second does not.
    """
    leader = group.leader()
    leader.put_confirmed(b"first")
    group.settled()
    has, lacks = [node for node in group.running if node is not leader]
    lacks.kill()
    for number in range(20):
        assert leader.put_confirmed(b"kept %d" % number) == ("PUT_OK", "QUORUM_DISK")
    end = leader.store.end_index
    wait_for(lambda: has.store.committed_index == end, "the commit")
    has.store._save_checkpoint()
    leader.kill()
    has.kill()
    return leader, has, lacks


def cut_log(node, pos, *, rest=False):
    """Spoil the entry at `pos`; with `rest` nothing is left from there on."""
    path = pathlib.Path(node.store.messages.directory) / "data" / f"{0:020}"
    raw = bytearray(path.read_bytes())
    raw[pos:] = bytes(len(raw) - pos) if rest else b"rot" + raw[pos + 3 :]
    path.write_bytes(raw)


def lose_limits(node, how):
    """Lose the limits page; return whether the next start must be told to go on without it."""
    path = state_file(node, "limits")
    if how == "removed":
        path.unlink()
    else:
        path.write_bytes(bytes(4096) if how == "zeros" else b"rot!" * 1024)
    return how == "damaged"


@pytest.mark.parametrize(
    ("how", "checkpoint", "rest"),
    [
        ("damaged", False, False), ("damaged", True, True), ("removed", False, True),
        ("zeros", False, True),
    ],
)  # fmt: skip
def test_without_its_limits_page_a_node_never_votes_with_a_log_that_was_cut(
    group, how, checkpoint, rest
):
    leader, has, lacks = one_behind(group)
    middle = has.store.position(has.store.end_index - 10)
    cut_log(has, middle, rest=rest)
    asks = lose_limits(has, how)
    directory = pathlib.Path(has.store.messages.directory)
    if not checkpoint:
        (directory / "checkpoint").unlink()
        shutil.rmtree(directory / "index")
        state_file(has, "entries.json").unlink(missing_ok=True)
    if asks:
        with pytest.raises(StoreBrokenError, match="limits is damaged: remove it"):
            group.start(has.number)
        state_file(has, "limits").unlink()
    if checkpoint or not rest:  # it is known what is missing
        before = (directory / "data" / f"{0:020}").read_bytes()
        with pytest.raises(StoreBrokenError, match="nothing was cut"):
            group.start(has.number)
        assert (directory / "data" / f"{0:020}").read_bytes() == before
        shutil.move(has.config.store.root, f"{has.config.store.root}.away")
    group.start(lacks.number)
    (again,) = group.start(has.number)
    wait_for(lambda: again.driver.core is not None or again.driver.waits)
    wait_for(lambda: group.nodes[lacks.number].driver.core is not None)
    assert not again.store.remembers
    group.start(leader.number)
    group.put(b"after")
    wait_for(lambda: again.driver.core and again.driver.core.remembers, "the leader fills the disk")
    logs = {node.log() for node in group.settled()}
    assert len(logs) == 1
    log = logs.pop()
    assert all(b"kept %d" % number in log for number in range(20))


def others_elect(group, *numbers):
    """Start these nodes; wait until they have asked each other for votes, twice."""
    nodes = group.start(*numbers)
    wait_for(lambda: all(node.driver.core is not None for node in nodes), "the cores")
    wait_for(lambda: all(len(node.driver.links.linked) == 1 for node in nodes), "the link")
    return nodes


@pytest.mark.parametrize("name", ["currterm", "votes.json", "entries.json", "checkpoint"])
def test_the_advice_about_a_damaged_state_file_is_safe_to_follow(group, name):
    leader, has, lacks = one_behind(group)
    state_file(has, name).write_bytes(b"{rot")
    with pytest.raises(StoreBrokenError, match=rf"{name} is damaged") as refused:
        group.start(has.number)
    if "write" in (advice := str(refused.value)):
        content = advice.partition(" write ")[2].partition(" there;")[0]
        state_file(has, name).write_text(content)
    else:
        assert "remove it" in advice
        state_file(has, name).unlink()
    again, _ = others_elect(group, has.number, lacks.number)
    assert again.store.remembers is (name == "checkpoint")
    if again.store.remembers:
        assert group.put(b"without the third") is again
    group.start(leader.number)
    group.put(b"after")
    logs = {node.log() for node in group.settled()}
    assert len(logs) == 1
    log = logs.pop()
    assert all(b"kept %d" % number in log for number in range(20))
    wait_for(lambda: again.driver.core.remembers, "the leader brings the node in line")


@pytest.mark.parametrize("name", ["votes.json", "entries.json", "currterm"])
def test_a_node_whose_state_file_is_gone_knows_that_it_has_forgotten(group, name):
    leader, has, lacks = one_behind(group)
    state_file(has, name).unlink()
    again, _ = others_elect(group, has.number, lacks.number)
    assert not again.driver.core.remembers
    again.kill()
    (again,) = group.start(has.number)  # a restart does not make it remember
    wait_for(lambda: again.driver.core is not None)
    assert not again.driver.core.remembers


def test_a_node_without_its_identity_is_refused_and_an_empty_store_is_the_way(group):
    leader, has, _ = one_behind(group)
    state_file(has, "node.json").unlink()
    with pytest.raises(StoreBrokenError, match=r"node.json is missing.*move the store away"):
        group.start(has.number)
    shutil.move(has.config.store.root, f"{has.config.store.root}.away")
    group.start(*(node.number for node in group.nodes.values() if not node.running))
    group.put(b"after")
    assert b"kept 19" in group.settled()[0].log()


def test_an_older_currterm_is_found_out(tmp_path):
    with running_group(tmp_path) as group:
        leader = group.leader()
        path = state_file(leader, "currterm")
        older = path.read_bytes()
        term = leader.driver.term
        leader.kill()
        group.put(b"in a later term")
        group.start(leader.number)
        group.settled()
        assert leader.number in group.nodes and group.leader().driver.term > term
        node = group.nodes[leader.number]
        wait_for(lambda: node.store.end_term > term, "an entry of the later term")
        node.kill()
        path.write_bytes(older)
        (again,) = group.start(node.number)
        assert not again.store.remembers
        wait_for(lambda: again.driver.core and again.driver.core.remembers, "the leader's recall")
