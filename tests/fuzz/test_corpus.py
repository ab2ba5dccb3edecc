"""Each target's corpus, and mutations of it: the readers hold, and the corpus proves something.

`make fuzz` looks for more, by coverage.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, FunctionType

import pytest

from tests.fuzz import corpus, kit
from tests.fuzz.mutate import Pool, mutated

RUNS = 200  # mutated inputs of each target; a target may state fewer
INPUTS = 40  # of a corpus whose allocations are looked at


def run(module: kit.Target, data: bytes) -> str | None:
    """Read an input; return where hastore refuses it, None if it is accepted."""
    try:
        module.one(data)
    except kit.Refused as refused:
        return kit.site_of(refused)
    return None


def complaints(module: kit.Target, inputs: list[bytes]) -> Iterator[str]:
    """Yield what a corpus does not show, though the target says that it must."""
    missing = {getattr(one, "__wrapped__", one).__code__: one for one in module.REACHES}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            missing.pop(frame.f_code, None)

    sites: list[str | None] = []
    for data in inputs:
        sys.setprofile(note if missing else None)
        try:
            sites.append(run(module, data))
        finally:
            sys.setprofile(None)
    accepted = sites.count(None) / len(sites)
    if accepted < module.LEAST.accepted:
        yield f"{accepted:.0%} of the inputs are accepted, not {module.LEAST.accepted:.0%}"
    refused = set(sites) - {None}
    if len(refused) < module.LEAST.sites:
        yield f"{len(refused)} places refuse an input, not {module.LEAST.sites}: {refused}"
    for one in missing.values():
        yield f"no input reaches {one.__qualname__}"


@pytest.mark.parametrize("name", kit.names())
def test_the_corpus_is_read_and_reaches_what_it_must(name: str) -> None:
    inputs = corpus.read(name)
    assert list(complaints(kit.target(name), inputs)) == []
    assert corpus.path_of(name).stat().st_size <= 34 * 1024


@pytest.mark.parametrize("name", kit.names())
def test_mutated_inputs_are_read(name: str, tmp_path: Path) -> None:
    module, inputs = kit.target(name), corpus.read(name)
    seed = int(os.environ.get("HASTORE_FUZZ_SEED") or random.SystemRandom().getrandbits(32))
    print(f"HASTORE_FUZZ_SEED={seed}")
    chance = random.Random(seed)
    pool = Pool(getattr(module, "TOKENS", ()), inputs)
    repaired: Callable[[bytes], bytes] = getattr(module, "repaired", lambda data: data)
    for _ in range(getattr(module, "RUNS", RUNS)):
        data = mutated(chance.choice(inputs), chance, pool, kit.MAX_BYTES)
        if chance.random() < 0.6:
            data = repaired(data)
        try:
            run(module, data)
        except BaseException:
            path = tmp_path / f"{name}.input"
            path.write_bytes(data)
            print(f"replay it: python -m tests.fuzz {name} {path}; {data[:500]!r}")
            raise


@pytest.mark.parametrize("name", kit.names())
def test_no_input_makes_python_allocate_more_than_is_bounded(name: str) -> None:
    """A length is checked before memory is allocated for it."""
    module, inputs = kit.target(name), corpus.read(name)
    most = getattr(module, "MEMORY_BYTES", kit.MEMORY_BYTES)
    chosen = random.Random(1).sample(inputs, min(len(inputs), getattr(module, "RUNS", INPUTS)))
    run(module, chosen[0])  # what is imported late, or cached
    gc.collect()
    tracemalloc.start()
    try:
        for data in chosen:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            run(module, data)
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak <= most, f"{peak:,} bytes for an input of {len(data)}: {data[:200]!r}"
    finally:
        tracemalloc.stop()


def test_a_corpus_that_is_only_refused_or_reaches_nothing_fails() -> None:
    module = kit.target("hello")
    found = list(complaints(module, [b"h" + bytes(9), b"", b"a\0\0\0\1\xc0"]))
    assert any("are accepted" in one for one in found)
    assert any("places refuse" in one for one in found)
    assert any("_check_hello" in one for one in found)


def test_a_line_of_a_corpus_gives_the_same_input() -> None:
    chance = random.Random(1)
    for data in (
        b"",
        b"text\n\"'\\\x00\xff",
        chance.randbytes(300),
        bytes(9_000),
        "é".encode() * 40,
    ):
        line = corpus.line_of(data)
        assert "\n" not in line and line.isascii() and corpus.data_of(line) == data


def test_each_target_says_what_it_reaches() -> None:
    for name in kit.names():
        module = kit.target(name)
        assert module.REACHES and module.LEAST.accepted > 0, name
        assert all(
            isinstance(one, FunctionType) or hasattr(one, "__wrapped__") for one in module.REACHES
        )
