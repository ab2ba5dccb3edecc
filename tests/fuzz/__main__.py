"""Fuzz targets by coverage, replay an input, or keep what was found.

    python -m tests.fuzz TARGET FILE...       replay inputs, with the stack of a find
    python -m tests.fuzz --run TARGET         fuzz it under atheris (--run all: each in turn)
    python -m tests.fuzz --keep TARGET        take what `--run` found into the committed corpus
    python -m tests.fuzz --corpus TARGET      replay the committed corpus

New inputs and finds are in build/fuzz/TARGET. The exit code is 1 if there was a find.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

from tests.fuzz import corpus, kit

BUILD = pathlib.Path("build") / "fuzz"
CORPUS_BYTES = 24 * 1024  # of a committed corpus, at most: the shortest inputs first
TIMEOUT_S = 20  # of one input: an endless loop, or work that is not bounded
RSS_MIB = 2_048
OPTIONS = (
    f"-timeout={TIMEOUT_S}",
    f"-rss_limit_mb={RSS_MIB}",
    "-print_final_stats=1",
    "-verbosity=1",
)
COLUMNS = ("target", "executions", "a second", "inputs", "seconds", "finds")
Row = tuple[str, ...]


def replay(name: str, inputs: list[tuple[str, bytes]]) -> int:
    """Run inputs; print what becomes of each. Returns the exit code."""
    module, found = kit.target(name), 0
    for where, data in inputs:
        try:
            module.one(data)
            print(f"{where}: accepted")
        except kit.Refused as refused:
            print(f"{where}: refused by {kit.site_of(refused)}: {refused}")
        except BaseException:
            found += 1
            print(f"{where}: a find: {len(data)} bytes: {data[:200]!r}")
            traceback.print_exc()
    return 1 if found else 0


def lay(name: str) -> pathlib.Path:
    """Write the seeds and the committed corpus to the target's folder of inputs; return it."""
    folder = BUILD / name / "inputs"
    folder.mkdir(parents=True, exist_ok=True)
    known = corpus.read(name) if corpus.path_of(name).exists() else []
    for data in (*kit.target(name).seeds(), *known):
        if len(data) <= kit.MAX_BYTES:
            (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
    return folder


def guided(name: str, folders: list[pathlib.Path], *options: str) -> tuple[int, str]:
    """Run libFuzzer on a target; return its exit code and what it printed."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.fuzz.guided", name, *map(str, folders)),
            *(f"-max_len={kit.MAX_BYTES}", f"-artifact_prefix={BUILD / name}/", *OPTIONS, *options),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    return done.returncode, done.stdout


def fuzz(name: str, seconds: int, runs: int, seed: int) -> Row:
    """Fuzz one target; print its finds with how to replay them; return a row of figures."""
    folder, begun = lay(name), time.monotonic()
    before = set(_finds(name))
    budget = [f"-runs={runs}"] if runs else []
    code, text = guided(
        name, [folder], f"-seed={seed}", *budget, *([] if runs else [f"-max_total_time={seconds}"])
    )
    finds = [path for path in _finds(name) if path not in before]
    if code or finds:
        print("\n".join(text.splitlines()[-60:]), file=sys.stderr)
    for path in finds:
        print(f"a find of {name}; replay it: {sys.executable} -m tests.fuzz {name} {path}")
    if code and not finds:
        print(f"{name}: the run failed with code {code}", file=sys.stderr)
    stats = dict(re.findall(r"stat::(\w+):\s+(\d+)", text))
    count = int(stats.get("number_of_executed_units", 0))
    took = max(time.monotonic() - begun, 0.001)
    row = (
        name, f"{count:,}", f"{count / took:,.0f}", str(len(list(folder.iterdir()))), f"{took:.0f}",
        str(len(finds) or int(bool(code))),
    )  # fmt: skip
    print(line(row), flush=True)
    return row


def _finds(name: str) -> list[pathlib.Path]:
    """Return the inputs that libFuzzer has put aside."""
    kinds = ("crash-", "timeout-", "oom-", "slow-unit-", "leak-")
    return sorted(one for one in (BUILD / name).glob("*-*") if one.name.startswith(kinds))


def line(cells: Row) -> str:
    """Return a row as a line of text."""
    return "  ".join(
        cell.ljust(width) for cell, width in zip(cells, (18, 12, 10, 8, 8, 0), strict=True)
    )


def keep(name: str) -> None:
    """Take into the committed corpus the fewest inputs that reach what all inputs reach."""
    folder = lay(name)
    with tempfile.TemporaryDirectory(prefix="hastore-fuzz-") as place:
        small = pathlib.Path(place)
        code, text = guided(name, [small, folder], "-merge=1")
        if code:
            print(text[-4_000:], file=sys.stderr)
            sys.exit(f"error: the inputs of {name} could not be merged: fix the find first")
        merged = [path.read_bytes() for path in small.iterdir()]
    seeds = [data for data in kit.target(name).seeds() if len(data) <= kit.MAX_BYTES]
    kept, size = dict.fromkeys(sorted(seeds, key=len)), 0
    size = sum(len(corpus.line_of(data)) + 1 for data in kept)
    for data in sorted(merged, key=len):
        size += len(corpus.line_of(data)) + 1
        if size > CORPUS_BYTES:
            break
        kept[data] = None
    corpus.write(name, kept)
    print(f"{name}: {len(kept)} inputs, {corpus.path_of(name).stat().st_size:,} bytes")


def main(words: list[str]) -> int:
    """Do what the words say; return the exit code."""
    logging.disable(logging.CRITICAL)  # damage is logged
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    known = ", ".join(kit.names())
    parser.add_argument("target", nargs="?", help=f"one of {known}")
    parser.add_argument("files", nargs="*", type=pathlib.Path, help="inputs to replay")
    parser.add_argument("--run", metavar="TARGET", help="fuzz this target, or all")
    parser.add_argument("--keep", metavar="TARGET", help="update this corpus, or all")
    parser.add_argument("--corpus", metavar="TARGET", help="replay this corpus, or all")
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    parser.add_argument(
        "--runs", type=int, default=0, help="executions of each, instead of seconds"
    )
    parser.add_argument("--seed", type=int, default=0, help="of libFuzzer; 0: a new one")
    parser.add_argument(
        "--clean", action="store_true", help="forget earlier inputs and finds first"
    )
    given = parser.parse_args(words)
    name = given.run or given.keep or given.corpus or given.target
    if name is None or name not in ("all", *kit.names()):
        parser.error(f"give a target: {known}")
    targets = kit.names() if name == "all" else [name]
    if given.clean:
        for each in targets:
            shutil.rmtree(BUILD / each, ignore_errors=True)
    if given.keep:
        for each in targets:
            keep(each)
        return 0
    if given.run:
        seed = given.seed or random.SystemRandom().randrange(1, 2**31)
        print(f"seed {seed}; inputs and finds: {BUILD.resolve()}", file=sys.stderr)
        print(line(COLUMNS), flush=True)
        rows = [fuzz(each, given.seconds, given.runs, seed) for each in targets]
        return 1 if any(row[-1] != "0" for row in rows) else 0
    if given.corpus:
        codes = [
            replay(each, [(f"{each} {n}", one) for n, one in enumerate(corpus.read(each), 1)])
            for each in targets
        ]
        return max(codes)
    return replay(name, [(str(path), path.read_bytes()) for path in given.files])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
