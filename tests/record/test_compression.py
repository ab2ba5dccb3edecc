"""Compressed bodies: what is written is read; what is damaged, hostile or unknown is refused."""

from __future__ import annotations

import random
import sys
import tracemalloc
import zlib
from importlib import import_module
from typing import Any

import pytest

from hastore.errors import CorruptRecordError, UsageError
from hastore.record import compression
from hastore.record.compression import (
    ALGORITHMS,
    COMPRESSION_FLAGS,
    algorithm_of,
    check_algorithm,
    compress,
    decompress,
)

FLAGS = {"lz4": 0x101, "zstd": 0x201, "zlib": 0x301}  # as RocketMQ 5.3 writes them
BODY = b"a body that repeats itself, " * 500


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_compressed_body_is_shorter_flagged_and_read_again(algorithm: str) -> None:
    packed, flags = compress(BODY, algorithm)
    assert len(packed) < len(BODY) // 10
    assert flags == FLAGS[algorithm]
    assert algorithm_of(flags) == algorithm
    assert decompress(packed, flags, "it") == BODY


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_body_that_would_not_become_shorter_stays(algorithm: str) -> None:
    for body in (b"", b"x", random.Random(1).randbytes(5_000)):
        assert compress(body, algorithm) == (body, 0)
        assert decompress(body, 0, "it") is body


def test_older_clients_name_no_type_and_an_empty_body_is_never_compressed() -> None:
    assert decompress(zlib.compress(BODY), 0x1, "it") == BODY
    assert [decompress(b"", flags, "it") for flags in (*FLAGS.values(), 0x701)] == [b""] * 4
    assert algorithm_of(0x300) is None  # bits of a type alone say nothing
    assert COMPRESSION_FLAGS == 0x701


def test_lz4_blocks_are_independent_because_java_reads_no_others() -> None:
    packed, _ = compress(BODY * 20, "lz4")  # several blocks
    assert packed[:4] == bytes.fromhex("04224d18")
    assert packed[4] & 0x20, "the flag B.Indep of the frame's descriptor"


@pytest.mark.parametrize("algorithm", ["lz4", "zstd"])
def test_several_frames_are_one_body_as_java_reads_them(algorithm: str) -> None:
    packed, flags = compress(BODY, algorithm)
    assert decompress(packed * 3, flags, "it") == BODY * 3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("seed", range(3))
def test_damage_is_one_error_that_names_the_record(algorithm: str, seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    packed, flags = compress(chance.randbytes(200) * 40, algorithm)
    cuts = [packed[:size] for size in chance.sample(range(1, len(packed)), 20)]
    for damaged in (b"certainly not compressed", *cuts):
        with pytest.raises(CorruptRecordError, match=f"the body of record 7 .*{algorithm}"):
            decompress(damaged, flags, "record 7")
    for _ in range(200):  # any other damage: an error of ours, or other bytes
        changed = bytearray(packed)
        changed[chance.randrange(len(packed))] ^= 1 << chance.randrange(8)
        try:
            decompress(bytes(changed), flags, "record 7")
        except CorruptRecordError as failure:
            assert "record 7" in str(failure)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bomb_is_refused_before_its_bytes_are_made(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "MAX_BODY_BYTES", 100_000)
    exact, flags = compress(bytes(100_000), algorithm)
    assert decompress(exact, flags, "it") == bytes(100_000)
    bomb, _ = compress(bytes(50_000_000), algorithm)
    assert len(bomb) < 300_000
    tracemalloc.start()
    try:
        for packed in (bomb, compress(bytes(100_001), algorithm)[0], exact * 1_000):
            if algorithm == "zlib" and packed.startswith(exact):
                continue  # what follows a stream of ZLIB is not read
            with pytest.raises(CorruptRecordError, match="record 7 has over 100000 bytes when"):
                decompress(packed, flags, "record 7")
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [4, 5, 6, 7])
def test_an_unknown_type_is_refused(kind: int) -> None:
    flags = 0x1 | kind << 8
    assert algorithm_of(flags) == ""
    with pytest.raises(CorruptRecordError, match=f"record 7 has the unknown compression {kind}"):
        decompress(BODY, flags, "record 7")


def test_an_unknown_algorithm_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(UsageError, match="'snappy' is no compression: use one of lz4, zstd, zlib"):
        check_algorithm("snappy")


@pytest.mark.parametrize("algorithm", ["lz4", "zstd"])
def test_a_missing_library_is_one_error_with_the_remedy(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, flags = compress(BODY, algorithm)
    for module in ("lz4.frame", "compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    remedy = rf"{algorithm} needs the package .*pip install 'hastore\[compression\]'"
    with pytest.raises(UsageError, match=remedy):
        check_algorithm(algorithm)
    with pytest.raises(UsageError, match=remedy):
        decompress(packed, flags, "record 7")
    check_algorithm("zlib")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_module_is_looked_for_in_vain(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each body would pay for it, 0.1 ms."""
    in_vain = []

    def note(name: str) -> Any:
        try:
            return import_module(name)
        except ImportError:
            in_vain.append(name)
            raise

    monkeypatch.setattr("hastore.record.compression.import_module", note)
    decompress(*compress(BODY, algorithm), "record 7")
    assert not in_vain


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_short_body_takes_no_more_memory_than_it_can_become(algorithm: str, size: int) -> None:
    packed, flags = compress(bytes(size), algorithm)
    decompress(packed, flags, "here")  # the library is imported
    tracemalloc.start()
    try:
        assert decompress(packed, flags, "here") == bytes(size)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
