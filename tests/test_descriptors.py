"""The parts of a node share its descriptors: together they leave some for its ports."""

import resource
from pathlib import Path

import pytest

from hastore.fs.filesystem import REAL
from hastore.shares import descriptor_shares
from hastore.store.derived.unit_files import FileCache

_OWN = 20  # of a node that nobody uses
_PORTS = 24  # connections of the `ha` and `http` port, and files that are opened for a moment


def set_limit(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))


@pytest.mark.parametrize("limit", [256, 512, 1_024, 2_048, 4_096, 20_000, 65_536, 1_048_576])
def test_all_shares_together_leave_descriptors(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """With 1,024, half for queues, 448 clients and 64 log files left none: no slave got in."""
    set_limit(monkeypatch, limit)
    shares = descriptor_shares()
    assert shares.connections is not None
    taken = shares.connections + shares.queue_files + 2 * shares.log_files
    assert taken + _OWN + _PORTS <= limit


@pytest.mark.parametrize("limit", [1, 64, 100, 128, 255])
def test_no_part_gets_all_of_few(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Queues took 128 descriptors, if the process had fewer, too: nobody reached the node."""
    set_limit(monkeypatch, limit)
    shares = descriptor_shares()
    assert shares.connections is not None
    for share in (shares.connections, shares.queue_files, shares.log_files):
        assert 1 <= share <= max(1, limit // 4)


def test_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limit(monkeypatch, resource.RLIM_INFINITY)
    assert descriptor_shares() == (None, 16_384, 64)


def test_queues_keep_within_their_share(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_limit(monkeypatch, 64)
    cache = FileCache(REAL)
    for number in range(40):
        path = str(tmp_path / str(number))
        cache.create(path, 20)
        cache.write(path, b"x", 0)
    kept = [one for one in map(str, range(40)) if str(tmp_path / one) in cache._files]
    assert kept == [str(number) for number in range(24, 40)]
    cache.close()
