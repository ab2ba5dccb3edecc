"""The durable state of a node: synced at each step, refused when it is another node's."""

import json

import msgspec
import pytest

from hastore.config.model import Role
from hastore.errors import StoreBrokenError
from hastore.fs.filesystem import REAL
from hastore.ha.node.node_state import CutIntent, NodeState
from hastore.ha.rules.epochs import EpochEntry
from tests.ha.simulation import MemoryFiles

E1, E2, E3 = 1 << 16 | 1, 2 << 16 | 2, 3 << 16 | 3


def entry(epoch, start, acks=1, nodes=(1, 2, 3)):
    return EpochEntry(epoch, start, acks, nodes)


@pytest.fixture
def files():
    return MemoryFiles(lambda: None)


def load(files, node=1):
    state = NodeState(files, "/n")
    state.load(node, "c", "g")
    return state


def boot(files, ack_point="written", *, alone=False, end=1000, power=False):
    if power:
        files.boot += 1
    state = load(files)
    state.begin_boot(ack_point, alone=alone, log_end=end)
    return state


def test_every_field_comes_back_from_the_disk(tmp_path):
    state = NodeState(REAL, str(tmp_path))
    state.load(7, "c", "g")
    state.begin_boot("flushed", alone=False, log_end=0)
    state.save(
        role_followed=Role.SYNC_MASTER, promised_epoch=E3, history=(entry(E1, 0), entry(E2, 9)),
        acks_min=1, acks_max=2, node_lists=((1, 2, 3), (1, 2)), unclean=True, epoch_over=True,
        superseded_by=E3, intent=CutIntent(5, 1), known_stores={2: "x", 65535: "y"}, aside=4,
    )  # fmt: skip
    again = NodeState(REAL, str(tmp_path))
    again.load(7, "c", "g")
    assert again.data == state.data
    assert again.data.known_stores == {2: "x", 65535: "y"}
    assert again.last_epoch == E2 and again.history == state.history
    assert list((tmp_path / "hastore").iterdir()) == [tmp_path / "hastore" / "node.json"]


def test_a_new_node_has_an_identity_of_its_own(files):
    one, other = load(files), load(MemoryFiles(lambda: None))
    assert one.data.store_id != other.data.store_id and len(one.data.store_id) == 32
    boot(files)
    assert load(files).data.store_id == load(files).data.store_id


@pytest.mark.parametrize("mine", [(2, "c", "g"), (1, "x", "g"), (1, "c", "x")])
def test_another_nodes_store_is_refused(files, mine):
    boot(files)
    with pytest.raises(StoreBrokenError, match="belongs to"):
        NodeState(files, "/n").load(*mine)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"node": 1}', b"\xff", b'{"node": "1", "store_id": 5}']
)
def test_an_invalid_state_is_refused_with_a_remedy(files, content):
    files.files["/n/hastore/node.json"] = content
    with pytest.raises(StoreBrokenError, match="new `node` number"):
        load(files)


def test_a_promise_is_on_the_disk_when_it_returns_and_never_falls(files):
    state = boot(files)
    state.promise(E2, 1, (1, 2, 3))
    assert load(files).data.promised_epoch == E2
    state.promise(E1)
    assert load(files).data.promised_epoch == E2


def test_the_bounds_of_acks_widen_with_promises_and_end_with_the_promised_entry(files):
    state = boot(files)

    def bounds():
        data = load(files).data
        return data.acks_min, data.acks_max, data.node_lists

    assert bounds() == (None, None, ())
    state.promise(E1, 2, (3, 1, 2))
    assert bounds() == (2, 2, ((1, 2, 3),))
    state.promise(E2, 1, (1, 2))
    assert bounds() == (1, 2, ((1, 2, 3), (1, 2)))
    state.promise(E2, 1, (2, 1))
    assert bounds() == (1, 2, ((1, 2, 3), (1, 2)))
    state.take_entries([entry(E1, 0, 2)])  # older than the promise, which may still be in force
    assert bounds() == (1, 2, ((1, 2, 3), (1, 2)))
    state.take_entries([entry(E2, 5, 1, (1, 2))])
    assert bounds() == (1, 1, ((1, 2),))
    state.promise(E3)  # seen in a HELLO: its `acks` and nodes are unknown
    assert bounds() == (1, 1, ((1, 2),))
    assert state.history == (entry(E1, 0, 2), entry(E2, 5, 1, (1, 2)))


def test_opening_an_epoch_drops_the_marks_in_one_step(files):
    state = boot(files)
    state.promise(E1, 2, (1, 2, 3))
    state.save(unclean=True, epoch_over=True, superseded_by=E2)
    state.open_epoch((*state.history, entry(E1, 70, 1)))
    data = load(files).data
    assert data.history == (entry(E1, 70, 1),)
    assert (data.unclean, data.epoch_over, data.superseded_by) == (False, False, 0)
    assert (data.acks_min, data.acks_max, data.node_lists) == (1, 1, ((1, 2, 3),))


def test_a_master_that_loses_the_end_again_knows_the_lower_one(files):
    state = boot(files)
    state.open_epoch((entry(E1, 0),))
    state.note_resumed((2, 3), 700, 0)
    state.note_met(3)
    state.note_resumed((2, 3), 800, 0)
    assert load(files).data.unmet == {2: 700, 3: 800}
    state.note_resumed((2, 3), 650, 0)
    assert load(files).data.unmet == {2: 650, 3: 650}


def test_a_resumption_is_in_the_history_for_the_time_after_the_epoch(files):
    state = boot(files)
    state.open_epoch((msgspec.structs.replace(entry(E1, 0), resumed=()),))
    state.note_resumed((2, 3), 700, 9_000)
    again = load(files)
    assert again.history[-1].resumed == ((9, 700),)
    again.note_resumed((2, 3), 800, 20_000)  # nobody has followed meanwhile
    assert again.history[-1].resumed == ((9, 700),)
    again.note_met(3)
    again.note_resumed((2, 3), 900, 30_000)
    assert load(files).history[-1].resumed == ((9, 700), (30, 900))
    again.open_epoch((*again.history, entry(E2, 950)))
    data = load(files).data
    assert data.history[0].resumed == ((9, 700), (30, 900)) and not data.unmet


def test_a_resynced_history_brings_the_acks_of_its_last_entry(files):
    state = boot(files)
    state.promise(E3, 1, (1, 2, 3))
    state.replace_history((entry(E1, 0, 1), entry(E2, 5, 2, (1, 2))))
    data = load(files).data
    assert (data.acks_min, data.acks_max) == (1, 2) and (1, 2) in data.node_lists
    assert data.promised_epoch == E3


@pytest.mark.parametrize(
    ("ack_point", "power", "clean", "alone", "unclean", "over"),
    [
        ("written", True, False, False, True, True),
        ("written", True, True, False, False, False),  # a clean stop loses nothing
        ("written", False, False, False, False, False),  # kill -9 keeps the page cache
        ("flushed", True, False, False, False, True),
        ("written", True, False, True, False, True),  # a group of one is never unclean
    ],
)
def test_a_start_detects_a_power_loss(files, ack_point, power, clean, alone, unclean, over):
    state = boot(files, ack_point)
    if clean:
        state.end_cleanly()
    data = boot(files, ack_point, alone=alone, power=power).data
    assert (data.unclean, data.epoch_over) == (unclean, over)


def test_marks_survive_a_second_restart_in_the_same_boot(files):
    boot(files)
    boot(files, power=True)
    data = boot(files).data
    assert data.unclean and data.epoch_over
    state = load(files)
    state.end_cleanly()
    assert boot(files).data.unclean


def test_the_ack_point_in_force_before_the_loss_counts(files):
    boot(files, "written")
    assert boot(files, "flushed", power=True).data.unclean
    files = MemoryFiles(lambda: None)
    boot(files, "flushed")
    assert not boot(files, "written", power=True).data.unclean


def test_entries_beyond_the_logs_end_go(files):
    state = boot(files)
    state.save(history=(entry(E1, 0), entry(E2, 100), entry(E3, 200)))
    assert boot(files, end=100).history == (entry(E1, 0), entry(E2, 100))
    assert load(files).history == (entry(E1, 0), entry(E2, 100))


def test_a_store_is_known_by_its_number(files):
    state = boot(files)
    state.learn_store(2, "abc")
    assert load(files).data.known_stores == {2: "abc"}


def test_the_file_is_for_people_too(files):
    boot(files)
    text = files.files["/n/hastore/node.json"]
    assert text.endswith(b"}\n") and json.loads(text)["node"] == 1
