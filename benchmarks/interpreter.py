"""Which Python runs, and whether it was built with profile-guided optimisation (PGO).

Python code runs slower without it, so each result says what it was measured with.
"""

import os
import platform
import sys
import sysconfig
from typing import Any

_SIGNS = ("--enable-optimizations", "-fprofile-use")
_FLAGS = ("CONFIG_ARGS", "PY_CFLAGS", "PY_CFLAGS_NODIST")
# All of them are in listobject.c, whose code is some 20 KiB. A compiler that follows a profile puts
# what ran often in one place and what never ran in another: they lie more than a MiB apart then.
_ONE_FILE = ("PyList_New", "PyList_Append", "PyList_Insert", "PyList_GetItem", "PyList_Reverse")
_APART_BYTES = 256 * 1024


def spread_bytes() -> int | None:
    """Return how far apart the functions of one source file lie; None when that cannot be seen."""
    try:
        import ctypes

        functions = [getattr(ctypes.pythonapi, name) for name in _ONE_FILE]
        places = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    except (ImportError, AttributeError):  # no CPython, or one without ctypes
        return None
    found = [place for place in places if place]
    return max(found) - min(found)


def pgo() -> tuple[bool | None, str]:
    """Return whether this interpreter was built with PGO (None: unknown), and what tells.

    Debian builds with PGO but keeps the flags out of sysconfig; the layout of the code tells then.
    """
    flags = " ".join(str(sysconfig.get_config_var(name) or "") for name in _FLAGS)
    for sign in _SIGNS:
        if sign in flags:
            return True, sign
    spread = spread_bytes()
    if spread is None:
        return None, "neither flags nor layout"
    return spread > _APART_BYTES, "the layout of its code"


def describe() -> dict[str, Any]:
    """Return what names this interpreter, without a path of the machine."""
    built, seen_by = pgo()
    return {
        "implementation": platform.python_implementation(),
        "version": platform.python_version(),
        "name": os.path.basename(os.path.realpath(sys.executable)),
        "compiler": platform.python_compiler(),
        "pgo": built,
        "pgo_seen_by": seen_by,
    }


def told(machine: dict[str, Any]) -> str:
    """Return the interpreter of a result's machine as a report shows it."""
    one = machine.get("interpreter")
    if one is None:  # a result from before it was noted
        return f"Python {machine['python']}"
    built = {True: "built with PGO", False: "built without PGO", None: "PGO unknown"}[one["pgo"]]
    return f"{one['implementation']} {one['version']} ({one['name']}, {one['compiler']}, {built})"
