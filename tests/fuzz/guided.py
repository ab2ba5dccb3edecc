"""Run one target under atheris: python -m tests.fuzz.guided TARGET FOLDER... OPTIONS.

A process of its own, as hastore must be imported while atheris instruments it, and libFuzzer ends
the process. OPTIONS are libFuzzer's; the first FOLDER gets the inputs that reach something new.
"""

from __future__ import annotations

import logging
import random
import sys

try:
    import atheris
except ImportError:
    sys.exit(
        "error: atheris is not installed here: `make fuzz` installs it, for Python 3.11 to 3.13 on"
        " Linux and macOS"
    )

from tests.fuzz import kit
from tests.fuzz.mutate import Pool, mutated

REPAIRED = 0.7  # of the inputs, where the target can: the others must be refused, too


def main(words: list[str]) -> None:
    """Fuzz; does not return."""
    logging.disable(logging.CRITICAL)  # damage is logged, and nobody reads a million lines
    name, *rest = words
    with atheris.instrument_imports(include=["hastore"]):
        module = kit.target(name)
    repaired = getattr(module, "repaired", None)
    pool = Pool(getattr(module, "TOKENS", ()), module.seeds())

    def change(data: bytes, most: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.4:
            data = atheris.Mutate(data, most)
        else:
            data = mutated(data, chance, pool, most)
        if repaired is not None and chance.random() < REPAIRED:
            data = repaired(data)
        return data[:most]

    def run(data: bytes) -> None:
        try:
            module.one(data)
        except kit.Refused:
            pass

    # A merge starts this again, in a shell.
    command = f"{sys.executable} -m tests.fuzz.guided {name}"
    atheris.Setup([command, *rest], run, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
