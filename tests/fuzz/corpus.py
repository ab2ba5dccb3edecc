"""The committed corpora, `corpus/TARGET.txt`: an input a line, as text or packed.

t TEXT      the input as a JSON string, a character for each byte
z BASE85    the input compressed with zlib
# ...       what the input below it is for: a find says what was wrong
"""

from __future__ import annotations

import base64
import json
import pathlib
import zlib
from collections.abc import Iterable

FOLDER = pathlib.Path(__file__).resolve().parent / "corpus"


def path_of(name: str) -> pathlib.Path:
    """Return where the corpus of a target is."""
    return FOLDER / f"{name}.txt"


def line_of(data: bytes) -> str:
    """Return an input as a line, in the shorter form."""
    text = json.dumps(data.decode("latin-1"))
    packed = base64.b85encode(zlib.compress(data, 9)).decode()
    return f"t {text}" if len(text) <= max(len(packed), 80) else f"z {packed}"


def data_of(line: str) -> bytes:
    """Return the input in a line."""
    kind, _, text = line.partition(" ")
    assert kind in ("t", "z"), f"a line of a corpus begins with t, z or #: {line[:40]!r}"
    if kind == "z":
        return zlib.decompress(base64.b85decode(text))
    return str(json.loads(text)).encode("latin-1")


def read(name: str) -> list[bytes]:
    """Return the inputs of a target's corpus."""
    lines = path_of(name).read_text("ascii").splitlines()
    return [data_of(line) for line in lines if line and not line.startswith("#")]


def notes(name: str) -> list[str]:
    """Return the lines of a corpus that are kept: notes, each with the input below it."""
    path = path_of(name)
    lines = path.read_text("ascii").splitlines() if path.exists() else []
    kept: list[str] = []
    for at, line in enumerate(lines):
        if line.startswith("#") or (at and lines[at - 1].startswith("#")):
            kept.append(line)
    return kept


def write(name: str, inputs: Iterable[bytes]) -> None:
    """Replace a corpus; what has a note stays."""
    kept = notes(name)
    known = {data_of(line) for line in kept if not line.startswith("#")}
    lines = [line_of(one) for one in inputs if one not in known]
    FOLDER.mkdir(exist_ok=True)
    path_of(name).write_text("".join(f"{line}\n" for line in (*kept, *sorted(lines))), "ascii")
