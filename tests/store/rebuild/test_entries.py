"""A rebuild of a store whose log has DLedger's entries, as a node in the DLedger mode wrote it."""

import random
import shutil

import pytest

from hastore.config.model import RetentionConfig
from hastore.dledger.core.events import OwnEntry
from hastore.protocol.dledger import MemberSet
from hastore.store.rebuild.layout import Sizes
from hastore.store.rebuild.rebuild import rebuild_in_place, rebuild_to, rebuild_to_verify
from tests.dledger.store.kit import no_op, opened, put
from tests.store.kit import FILE_SIZE, bodies, message
from tests.store.rebuild.kit import REAL, derived_files, how

SIZES = Sizes(300, 100, 400)  # those of tests/store/kit.py
KINDS = ("consumequeue", "index")


def fill(store, chance):
    """Some terms: entries of the group's own, member lists, and messages with keys."""
    for term in range(1, 6):
        no_op(store, term)
        if term % 2:
            store.append_own(OwnEntry(store.end_index + 1, term, MemberSet((1, 2, 3))))
        for _ in range(chance.randrange(15, 25)):
            records = [
                message(
                    chance.randrange(1000), queue_id=chance.randrange(4),
                    topic=chance.choice(("TopicA", "TopicB")),
                    size=chance.choice((0, 90, 2000)),
                )
                for _ in range(chance.randrange(1, 12))
            ]  # fmt: skip
            put(store, term, b"".join(records))
    messages = store.messages
    assert messages.wait_dispatched(messages.max_offset, 60)
    store.flush()
    store.commit(store.end_index)


@pytest.fixture
def written(tmp_path):
    """A closed store, as its own replay left it."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    root = tmp_path / "store"
    with opened(root) as store:
        fill(store, random.Random(seed))
        assert store.messages.max_offset > 2 * FILE_SIZE
    return root


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    assert [path for path in expected if found[path] != expected[path]] == []


def test_the_files_are_those_of_replay_in_place_and_elsewhere(written, tmp_path):
    expected = derived_files(written)
    assert any(path.startswith("index/") for path in expected)
    entries = sorted(path.name for path in (written / "dledger-n1" / "index").iterdir())
    _, difference = rebuild_to_verify(REAL, str(written), str(tmp_path / "work"), SIZES, how())
    assert difference is None
    rebuild_to(REAL, str(written), str(tmp_path / "new"), SIZES, how())
    assert_same(derived_files(tmp_path / "new"), expected)
    for kind in KINDS:
        shutil.rmtree(written / kind)
    rebuild_in_place(REAL, str(written), SIZES, how())
    assert_same(derived_files(written), expected)
    assert sorted(path.name for path in (written / "dledger-n1" / "index").iterdir()) == entries
    with opened(written) as store:
        found = bodies(store.messages)
        assert found and store.messages.problems == []
        (offset,) = put(store, 6, message(5000))
        assert bodies(store.messages) == [*found, store.messages.reader.record_at(offset).body]


def test_what_retention_has_left_is_rebuilt(written, tmp_path):
    small = RetentionConfig(max_size_bytes=2 * FILE_SIZE)
    with opened(written, retention=small) as store:
        assert store.messages.retention.delete_expired(None)
        found, begin = bodies(store.messages), store.begin_index
    shutil.rmtree(written / "consumequeue")
    rebuild_in_place(REAL, str(written), SIZES, how())
    _, difference = rebuild_to_verify(REAL, str(written), str(tmp_path / "work"), SIZES, how())
    assert difference is None
    with opened(written) as store:
        assert bodies(store.messages) == found and store.begin_index == begin > 0


def test_a_store_in_use_is_read_up_to_what_is_committed(tmp_path):
    with opened(tmp_path / "store") as store:
        put(store, 1, *(message(number) for number in range(50)))
        store.commit(29)
        assert store.messages.wait_dispatched(store.messages.max_offset, 60)
        store.flush()
        built = rebuild_to(REAL, str(tmp_path / "store"), str(tmp_path / "new"), SIZES, how())
        assert (built.records, built.end_offset) == (30, store.end_position(29))
        _, difference = rebuild_to_verify(
            REAL, str(tmp_path / "store"), str(tmp_path / "work"), SIZES, how()
        )
        assert difference is None
