"""Stores of the DLedger mode compared: leader and follower, their folders and a RocketMQ's."""

from __future__ import annotations

import pathlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from hastore.store.offline import inspect
from tests.dledger.store.kit import copy_entries, no_op, opened, put
from tests.pipeline.audit.kit import audit
from tests.pipeline.audit.test_folders import small
from tests.store.kit import message, scribble

SMALL = 8192
SEED = random.SystemRandom().getrandbits(32)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 4096)


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """A leader's store and a follower's, with the same entries."""
    roots = tmp_path / "leader", tmp_path / "follower"
    with (
        opened(roots[0], commitlog_file_size=SMALL) as leader,
        opened(roots[1], node=2, commitlog_file_size=SMALL) as follower,
    ):
        for term in range(1, 4):
            no_op(leader, term)
            for first in range(0, 40, 4):
                put(leader, term, *(message(first + n, size=300) for n in range(4)))
        copy_entries(leader, follower)
        for store in (leader, follower):
            store.flush()
            store.commit(store.end_index)
    yield roots


def flip(root: pathlib.Path, offset: int, mask: int) -> None:
    (folder,) = root.glob("dledger-*/data")
    path = folder / f"{offset // SMALL * SMALL:020}"
    at = offset % SMALL
    scribble(str(path), at, bytes([path.read_bytes()[at] ^ mask]))


def entries(root: pathlib.Path) -> list[dict[str, Any]]:
    return [each for each in inspect.dump(str(root)) if "index" in each]


def end_of(entry: dict[str, Any]) -> int:
    return int(entry["pos"] + entry["size"])


@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
def test_copies_are_equal(pair: tuple[pathlib.Path, pathlib.Path], algorithm: str) -> None:
    found = audit(*pair, algorithm=algorithm)
    assert found.equal and found.complete and found.first is None
    assert found.bytes == found.end == end_of(entries(pair[0])[-1])
    assert found.a.kind == "hastore store"


def test_a_store_of_dledger_itself_is_compared_too(
    pair: tuple[pathlib.Path, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    one, other = pair
    shutil.copytree(other / "dledger-n2", tmp_path / "rocketmq" / "dledger-n1")
    found = audit(one, tmp_path / "rocketmq")
    assert found.equal and found.complete and found.bytes == found.end
    assert found.b.kind == "RocketMQ store"


def test_a_changed_byte_is_found_wherever_it_is(pair: tuple[pathlib.Path, pathlib.Path]) -> None:
    print(f"seed {SEED}")
    chance = random.Random(SEED)
    one, other = pair
    dumped = entries(one)
    for _ in range(80):
        entry = chance.choice(dumped)
        begin, size = entry["pos"], entry["size"]
        at = begin + chance.choice((chance.randrange(size), chance.randrange(60)))
        mask = chance.randrange(1, 256)
        flip(other, at, mask)
        found = audit(*chance.choice(((one, other), (other, one))))
        first = found.first
        told = f"seed {SEED}: byte {at - begin} of entry {entry['index']}, mask {mask}, {first}"
        assert first is not None and not found.equal and first.byte == at, told
        assert found.equal_until == at, told
        versions = {side.where: side for side in (first.a, first.b)}
        good, bad = versions[str(one)], versions[str(other)]
        assert good.problem is None and bad.problem is not None, told
        assert f"damaged at {other}" in first.verdict, told
        if at < begin + 48:
            assert (first.item, first.offset) == ("entry", begin), told
            assert first.part in good.fields and first.differing == (first.part,), told
            assert good.fields["index"] == entry["index"], told
        else:
            assert (first.item, first.offset) == ("record", begin + 48), told
            assert good.fields["topic"] == entry["record"]["topic"], told
            if first.part == "body":
                assert "wrong CRC" in bad.problem, told
        msgspec.json.encode(asdict(found))
        flip(other, at, mask)
    assert audit(one, other).equal


def test_bytes_in_the_blank_of_a_file_mean_nothing(
    pair: tuple[pathlib.Path, pathlib.Path],
) -> None:
    one, other = pair
    blank = max(end_of(each) for each in entries(one) if each["pos"] < SMALL)
    assert blank + 8 < SMALL
    flip(other, SMALL - 1, 4)
    found = audit(one, other)
    assert found.equal and found.ignored_bytes > 0
    flip(other, blank + 7, 4)
    first = audit(one, other).first
    assert first is not None and (first.offset, first.part) == (blank, "the header of a blank")
