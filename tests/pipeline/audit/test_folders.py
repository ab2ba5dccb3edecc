"""Two folders compared: equal, damaged anywhere, shorter, cut, of other histories."""

from __future__ import annotations

import pathlib
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import msgspec
import pytest
import xxhash

from hastore.config.model import RetentionConfig
from hastore.errors import HastoreError, StoreError, UsageError
from hastore.pipeline.audit import ALGORITHMS, job, sides, task
from hastore.pipeline.progress import JobProgress
from hastore.store.message_store import MessageStore
from hastore.store.offline import inspect
from tests.pipeline.audit.kit import GOLDEN, audit, copied, files, flip, peek, poke
from tests.store import kit

SEED = random.SystemRandom().getrandbits(32)
STORES = ("three-files", "variants")


@pytest.fixture(params=[16 * 1024 * 1024, 4096], ids=["one range", "many ranges"])
def _ranges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small stores of the tests into many ranges and tasks, too."""
    small(monkeypatch, request.param)


def small(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    for module in (sides, job, task):
        monkeypatch.setattr(module, "RANGE_BYTES", size)
    monkeypatch.setattr(task, "COMPARED_BYTES", 256)
    monkeypatch.setattr(job, "TASK_BYTES_MIN", 2 * size)
    monkeypatch.setattr(job, "TASK_BYTES_MAX", 2 * size)


def items(store: pathlib.Path) -> list[tuple[int, int, dict[str, Any]]]:
    """Return each record and blank of a log: its start, its end, its fields."""
    found = inspect.dump(str(store))
    return [(each["offset"], each["offset"] + each["size"], each) for each in found]


@pytest.mark.parametrize("size", [0, 5000])
@pytest.mark.parametrize("second", [False, True])
def test_a_file_that_is_cut_after_it_was_listed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, size: int, second: bool
) -> None:
    one, other = copied(tmp_path, "three-files")
    path = files(other if second else one)[1]
    listed = sides.FolderSide._file_of

    def cut(side: sides.FolderSide, offset: int) -> sides.LogFile:
        file = listed(side, offset)
        if file.path == str(path):
            with open(path, "r+b") as handle:
                handle.truncate(size)
        return file

    monkeypatch.setattr(sides.FolderSide, "_file_of", cut)
    found = audit(one, other)
    assert found.equal and not found.complete
    (part,) = found.not_compared
    assert "is missing or cut short in the middle of" in part.why


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize("algorithm", ["xxh3-128", "sha256"])
@pytest.mark.usefixtures("_ranges")
def test_copies_are_equal(tmp_path: pathlib.Path, name: str, algorithm: str) -> None:
    one, other = copied(tmp_path, name)
    found = audit(one, other, algorithm=algorithm)
    end = items(one)[-1][1]
    assert found.equal and found.complete and found.first is None
    assert (found.start, found.end, found.bytes, found.equal_until) == (0, end, end, end)
    assert found.not_compared == [] and found.digest is not None
    assert found.ranges == -(-end // sides.RANGE_BYTES)
    assert found.a.kind == found.b.kind == "RocketMQ store"
    assert audit(other, GOLDEN / name, algorithm=algorithm).digest == found.digest
    msgspec.json.encode(asdict(found))  # all of it is JSON


def test_the_digest_is_that_of_the_ranges_digests(tmp_path: pathlib.Path) -> None:
    found = audit(GOLDEN / "three-files", GOLDEN / "three-files")
    raw = peek(GOLDEN / "three-files", 0, found.end)
    assert found.digest == xxhash.xxh3_128(xxhash.xxh3_128(raw).digest()).hexdigest()


@pytest.mark.usefixtures("_ranges")
def test_a_changed_byte_is_found_wherever_it_is(tmp_path: pathlib.Path) -> None:
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    for name in STORES:
        one, other = copied(tmp_path, name)
        placed = items(one)
        for _ in range(60):
            begin, end, fields = chance.choice(placed)
            at = begin + chance.choice([chance.randrange(end - begin), chance.randrange(36)])
            at = min(at, end - 1)
            mask = chance.randrange(1, 256)
            flip(other, at, mask)
            sides_ = (one, other) if chance.random() < 0.5 else (other, one)
            found = audit(*sides_, algorithm=chance.choice(ALGORITHMS))
            told = f"seed {SEED}: byte {at} of {name}, mask {mask}, {found.first}"
            if fields.get("blank") and at >= begin + 8:
                assert found.equal and found.first is None, told
                assert found.ignored_bytes == end - at or found.ignored_bytes > 0, told
            else:
                first = found.first
                assert first is not None and not found.equal, told
                assert (first.offset, first.byte) == (begin, at), told
                assert found.equal_until == at and found.differing_ranges == 1, told
                versions = {first.a.where: first.a, first.b.where: first.b}
                good, bad = versions[str(one)], versions[str(other)]
                assert good.problem is None, told
                if not fields.get("blank"):
                    assert good.fields["topic"] == fields["topic"], told
                    assert good.fields["queue_offset"] == fields["queue_offset"], told
                    assert good.sha256 == fields["sha256"], told
                    if first.part == "body":
                        assert bad.problem is not None and "wrong CRC" in bad.problem, told
                        assert f"damaged at {other}" in first.verdict, told
                        assert first.differing == ("body",), told
                    elif first.part in good.fields and first.part not in ("size", "magic"):
                        assert first.part in first.differing, told
                msgspec.json.encode(asdict(found))
            flip(other, at, mask)
        assert audit(one, other).equal
        shutil.rmtree(one)
        shutil.rmtree(other)


@pytest.mark.usefixtures("_ranges")
def test_the_first_of_many_differences_is_named(tmp_path: pathlib.Path) -> None:
    one, other = copied(tmp_path, "three-files")
    placed = [each for each in items(one) if not each[2].get("blank")]
    changed = [placed[number][1] - 1 for number in (-5, 40, 41, -2)]
    for at in changed:
        flip(other, at, 1)
    found = audit(one, other)
    assert found.first is not None and found.first.offset == placed[40][0]
    assert found.first.part == "properties" and found.first.byte == placed[40][1] - 1
    assert found.differing_ranges == len({at // sides.RANGE_BYTES for at in changed})
    only = audit(one, other, stop_at_first=True)
    assert only.first == found.first and not only.equal
    assert only.complete == (sides.RANGE_BYTES > 4096)


def test_damage_of_both_sides_and_of_valid_fields_is_told_apart(tmp_path: pathlib.Path) -> None:
    one, other = copied(tmp_path, "three-files")
    begin, end, _ = items(one)[3]
    flip(other, begin + 57, 1)  # in storeTimestamp, which no CRC covers
    first = audit(one, other).first
    assert first is not None and first.part == "store_ms" and first.differing == ("store_ms",)
    assert first.a.problem is None is first.b.problem and "CRC does not cover" in first.verdict
    flip(one, begin + 100, 1)
    flip(other, begin + 100, 2)
    first = audit(one, other).first
    assert first is not None and first.verdict == "the record is damaged on both sides"


def test_unrelated_stores_differ_in_their_first_record(tmp_path: pathlib.Path) -> None:
    first = audit(GOLDEN / "three-files", GOLDEN / "variants").first
    assert first is not None and first.offset == 0
    assert first.a.what == first.b.what == "record" and "body" in first.differing


def test_log_files_of_other_sizes_are_said_to_be_the_reason(tmp_path: pathlib.Path) -> None:
    """The same messages, put into a store with larger files."""
    for number, size in enumerate((kit.FILE_SIZE, 2 * kit.FILE_SIZE)):
        with kit.opened(tmp_path / str(number), commitlog_file_size=size) as store:
            kit.put(store, *[kit.message(n, size=700) for n in range(200)])
            store.set_limits(readable=store.max_offset)
    one, other = tmp_path / "0", tmp_path / "1"
    stamp = audit(one, other).first  # store times differ first
    assert stamp is not None and stamp.part == "store_ms" and "different sizes" in stamp.verdict
    # The same bytes, cut into files of another size, are equal.
    joined, source = tmp_path / "joined", tmp_path / "source"
    shutil.copytree(GOLDEN / "three-files", source)
    (joined / "commitlog").mkdir(parents=True)
    raw = b"".join(path.read_bytes() for path in files(source))
    (joined / "commitlog" / f"{0:020}").write_bytes(raw)
    for algorithm in ALGORITHMS:
        found = audit(source, joined, end=65536 * 2, algorithm=algorithm)
        assert found.equal and found.a.file_size != found.b.file_size
        assert found.digest == audit(source, source, end=65536 * 2, algorithm=algorithm).digest
        assert audit(joined, source, algorithm=algorithm).equal


def test_a_shorter_log_is_compared_as_far_as_it_goes(tmp_path: pathlib.Path) -> None:
    one, other = copied(tmp_path, "three-files")
    files(other)[0].unlink()
    placed = items(one)
    cut = placed[-10][0]
    path = files(other)[-1]
    with open(path, "r+b") as file:
        file.seek(cut - int(path.name))
        file.write(bytes(path.stat().st_size - (cut - int(path.name))))
    found = audit(one, other)
    assert (found.start, found.end) == (65536, cut) and found.equal and found.complete
    reasons = [(each.start, each.end, each.why) for each in found.not_compared]
    assert reasons == [
        (0, 65536, f"only {one} has it: the log of {other} begins at 65536"),
        (cut, placed[-1][1], f"beyond the last whole record of {other}, {cut}"),
    ]
    # A part of a record that is being copied is no difference either; wrong bytes there are.
    poke(other, cut, peek(one, cut, cut + 50))
    assert audit(other, one).equal
    flip(other, cut + 30, 1)
    first = audit(one, other).first
    assert first is not None and (first.offset, first.byte) == (cut, cut + 30)


def test_a_part_can_be_compared(tmp_path: pathlib.Path) -> None:
    one, other = copied(tmp_path, "three-files")
    placed = items(one)
    flip(other, placed[10][0] + 95, 1)
    after = audit(one, other, start=placed[11][0] + 5)
    assert after.equal and after.start == placed[11][0] + 5 and after.not_compared == []
    before = audit(one, other, end=placed[10][0])
    assert before.equal and before.bytes == placed[10][0]
    inside = audit(one, other, start=placed[10][0] + 90, end=placed[10][0] + 100)
    assert inside.first is not None and inside.first.offset == placed[10][0]


def test_wrong_arguments_are_named(tmp_path: pathlib.Path) -> None:
    one, other = copied(tmp_path, "three-files")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare" / "commitlog").mkdir(parents=True)
    with pytest.raises(StoreError, match="no such folder; give a store's folder, or tcp://"):
        audit(one, tmp_path / "missing")
    with pytest.raises(StoreError, match="is no store"):
        audit(one, tmp_path / "empty")
    with pytest.raises(HastoreError, match=r"nothing to compare: .*bare has \[0, 0\)"):
        audit(one, tmp_path / "bare")
    assert audit(tmp_path / "bare", tmp_path / "bare").equal
    with pytest.raises(UsageError, match="'md5' is no digest; the digests are xxh3-128, sha256"):
        audit(one, other, algorithm="md5")
    with pytest.raises(UsageError, match="--from 5 is not below --to 5"):
        audit(one, other, start=5, end=5)
    with pytest.raises(UsageError, match=r"--to 999999 is not in what both sides have: "):
        audit(one, other, end=999_999)


def test_a_bad_sector_is_an_error_that_names_the_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that ends early stands for it: its pages cannot be mapped either."""
    one, other = copied(tmp_path, "three-files")
    small(monkeypatch, 65536)
    real, cut = sides.FolderSide._map, files(other)[1]

    def shortened(self: Any, file: Any) -> Any:
        found = real(self, file)
        if file.path == str(cut) and cut.stat().st_size:
            with open(cut, "r+b") as handle:
                handle.truncate(0)
        return found

    monkeypatch.setattr(sides.FolderSide, "_map", shortened)
    with pytest.raises(StoreError, match=rf"{cut}: the disk cannot read bytes 0 to 65536, offsets"):
        audit(one, other)


# -- stores that change meanwhile


@pytest.fixture
def store(tmp_path: pathlib.Path) -> Iterator[MessageStore]:
    with kit.opened(
        tmp_path / "live", retention=RetentionConfig(max_size_bytes=kit.FILE_SIZE)
    ) as opened:
        fill(opened, range(300))
        yield opened


def fill(store: MessageStore, numbers: range) -> None:
    kit.put(store, *[kit.message(number, size=700) for number in numbers])
    store.flush()
    assert store.wait_dispatched(store.max_offset, 60)
    store.set_limits(confirmed=store.max_offset, readable=store.max_offset)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_retention_removes_meanwhile_is_not_a_difference(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, store: MessageStore, algorithm: str
) -> None:
    small(monkeypatch, 4096 * 3)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "live", copy)
    assert store.max_offset > 3 * kit.FILE_SIZE

    def remove(part: Any) -> None:
        if part.start and not store.min_offset:
            assert store.retention.delete_expired(None)

    found = audit(copy, tmp_path / "live", before=remove, algorithm=algorithm)
    assert found.equal and found.complete and found.digest is None
    assert found.a.kind == "hastore store" and found.a.end_is == "readable offset"
    assert {each.why for each in found.not_compared} == {
        f"{tmp_path / 'live'} removed it by retention: its log begins at {store.min_offset} now"
    }
    assert found.bytes + sum(each.end - each.start for each in found.not_compared) == found.end
    assert max(each.end for each in found.not_compared) == store.min_offset


def test_a_cut_meanwhile_is_not_a_difference_but_the_audit_is_incomplete(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, store: MessageStore
) -> None:
    small(monkeypatch, 4096)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "live", copy)
    offsets = [each[0] for each in items(copy)]
    at = offsets[len(offsets) // 2]

    def cut(part: Any) -> None:
        if part.start and store.max_offset > at:
            store.set_limits(confirmed=at, readable=at)
            store.truncate(at)

    found = audit(copy, tmp_path / "live", before=cut)
    assert found.equal and not found.complete and found.first is None
    assert found.equal_until <= at < found.equal_until + 4096
    assert {each.why for each in found.not_compared} == {
        f"{tmp_path / 'live'} was cut or restarted: its log is readable up to {at} now"
    }


@pytest.mark.usefixtures("_ranges")
def test_bytes_that_settle_are_compared_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = copied(tmp_path, "three-files")
    flip(other, 500, 1)
    real = task._Comparison._mismatch

    def settled(self: Any, start: int, end: int) -> None:
        flip(other, 500, 1)
        real(self, start, end)

    monkeypatch.setattr(task._Comparison, "_mismatch", settled)
    found = audit(one, other)
    assert found.equal and found.complete and found.digest == audit(one, one).digest


@pytest.mark.parametrize(
    ("stop_at", "said"),
    [
        (8192, "all is equal in [0, 8192); --from 8192 continues there"),
        (155_648, "the first difference is in the record at "),
    ],
)
def test_a_stop_says_up_to_where_all_is_equal(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, stop_at: int, said: str
) -> None:
    small(monkeypatch, 4096)
    one, other = copied(tmp_path, "three-files")
    flip(other, 150_000, 1)
    kept: list[str] = []
    progress = JobProgress()
    monkeypatch.setattr(progress, "keep", kept.append)

    def stop(part: Any) -> None:
        if part.start >= stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(one, other, before=stop, progress=progress)
    assert kept[-1].startswith(said)


def test_an_error_says_up_to_where_all_is_equal(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(monkeypatch, 4096)
    one, other = copied(tmp_path, "three-files")

    def fail(part: Any) -> None:
        if part.start >= 65536:
            raise StoreError("the disk is gone")

    with pytest.raises(
        StoreError, match=r"^the disk is gone; all is equal in \[0, 65536\); --from 65536 continues"
    ):
        audit(one, other, before=fail)
