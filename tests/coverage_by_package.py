"""Print how much of each package of hastore the last `make coverage` executed."""

import pathlib
from collections import Counter

import coverage

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    measured = coverage.Coverage(config_file=str(ROOT / "setup.cfg"))
    measured.load()
    lines, missing = Counter(), Counter()
    for path in sorted((ROOT / "hastore").rglob("*.py")):
        _, statements, _, missed, _ = measured.analysis2(str(path))
        package = str(path.parent.relative_to(ROOT))
        lines[package] += len(statements)
        missing[package] += len(missed)
    for package in sorted(+lines):
        print_line(package, lines[package], missing[package])
    print_line("all", lines.total(), missing.total())


def print_line(name, lines, missing):
    executed = 100 * (lines - missing) / lines
    print(f"{name:<32} {lines:6} statements, {missing:5} not executed {executed:6.1f} %")


if __name__ == "__main__":
    main()
