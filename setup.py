"""The number of a build, so that pip and an operator can tell two builds apart.

A wheel that is built from a commit has the number X.Y.Z.devDATE+gCOMMIT: DATE is the commit's date
in UTC, YYYYMMDDHHMMSS, by which pip knows the newer of two. It is written into the wheel's copy of
hastore/__init__.py alone: a checkout goes on to say X.Y.Z.dev0, because its commit changes under an
installation that is linked to it. HASTORE_VERSION sets another number, as where git is missing.
All else is in setup.cfg.
"""

import os
import pathlib
import re
import subprocess

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = pathlib.Path(__file__).resolve().parent
LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)


def _git(*arguments: str) -> str | None:
    """Return what git says of this folder; None if git is missing, or it is no checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(SOURCE), *arguments], capture_output=True, text=True, check=True,
            env={**os.environ, "TZ": "UTC"},
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def build_version() -> str:
    """Return the number of what is built from this folder."""
    given = os.environ.get("HASTORE_VERSION")
    if given:
        return given
    found = LINE.search((SOURCE / "hastore" / "__init__.py").read_text("utf-8"))
    if found is None:
        raise SystemExit("hastore/__init__.py has no line __version__")
    written = found.group(1)
    packed = SOURCE / "PKG-INFO"  # of a source distribution
    if packed.exists():
        known = re.search(r"^Version: (.*)$", packed.read_text("utf-8"), re.MULTILINE)
        return written if known is None else known.group(1)
    root = _git("rev-parse", "--show-toplevel")
    if not written.endswith(".dev0") or root is None or pathlib.Path(root) != SOURCE:
        return written
    stamp = _git("log", "-1", "--date=format-local:%Y%m%d%H%M%S", "--format=%cd %h", "--abbrev=8")
    if not stamp:
        return written
    date, commit = stamp.split()
    changed = ".changed" if _git("status", "--porcelain", "--untracked-files=no") else ""
    return f"{written.removesuffix('0')}{date}+g{commit}{changed}"


VERSION = build_version()


class BuildWithNumber(build_py):
    """Write the number into what is built, and never into the source."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            path = pathlib.Path(self.build_lib) / "hastore" / "__init__.py"
            text = path.read_text("utf-8")
            path.unlink()  # it may be a hard link to the source
            path.write_text(LINE.sub(f'__version__ = "{VERSION}"', text), "utf-8")


setup(version=VERSION, cmdclass={"build_py": BuildWithNumber})
