"""Check the house rules (CONTRIBUTING.md): who imports whom, sizes, forbidden calls, docstrings."""

import ast
import functools
import graphlib
import pathlib
import re

from tests.conftest import LONGEST
from tests.packages import PURE, TABLE, allowed, fits, package_of
from tests.sources import nodes, parse

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hastore"
MODULES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "pyspark_hastore").rglob("*.py"))
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
ALL_PYTHON = MODULES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "bin").iterdir())

MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100

IMPURE_IMPORTS = {"time", "socket", "os", "threading", "random", "select", "subprocess", "mmap"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
# Only spark may import these; only ONLY_ZMQ may import zmq. The core works without the extras.
ONLY_SPARK = {"pyspark", "pyarrow"}
ONLY_ZMQ = ("client.connections.zmq_transport",)
ONLY_KAZOO = ("registry.session",)
# Modules that may open files: the shim; the configuration and private files, which are not part of
# the store; the commands, the demo, histories, groups for tests and Spark: files that the user
# names.
FILE_ACCESS = (
    *("fs.filesystem", "fs.private_files", "config.file"),
    *("cli", "demo", "testing", "pipeline", "spark", "history"),
)
FILE_CALLS = {
    *("open", "unlink", "remove", "rename", "replace", "mkdir", "makedirs", "rmdir", "truncate"),
    *("ftruncate", "fsync", "fdatasync", "pread", "pwrite", "listdir", "scandir", "rmtree"),
    *("posix_fallocate", "link", "symlink", "chmod"),
}

# Modules with threads that are not a Service, and what happens if such a thread fails.
BARE_THREADS = {
    "registry.session",  # ends a session; the caller does not wait longer than a second
    "service",  # the base class itself
    "client.producer.io_driver",  # ends all sends with the failure, and refuses later ones
    "client.producer.checker",  # logged; its group's transactions are asked of other producers
    "client.producer.cluster_producer",  # a failure is the outcome of the message it was about
    "testing.links",  # in a test: pytest names the failure, and the link ends
    "ha.hello.peer",  # a pool: its callers get the exceptions of its threads
    "cli.own_node",  # the same
    "client.connections.bootstrap",  # always answers, also after a failure
    "cli.produce",  # in a command: the interpreter prints the failure, and the command ends
    "demo.java_clients",  # in the demo: every call that waits gets a failure when it ends
    "demo.proof",  # in the demo: the thread that waits for it raises the failure
}


def module_name(path):
    """Return the name below hastore: "record.codec"."""
    if path.is_relative_to(PACKAGE):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    return "spark.registration"


def imports(path):
    """Yield (line, dotted name) of each import; `from x import y` is x.y."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def where(path, line):
    return f"{path.relative_to(ROOT)}:{line}"


def check(offences):
    """Fail with all offences, one a line."""
    found = list(offences)
    assert not found, f"{len(found)} offences:\n" + "\n".join(found)


def import_complaints(name, imported):
    """Yield what is wrong with an import in the module `name`."""
    top = imported.partition(".")[0]
    if not top:
        yield "imports are absolute"
    if top in FORBIDDEN_IMPORTS:
        yield f"{top} is forbidden"
    below = imported.removeprefix("hastore").removeprefix(".")
    if top == "hastore" and below not in ("", "__version__") and not fits(below, allowed(name)):
        yield f"{name} must not import {imported}"
    near_spark = ("spark", "pipeline", "cli.pipeline", "demo.spark")
    if top in ONLY_SPARK and not fits(name, near_spark):
        yield f"only spark imports {top}"
    if top == "zmq" and name not in ONLY_ZMQ:
        yield f"only {ONLY_ZMQ[0]} imports zmq"
    if top == "kazoo" and name not in ONLY_KAZOO:
        yield f"only {ONLY_KAZOO[0]} imports kazoo"
    if top in IMPURE_IMPORTS and fits(name, PURE):
        yield f"{name} is pure, {top} is not"
    if top == "logging" and fits(name, ("dledger.core",)):
        yield "the core says what happened in its updates"
    if top == "time" and not fits(name, ("clock", "cli", "demo", "testing", "pipeline", "spark")):
        yield "time comes from hastore.clock"


def test_imports_go_one_way():
    check(
        f"{where(path, line)}: {complaint}"
        for path in MODULES
        for line, imported in imports(path)
        for complaint in import_complaints(module_name(path), imported)
    )


@functools.cache
def import_graph():
    """Return module -> modules of hastore that it imports, also in a function or for types only."""
    graph = {module_name(path): set() for path in MODULES}
    for path in MODULES:
        for _, imported in imports(path):
            if imported.partition(".")[0] == "hastore":
                below = imported.removeprefix("hastore").removeprefix(".")
                if below not in graph:  # a name in a module, or in hastore itself
                    below = below.rpartition(".")[0] or "__init__"
                graph[module_name(path)].add(below)
    return graph


def find_circle(graph):
    """Return the modules of one circle, from the first to the first again; None without one."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        return circle.args[1]
    return None


def test_no_two_files_import_each_other():
    graph = {module: set(found) for module, found in import_graph().items()}
    assert graph["cli.main"] == {"__init__", "cli.common"}
    assert find_circle(graph) is None
    graph["cli.common"].add("cli.main")
    assert {"cli.common", "cli.main"} <= set(find_circle(graph))


def test_each_package_is_in_the_table_of_packages():
    named = {".".join(path.relative_to(PACKAGE).parts) for path in PACKAGES}
    held = {package_of(module) for module in import_graph() if module not in named}
    empty = named - held  # a package of packages, such as dledger
    assert {package.name for package in TABLE} == named - empty, "see tests/packages.py"
    assert all(any(one.startswith(name + ".") for one in named) for name in empty)


def test_packages_import_only_those_before_them():
    rows = {package.name: row for row, package in enumerate(TABLE)}
    names = {".".join(path.relative_to(PACKAGE).parts) for path in PACKAGES}  # their public names
    check(
        f"{module} imports {imported}, whose package comes later in tests/packages.py"
        for module, found in import_graph().items()
        for imported in sorted(found)
        if module not in names
        and rows.get(package_of(imported), -1) > rows.get(package_of(module), 99)
    )


def test_each_import_of_the_table_of_packages_is_used():
    used = {}
    for module, found in import_graph().items():
        used.setdefault(package_of(module), set()).update(found)
    check(
        f"{package.name} does not import {listed}"
        for package in TABLE
        for listed in package.imports
        if not any(fits(one, (listed,)) for one in used[package.name])
    )


def functions(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return (node for node in nodes(path) if isinstance(node, kinds))


def test_functions_are_short():
    check(
        f"{where(path, node.lineno)}: {node.name} has {length} lines"
        for path in MODULES
        for node in functions(path)
        if (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    )


def test_lines_are_short():
    check(
        f"{where(path, number)}: {len(line)} columns"
        for path in ALL_PYTHON
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > MAX_COLUMNS
    )


def test_no_failure_is_swallowed():
    check(
        f"{where(path, node.lineno)}: bare except"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    )


def test_whoever_decodes_catches_all_that_unreadable_bytes_raise():
    """Else a byte that is not UTF-8, or deep nesting, ends the thread of whoever reads it."""
    check(
        f"{where(path, node.lineno)}: except {names}: write UNREADABLE (hastore/errors.py)"
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        if "msgspec.DecodeError" in (names := ast.unparse(node.type))
        if not ("UnicodeDecodeError" in names and "RecursionError" in names)
    )


def evaluates(node):
    """Return what turns text into code or objects: a call of eval, or an unsafe YAML loader."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        name = node.func.id
        return name if name in ("eval", "exec", "compile", "__import__") else None
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        name = f"{node.value.id}.{node.attr}"
        return name if name in ("yaml.load", "yaml.unsafe_load") else None
    return None


def test_nothing_is_evaluated():
    check(
        f"{where(path, node.lineno)}: {name}"
        for path in MODULES
        for node in nodes(path)
        if (name := evaluates(node))
    )


# Who sets a callback of an object that another made: server/callbacks.py says why each comes last.
SETS_CALLBACKS = {
    "server.callbacks": {"on_append", "on_flushed", "on_superseded", "on_promise", "on_change",
                         "on_persisted", "on_role", "after_done", "on_readable", "on_cut",
                         "on_delayed", "on_damage", "on_wrong", "on_blocked_cut",
                         "on_blocked_replay", "on_opening", "on_lost_end"},
}  # fmt: skip
CALLBACKS_OF = ("server", "ha", "dledger", "store", "registry")


def callbacks_set(path):
    """Yield (line, name) of each callback that a file sets on another object than `self`."""
    for node in nodes(path):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if not isinstance(target, ast.Attribute) or ast.unparse(target.value) == "self":
                continue
            if re.match(r"(on|after|before)_", target.attr):
                yield node.lineno, target.attr


def test_callbacks_are_given_to_constructors():
    found = {
        (module_name(path), name): where(path, line)
        for path in MODULES
        if fits(module_name(path), CALLBACKS_OF)
        for line, name in callbacks_set(path)
    }
    known = {(module, name) for module, names in SETS_CALLBACKS.items() for name in names}
    check(
        f"{found[module, name]}: {name} is set after its object was made: give it to the"
        " constructor, or connect it in server/callbacks.py"
        for module, name in found.keys() - known
    )
    assert known <= found.keys(), f"no longer set: {known - found.keys()}"


def opens_file(node):
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "open"
    from_module = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
    return from_module and node.func.value.id in ("os", "shutil") and node.func.attr in FILE_CALLS


def test_files_are_reached_through_the_shim():
    check(
        f"{where(path, node.lineno)}: files only through fs/filesystem.py"
        for path in MODULES
        if not fits(module_name(path), FILE_ACCESS)
        for node in nodes(path)
        if opens_file(node)
    )


def undocumented(path):
    """Yield (line, name) of the public modules, classes, functions and methods of a file."""
    tree = parse(path)
    if tree.body and not ast.get_docstring(tree):
        yield 1, "the module"
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in tree.body:
        public = [node]
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            public += [one for one in node.body if isinstance(one, ast.FunctionDef)]
        for one in public:
            if not isinstance(one, kinds) or one.name.startswith("_"):
                continue
            setter = any(ast.unparse(d).endswith("setter") for d in one.decorator_list)
            if not setter and not ast.get_docstring(one):
                yield one.lineno, one.name


def test_public_modules_classes_and_functions_have_docstrings():
    check(
        f"{where(path, line)}: {name} has no docstring"
        for path in MODULES
        for line, name in undocumented(path)
    )


def test_the_package_has_no_unfinished_work():
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplemented\b(?!Error)")
    check(
        f"{where(path, number)}: {line.strip()}"
        for path in MODULES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line) and "return NotImplemented" not in line
    )


def test_the_modules_that_run_first_exist():
    """Else one that was renamed would run last, and a worker alone with it."""
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_documents_that_comments_name_exist():
    named = re.compile(r"\b([A-Za-z][A-Za-z0-9_/-]*\.md)\b")
    check(
        f"{path.relative_to(ROOT)}: there is no document {name}"
        for path in (*ALL_PYTHON, *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
        for name in named.findall(path.read_text())
        if not any((base / name).exists() for base in (ROOT, ROOT / "docs", path.parent))
    )


def test_modules_that_comments_and_documents_name_exist():
    names = re.compile(r"(?<![\w*{./-])([\w/]+\.py)\b")
    elsewhere = {"daemon.py", "data_source_pushdown_filters.py"}  # of pyspark
    tests = list((ROOT / "tests").rglob("*.py"))
    there = {"setup.py", *(path.relative_to(ROOT).as_posix() for path in (*MODULES, *tests))}
    for folder in ("benchmarks", "deploy"):
        there |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
    texts = (*MODULES, *(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    check(
        f"{where(path, number)}: there is no {name}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for name in names.findall(line)
        if name not in elsewhere
        and not any(one == name or one.endswith(f"/{name}") for one in there)
    )


def test_no_merge_is_half_done():
    marks = ("<" * 7 + " ", ">" * 7 + " ")
    check(
        where(path, number)
        for path in (*ALL_PYTHON, *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if line.startswith(marks)
    )


def is_bare_thread(node):
    """Return whether a node makes or imports a thread or a pool that is not a Service."""
    if isinstance(node, ast.Attribute):
        owner = getattr(node.value, "id", "")
        threads = (("threading", "Thread"), ("threading", "Timer"), ("_thread", "start_new_thread"))
        return (owner, node.attr) in threads or node.attr == "ThreadPoolExecutor"
    if not isinstance(node, ast.ImportFrom):
        return False
    pools = any(each.name.endswith("Executor") for each in node.names)
    return node.module in ("threading", "_thread") or (
        node.module == "concurrent.futures" and pools
    )


def test_threads_are_services():
    check(
        f"{where(path, node.lineno)}: use a Service"
        for path in MODULES
        if module_name(path) not in BARE_THREADS
        for node in nodes(path)
        if is_bare_thread(node)
    )
