"""The tests and planted mistakes that docs/failover.md names exist; it names every mistake."""

import pathlib
import re

from tests.ha.planted import BUGS

ROOT = pathlib.Path(__file__).parent.parent


def test_every_named_test_and_mistake_exists():
    text = (ROOT / "docs" / "failover.md").read_text()
    defined = set()
    for path in (ROOT / "tests").rglob("*.py"):
        defined.update(re.findall(r"def (test_\w+)", path.read_text()))
    cells = [row.rsplit("|", 2)[1] for row in text.splitlines() if row.startswith("| ")]
    named = set(re.findall(r"`(\w+)`", " ".join(cells)))
    named |= set(re.findall(r"`(\w+)`", text)) & set(BUGS)
    tests = {name for name in named if name.startswith("test_")}
    assert tests and tests <= defined, tests - defined
    assert named - tests <= set(BUGS), named - tests - set(BUGS)
    assert set(BUGS) <= named, set(BUGS) - named
    assert f"{len(BUGS)} mistakes" in text
