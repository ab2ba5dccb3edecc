"""docs/architecture.md names only what exists: paths, classes, functions, threads, imports."""

import ast
import functools
import pathlib
import re

import pytest

from tests.packages import written
from tests.sources import nodes, parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hastore"
TEXT = (ROOT / "docs" / "architecture.md").read_text()
STEP = re.compile(r"^ +(\d+)  (?:(\w+)\.)?(\w+) +(\S+\.py)$", re.M)  # Class.method, or a function
IN_A_STORE = ("hastore/limits", "rescued/")  # paths in a store's folder


@functools.cache
def classes():
    """Return the members of each class of hastore, by the class's name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, set()).update(members(node))
    return found


def members(node):
    """Return the methods, fields and attributes that a class defines."""
    names = set()
    for one in ast.walk(node):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(one.name)
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            names.add(one.target.id)
        elif isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            names.add(one.attr)
    return names


def resolve(name):
    """Return the file or folder that the document names, or None."""
    for base in (PACKAGE, ROOT, ROOT / "docs"):
        if (base / name).exists():
            return base / name
    return None


def section(title):
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text):
    """Return the cells of the tables in a text, without their headers."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    return [[cell.strip() for cell in cells] for cells in split]


def quoted(text):
    return re.findall(r"`([^`\n]+)`", text)


def test_every_path_exists():
    named = {one for one in quoted(TEXT) if re.fullmatch(r"[\w./-]+", one)}
    paths = {one for one in named if re.search(r"\.(py|md)$", one)}
    paths |= {one for one in named if "/" in one and not one.startswith("/")}
    paths |= set(re.findall(r"\]\(([^)#:]+)\)", TEXT))
    paths |= {path for *_, path in STEP.findall(TEXT)}
    missing = [one for one in sorted(paths - set(IN_A_STORE)) if resolve(one) is None]
    assert missing == [] and len(paths) > 60


@pytest.mark.slow("the first of its file, and parses each module")
def test_every_class_and_method_exists():
    words = " ".join(quoted(TEXT)) + " " + " ".join(re.findall(r"```\n(.*?)```", TEXT, re.S))
    named = set(re.findall(r"(?<![\w.-])([A-Z]\w*[a-z]\w*)(?:\.(\w+))?", words))
    checked = {(name, member) for name, member in named if name in classes() or member}
    wrong = [
        f"{name}.{member}"
        for name, member in sorted(checked)
        if name not in classes() or (member and member not in classes()[name])
    ]
    assert wrong == [] and len(checked) > 60
    threads = set(thread_names()) | {"ProducerSender"}
    alone = {one for one in quoted(TEXT) if re.fullmatch(r"[A-Z]\w*[a-z]\w*(-n)?", one)}
    unknown = {one for one in alone if one.removesuffix("-n") not in {*classes(), *threads}}
    assert unknown == set()


WAYS = {"The way of a put": 27, "The way of a pull": 13, "The way of a promotion": 7}


@pytest.mark.parametrize("title", WAYS)
def test_every_step_of_a_way_is_where_the_drawing_says(title):
    steps = STEP.findall(section(title))
    assert [int(number) for number, *_ in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == WAYS[title]
    for number, name, member, path in steps:
        file = resolve(path)
        assert file is not None, path
        if not name:
            functions = [n.name for n in parse(file).body if isinstance(n, ast.FunctionDef)]
            assert member in functions, f"{number}: {member} in {path}"
            continue
        owners = [n for n in parse(file).body if isinstance(n, ast.ClassDef) and n.name == name]
        assert owners and member in members(owners[0]), f"{number}: {name}.{member} in {path}"
    numbered = re.findall(r"^ +\d+  .*$", section(title), re.M)
    assert len(numbered) == len(steps), "a step that the test does not understand"


def test_the_places_to_look_for_are_there():
    found = 0
    for cells in rows(TEXT.partition("## Glossary")[0])[1:]:
        for names, path in re.findall(r"((?:`\w+(?:\.\w+)?`(?: and )?)+) in `([^`]+)`", cells[1]):
            tree = parse(resolve(path))
            defined = {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
            for name in quoted(names):
                assert name.partition(".")[0] in defined, f"{name} in {path}"
                found += 1
    assert found > 8


def thread_names():
    """Return the names of all Services; a number at the end is left out."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        yield from re.findall(r'super\(\).__init__\(\s*f?"([A-Z]\w+)', text)
        yield from re.findall(r'name=f"([A-Z]\w+)-', text)


def test_the_table_of_threads_is_complete():
    named = {quoted(cells[0])[0] for cells in rows(section("Threads of a node"))[1:]}
    assert {name.removesuffix("-n") for name in named} == set(thread_names())


def test_the_table_of_packages_is_the_one_of_the_import_rules():
    assert written(TEXT) == TEXT, "run: python -m tests.packages"
