"""The files that hastore derives from RocketMQ's logs equal RocketMQ's own, byte for byte."""

from pathlib import Path

import pytest

from tests.store.derived_files import Derived, rebuilt
from tests.store.logs import GOLDEN, MemoryLog

ENDS = {"three-files": 167944, "variants": 18770}


def golden_files(name: str) -> dict[str, bytes]:
    store = GOLDEN / name
    return Derived(store, None, None, None).files()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(ENDS))
def test_queues_and_index_are_identical(name: str, tmp_path: Path) -> None:
    log = MemoryLog.of(GOLDEN / name, ENDS[name])
    expected = golden_files(name)
    assert len(expected) >= 6
    files = rebuilt(tmp_path, log)
    assert files.keys() == expected.keys()
    assert [path for path in expected if files[path] != expected[path]] == []


@pytest.mark.parametrize("name", sorted(ENDS))
def test_identical_whatever_the_steps(name: str, tmp_path: Path) -> None:
    """The log grows by a few bytes at a time, as on a slave, with restarts in between."""
    log = MemoryLog.of(GOLDEN / name, 0)
    derived = Derived.over(tmp_path, log)
    step = 37 if name == "variants" else 1999
    for number, end in enumerate([*range(0, ENDS[name], step), ENDS[name]]):
        log.max_offset = end
        assert derived.build.replay() <= end
        if number % 20 == 7:
            derived.build.close()
            derived = Derived.over(tmp_path, log)
    assert derived.build.dispatched_offset == ENDS[name]
    assert derived.files() == golden_files(name)
    derived.build.close()
