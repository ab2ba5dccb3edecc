"""Term, vote and checkpoint on the disk: lost, emptied, damaged; and what is then remembered."""

import pytest

from hastore.dledger.core.events import HardState
from hastore.errors import StoreBrokenError
from tests.dledger.store.kit import make, opened, put
from tests.store.kit import message


@pytest.fixture
def root(tmp_path):
    """The root of a closed store with a vote for node 2 in term 5, and 10 committed entries."""
    with opened(tmp_path / "s") as store:
        store.save_hard_state(HardState(5, 2), remembers=True)
        put(store, 4, *(message(number) for number in range(10)))
        store.commit(9)
    return tmp_path / "s"


@pytest.mark.parametrize("left", [None, b"", bytes(30)], ids=["lost", "emptied", "zeros"])
def test_without_its_vote_a_node_knows_that_it_has_forgotten(root, left):
    path = root / "dledger-n1" / "currterm"
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    with opened(root) as store:
        assert (store.hard_state, store.remembers) == (HardState(4, None, False), False)
        assert store.end_index == store.committed_index == 9
        store.save_hard_state(HardState(6, 3))
    with opened(root) as store:  # a new vote does not bring the old one back
        assert store.hard_state == HardState(6, 3, False) and not store.remembers


@pytest.mark.parametrize("left", [None, b"", bytes(30), b"committedIndex=3\nendIndex=3\n"])
def test_without_its_checkpoint_a_node_knows_what_is_committed(root, left):
    path = root / "dledger-n1" / "checkpoint"
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    with opened(root) as store:
        assert store.committed_index == 9 and store.hard_state == HardState(5, 2, True)


@pytest.mark.parametrize("name", ["currterm", "checkpoint"])
@pytest.mark.parametrize(
    "content", [b"garbage", b"\xff\xfe=1\n", b"currTerm=x\ncommittedIndex=x\n"]
)
def test_garbage_is_refused_and_the_remedy_works(root, name, content):
    path = root / "dledger-n1" / name
    path.write_bytes(content)
    with pytest.raises(StoreBrokenError, match=rf"{name} is damaged .*: remove it; the node then"):
        make(root).open()
    assert path.read_bytes() == content
    path.unlink()
    with opened(root) as store:
        assert store.committed_index == 9 and store.remembers is (name == "checkpoint")


@pytest.mark.parametrize("content", [b"{", b'{"version": 1, "remembers": 3}'])
def test_damaged_memory_is_refused_and_the_remedy_works(root, content):
    path = root / "hastore" / "votes.json"
    path.write_bytes(content)
    with pytest.raises(StoreBrokenError, match="votes.json is damaged") as refused:
        make(root).open()
    path.write_text(str(refused.value).partition(" write ")[2].partition(" there;")[0])
    with opened(root) as store:
        assert not store.remembers and store.hard_state == HardState(5, 2, False)


def test_a_node_on_an_empty_disk_does_not_remember_after_a_restart_either(tmp_path):
    for _ in range(3):
        with opened(tmp_path) as store:
            assert not store.remembers
            store.save_hard_state(store.hard_state, remembers=False)
    with opened(tmp_path) as store:
        store.save_hard_state(HardState(3, None), remembers=True)
    with opened(tmp_path) as store:
        assert store.hard_state == HardState(3, None, True)
