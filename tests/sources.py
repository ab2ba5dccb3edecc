"""The parsed sources, for the tests that read code: each file is parsed and walked once a worker.

conftest.py gives the modules that import this one to the same worker.
"""

from __future__ import annotations

import ast
import functools
import pathlib


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    """Return a file's syntax tree. It is shared: nobody changes it."""
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def nodes(path: pathlib.Path) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree, in the order of `ast.walk`."""
    return list(ast.walk(parse(path)))
