"""A rebuild that ends half-way, at any call: the store stays whole, and the next run completes it.

The store is a hastore node's, so that a real node can open it afterwards.
"""

import random
import shutil

import pytest

from hastore.errors import StoreFullError
from hastore.store.rebuild.layout import find_sizes, run_here
from hastore.store.rebuild.rebuild import rebuild_in_place, rebuild_to
from hastore.store.state.replay_progress import read_dispatched
from tests.store.faulty import NO_SPACE, FaultyFileSystem
from tests.store.kit import bodies, message, opened, put
from tests.store.rebuild.kit import REAL, SIZES, derived_files, how


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A node's store of a few files."""
    root = tmp_path_factory.mktemp("rebuild") / "store"
    with opened(root) as node:
        for number in range(900):
            put(node, message(number, topic=f"T{number % 3}", queue_id=number % 2))
        node.wait_dispatched(node.max_offset, 60)
        end = node.max_offset
    return root, end, derived_files(root)


def lose(store, tmp_path):
    """Copy the store without its queues and index."""
    root = tmp_path / "store"
    shutil.copytree(store[0], root)
    shutil.rmtree(root / "consumequeue")
    shutil.rmtree(root / "index")
    return root


def test_a_node_goes_on_with_rebuilt_files_without_a_replay(store, tmp_path):
    _, end, expected = store
    root = lose(store, tmp_path)
    rebuild_in_place(REAL, str(root), find_sizes(REAL, str(root)), how())
    assert derived_files(root) == expected
    assert read_dispatched(REAL, f"{root}/hastore/replay") == end
    with opened(root) as node:
        # Replay found nothing to do: a unit that it would have written again is still missing.
        assert node.dispatched_offset == end
        assert len(bodies(node, "T1", 1)) == 150
        (result,) = put(node, message(1, topic="T1", queue_id=1))
        assert result.queue_offset == 150


def test_the_sizes_are_the_nodes_own(store, tmp_path):
    root = lose(store, tmp_path)
    assert find_sizes(REAL, str(root)) == SIZES
    shutil.rmtree(root / "hastore")
    assert find_sizes(REAL, str(root)).units == 300_000


def calls_of(store, tmp_path):
    """Return how many calls a rebuild makes."""
    fs = FaultyFileSystem()
    root = lose(store, tmp_path / "count")
    rebuild_in_place(fs, str(root), SIZES, how(range_bytes=1 << 16, buckets=2))
    return len(fs.calls)


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_call(store, tmp_path, seed):
    _, end, expected = store
    print(f"seed {seed}")
    chance = random.Random(seed)
    total = calls_of(store, tmp_path)
    # The last calls are those that put the files in place.
    points = sorted({chance.randrange(total), *(total - chance.randrange(1, 40) for _ in range(4))})
    for number in points:
        print(f"killed at call {number} of {total}")
        root = lose(store, tmp_path / str(number))
        for _ in range(2):  # the second run is killed too
            kill_at(root, number)
        if chance.random() < 0.5:
            with opened(root) as node:  # a node starts in between, and builds what is missing
                assert node.wait_dispatched(end, 60)
            assert derived_files(root) == expected
        rebuild_in_place(REAL, str(root), SIZES, how(range_bytes=1 << 16, buckets=2))
        assert derived_files(root) == expected
        assert not (root / "rebuild.tmp").exists()
        with opened(root) as node:
            assert node.wait_dispatched(end, 60)
            assert len(bodies(node, "T2", 0)) == 150


def kill_at(root, number):
    fs = FaultyFileSystem()

    def hook(call, path):
        if len(fs.calls) > number:
            raise Killed

    fs.hook = hook
    with pytest.raises((Killed, AssertionError)):
        rebuild_in_place(fs, str(root), SIZES, how(range_bytes=1 << 16, buckets=2))
        raise AssertionError("the second run had fewer calls")


def test_a_rebuild_goes_on_where_it_was_stopped(store, tmp_path):
    _, _, expected = store
    root = lose(store, tmp_path)
    ran = []

    def runner(name, function, tasks):
        for task, result in run_here(name, function, tasks):
            ran.append(task)
            yield task, result
            if len(ran) == stop_after:
                raise KeyboardInterrupt

    for stop_after, done in ((3, 3), (5, 8), (0, None)):
        ran.clear()
        try:
            rebuild_in_place(REAL, str(root), SIZES, how(runner=runner, range_bytes=1 << 14))
        except KeyboardInterrupt:
            assert len(ran) == stop_after
        else:
            assert done is None
    total_ranges = -(-store[1] // (1 << 14))
    assert 0 < len(ran) < total_ranges + 6 - 8 + 5  # eight of the tasks were not run again
    assert derived_files(root) == expected


def test_a_log_that_has_changed_is_read_again(store, tmp_path):
    root = lose(store, tmp_path)

    def stopped(name, function, tasks):
        for number, pair in enumerate(run_here(name, function, tasks)):
            yield pair
            if number == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rebuild_in_place(REAL, str(root), SIZES, how(runner=stopped))
    assert (root / "rebuild.tmp").exists()
    with opened(root) as node:
        put(node, message(1, topic="T1", queue_id=1))
        node.wait_dispatched(node.max_offset, 60)
    expected = derived_files(root)
    shutil.rmtree(root / "index")
    rebuild_in_place(REAL, str(root), SIZES, how())
    assert derived_files(root) == expected


@pytest.mark.parametrize("part", ["pieces", "queues-", "index-", "plan"])
def test_no_room(store, tmp_path, part):
    root = lose(store, tmp_path)
    fs = FaultyFileSystem()
    fs.fail("write", part, NO_SPACE)
    with pytest.raises(StoreFullError, match="no room"):
        rebuild_in_place(fs, str(root), SIZES, how())
    assert sorted(path.name for path in root.iterdir() if path.name != "lock") == sorted(
        path.name
        for path in store[0].iterdir()
        if path.name not in ("consumequeue", "index", "lock")
    )
    fs.heal()
    rebuild_to(fs, str(root), str(tmp_path / "new"), SIZES, how())
    assert derived_files(tmp_path / "new") == store[2]
