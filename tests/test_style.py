"""Check the house rules (CONTRIBUTING.md): who imports whom, sizes, forbidden calls, docstrings."""

import ast
import functools
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hastore"
MODULES = sorted(PACKAGE.rglob("*.py")) + sorted((ROOT / "pyspark_hastore").rglob("*.py"))
PACKAGES = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
ALL_PYTHON = MODULES + sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "bin").iterdir())

MAX_FUNCTION_LINES = 70
MAX_COLUMNS = 100

COMMON = ("errors", "bounded_log", "clock", "heap", "service", "config.model")
_STORE_BASE = (*COMMON, "record", "store.fs")
_LINK_TLS = (
    *("security.node_name", "security.tls_contexts", "security.tls_engine"),
    "security.tls_socket",
)
_HA_BASE = (*COMMON, "protocol", "ha.rules", "ha.node", *_LINK_TLS)
_CLIENT_BASE = (
    *(*COMMON, "protocol", "record"),
    *("client.arguments", "client.lifecycle", "client.messages", "client.results"),
    "client.security",
)
# Prefix of a module (the longest that fits counts) -> prefixes of hastore modules that it may
# import.
MAY_IMPORT = {
    "": COMMON,
    "__init__": ("client",),  # the public names
    "__main__": ("cli.main",),
    "errors": (),
    "bounded_log": ("clock",),
    "clock": (),
    "heap": (),
    "service": (),
    "config": ("config", "errors", "security.files"),
    "config.model": (),
    "config.addresses": (),
    "config.checks": ("config.addresses", "config.model", "errors", "registry.address"),
    "config.values": ("config.checks", "config.model"),
    # Who may do what. Pure, but for the files that it reads and the service that reads them again.
    "security": ("clock", "errors", "config.model", "security"),
    "security.identities": ("clock", "errors", "service", "security"),
    "security.identity_reader": ("service",),
    "security.audit_log": ("clock", "errors", "service", "store.fs.protocols"),
    "security.scram": ("errors",),
    "security.identity": ("security.scram",),
    "security.identity_file": (
        *("config.checks", "errors", "security.identity", "security.scram"),
    ),
    "security.files": ("errors",),
    "protocol": ("errors", "protocol"),
    "record": ("errors", "record"),
    # Roles and addresses in ZooKeeper; what a role means is decided elsewhere.
    "registry": (*COMMON, "store.fs", "registry", "security.tls_contexts", "security.tls_engine"),
    "registry.address": ("config.addresses", "errors"),
    "registry.entry": ("config.addresses", "config.model", "errors"),
    # A module beside the packages composes them.
    "store": (*("clock", "config.model", "errors", "service"), "record", "store"),
    # Reading knows nothing of what appends, replays or removes.
    "store.message_reader": (
        *("clock", "errors", "record", "store.fs", "store.derived"),
        *("store.log.commit_log", "store.log.record_walk"),
    ),
    "store.fs": ("errors", "store.fs"),
    "store.state": ("errors", "store.fs", "store.state"),
    "store.log": (
        *("clock", "errors", "service", "record", "store.fs", "store.log"),
        *("store.state.limits", "store.state.entry_state"),
    ),
    "store.derived": (*_STORE_BASE, "store.derived"),
    "store.derived.contract": ("errors", "record"),
    "store.derived.walk": ("errors", "record", "store.derived.contract", "store.derived.walk"),
    "store.derived.index": (
        *("clock", "record", "store.derived.contract", "store.derived.walk.scalar_walk"),
        *("store.derived.index", "store.fs"),
    ),
    "store.derived.queues": (
        *("record.layout", "store.derived.contract", "store.derived.queues", "store.fs"),
    ),
    "store.append": (
        *(*_STORE_BASE, "store.log", "store.derived", "store.append"),
        "store.state.crc_frame",
    ),
    "store.replay": (*_STORE_BASE, "store.state", "store.derived", "store.replay"),
    # Another process may own the store: nothing that appends to it or replays it.
    "store.offline": (*_STORE_BASE, "store.state", "store.derived", "store.offline"),
    # It writes what replay writes, to files of its own, and locks a store to put them in place.
    "store.rebuild": (
        *(*_STORE_BASE, "store.state", "store.derived", "store.offline"),
        "store.rebuild",
    ),
    "ha": (),  # its packages have the modules
    "ha.rules": ("protocol.hello", "ha.rules"),
    # Only replica_log imports the store; store.fs is for the node's own state file.
    "ha.node": (
        *(*COMMON, "protocol", "ha.rules", "ha.node", "store.fs"),
        "security.tls_contexts",
    ),
    "ha.node.replica_log": ("errors", "store.message_store"),
    "ha.replica": (*_HA_BASE, "ha.replica"),
    "ha.hello": (*_HA_BASE, "ha.replica.digests", "ha.hello"),
    "ha.master": (*_HA_BASE, "ha.replica.digests", "ha.hello", "ha.master"),
    "ha.slave": (*_HA_BASE, "ha.replica", "ha.hello", "ha.slave"),
    "ha.slave.crc_check": ("errors", "ha.node.replica_log", "record"),  # the record format
    "ha.promotion": (
        *(*_HA_BASE, "ha.replica", "ha.promotion"),
        *("ha.hello.peer", "ha.hello.survey"),
    ),
    # The state machine knows its messages and nothing else; its store knows what it appends.
    "dledger": (),
    "dledger.core": ("errors", "protocol.dledger", "protocol.dledger_ranges", "dledger.core"),
    "dledger.links": (
        *(*COMMON, "protocol", "ha.hello", "ha.master.accept_socket_service"),
        *("ha.master.send_file", "ha.node.node_state", "ha.rules.following", "dledger.links"),
        *_LINK_TLS,
    ),
    "dledger.driver": (
        *(*COMMON, "protocol", "store.fs", "store.append.results", "store.message_store"),
        *("ha.node.node_state", "ha.master.group_transfer", "dledger"),
    ),
    "dledger.store": (
        *(*COMMON, "record", "protocol.dledger", "dledger.core.events", "dledger.store"),
        *("store.append.results", "store.fs", "store.message_store", "store.entry_message_store"),
    ),
    "client": (*_CLIENT_BASE, "client.admin", "client.consumer", "client.producer"),  # the names
    "client.arguments": ("clock", "errors"),
    "client.lifecycle": ("errors",),
    "client.messages": ("errors", "protocol.api", "record"),
    "client.results": ("errors", "protocol.api", "record", "client.messages"),
    "client.core": ("errors", "client.connections", "client.lifecycle"),
    "client.admin": (*_CLIENT_BASE, "client.connections", "client.core"),
    "client.security": ("errors", "client.arguments", "security.identity"),
    "client.connections": (
        *(*COMMON, "protocol", "client.arguments", "client.connections"),
        *("client.security", "security"),
        *("registry.address", "registry.group_watch", "registry.tls"),
    ),
    "client.consumer": (*_CLIENT_BASE, "client.connections", "client.core", "client.consumer"),
    "client.producer": (*_CLIENT_BASE, "client.connections", "client.producer"),
    "aio": (*COMMON, "aio", "client", "protocol.api"),
    "server": (
        *(*COMMON, "config.addresses", "config.checks", "config.file"),
        *("protocol", "record", "registry", "server"),
        *("ha.master", "ha.node", "ha.replica.rewind", "ha.rules"),
        *("store.append.results", "store.fs", "store.message_store", "store.other_log"),
        *("security", "dledger"),
    ),
    # The node is behind ApiBackend; of the store only what a put returns is known.
    "server.api": (
        *(*COMMON, "config.addresses", "protocol", "record", "server.api", "server.positions"),
        *("ha.master.group_transfer", "ha.rules", "security"),
        "store.append.results",
    ),
    "server.positions": (
        *(*COMMON, "protocol", "record", "server.positions", "store.message_store"),
    ),
    "server.roles": (*COMMON, "protocol", "ha", "store.fs", "server.roles"),
    "server.roles.registry_roles": (
        *(*COMMON, "config.checks", "ha.promotion.promoter", "store.fs"),
        *("registry", "server.roles.one_shot_flags"),
    ),
    "server.retention": (
        *(*COMMON, "protocol", "record", "server.retention", "server.positions"),
        *("store.fs", "store.message_store"),
    ),
    "server.http": (
        *(*COMMON, "config.addresses", "server.http"),
        *("security.audit_log", "security.identities", "security.tokens"),
        *("security.tls_contexts", "security.tls_engine"),
    ),
    # The top of the package: what Spark and users call. It composes the packages below.
    "spark": ("errors", "spark"),
    "spark.options": ("errors", "spark.options"),
    "spark.options.partitions": ("errors", "record.layout", "spark.options"),
    "spark.arrow": ("errors", "record", "spark.arrow"),
    "spark.read": (
        *("errors", "clock", "client", "record", "store.offline.reader"),
        *("ha.rules.history", "protocol.api"),
        *("spark.arrow", "spark.options", "spark.read"),
    ),
    "spark.stream": (
        *("errors", "clock", "ha.rules.history"),
        *("spark.options", "spark.read", "spark.stream"),
    ),
    "spark.sink": ("errors", "clock", "client", "record", "spark.options", "spark.sink"),
    # The jobs of `hastore pipeline`; they run on Spark.
    "pipeline": ("errors", "clock", "record", "client", "spark", "store.offline", "pipeline"),
    "pipeline.export": ("errors", "clock", "spark", "pipeline"),
    "pipeline.compact": ("errors", "clock", "client", "spark", "pipeline"),
    # Two logs compared: raw files and limits of folders, the digests of nodes.
    "pipeline.audit": (
        *("errors", "clock", "record", "client", "protocol.api", "pipeline"),
        *("store.fs.filesystem", "store.offline", "store.state.limits"),
        "spark.options.source_options",  # which security file the tasks use
    ),
    "pipeline.stats": ("errors", "clock", "client", "pipeline"),
    "pipeline.index": ("errors", "clock", "pipeline", "store.fs.filesystem", "store.rebuild"),
    "cli": (
        *("errors", "bounded_log", "clock", "config", "protocol.api", "record.properties"),
        *("client", "demo"),
        *("cli", "server.node", "store.fs.filesystem", "store.offline", "store.state.limits"),
        *("dledger.driver.request_file", "security.node_tls"),
        *("registry.address", "registry.editing"),  # `hastore promote`, `hastore demote`
    ),
    # The commands of the jobs; they start Spark by calling pipeline.
    "cli.pipeline": (*("errors", "clock", "cli.common", "cli.lazy", "cli.pipeline"), "pipeline"),
    "cli.keys": ("errors", "clock", "cli.common", "cli.lazy", "cli.keys", "security"),
    "cli.keys.certificates": ("errors", "clock", "cli.common", "config", "security"),
    "cli.peers": (
        *("clock", "config.model", "errors", "protocol", "ha.hello.peer"),
        "security.node_tls",
    ),
    "cli.doctor": (
        *("errors", "config", "cli", "protocol.hello", "security.node_tls"),
        *("store.fs.filesystem", "store.offline.log_files"),
        *("store.state.limits", "store.other_log"),
    ),
    # The parts of `hastore demo`; the command itself is in cli and imports them.
    "demo": (
        *("errors", "config.model", "config.values", "record.codec", "demo"),
        *("client.producer.producer", "client.results", "store.offline.reader"),
        *("spark.java_runtime", "spark.session"),
    ),
}
# Pure modules only compute: time and bytes are arguments.
PURE = (
    *("protocol", "record", "config.addresses", "config.checks", "config.values"),
    *("registry.address", "registry.entry"),
    *("security.scram", "security.identity", "security.identity_file"),
    *("ha.rules", "ha.replica.rewind", "dledger.core"),
    *("security.certificates", "security.node_name", "security.tls_engine"),
    *("store.derived.contract", "store.derived.walk", "store.state.crc_frame"),
)
IMPURE_IMPORTS = {"time", "socket", "os", "threading", "random", "select", "subprocess", "mmap"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
# Only spark may import these; only ONLY_ZMQ may import zmq. The core works without the extras.
ONLY_SPARK = {"pyspark", "pyarrow"}
ONLY_ZMQ = ("client.connections.zmq_transport",)
ONLY_KAZOO = ("registry.session",)
# Modules that may open files: the shim; the configuration and private files, which are not part of
# the store; the commands, the demo and Spark, which read and write files that the user names.
FILE_ACCESS = (
    *("store.fs.filesystem", "config.file", "security.files"),
    *("cli", "demo", "pipeline", "spark"),
)
FILE_CALLS = {
    *("open", "unlink", "remove", "rename", "replace", "mkdir", "makedirs", "rmdir", "truncate"),
    *("ftruncate", "fsync", "fdatasync", "pread", "pwrite", "listdir", "scandir", "rmtree"),
    *("posix_fallocate", "link", "symlink", "chmod"),
}


def module_name(path):
    """Return the name below hastore: "record.codec"."""
    if path.is_relative_to(PACKAGE):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
    return "spark.registration"


def fits(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@functools.cache
def parse(path):
    return ast.parse(path.read_text(), filename=str(path))


def imports(tree):
    """Yield (line, dotted name) of each import; `from x import y` is x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"


def allowed(name):
    prefixes = [prefix for prefix in MAY_IMPORT if not prefix or fits(name, (prefix,))]
    return MAY_IMPORT[max(prefixes, key=len)]


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
    near_spark = ("spark", "pipeline", "cli.pipeline", "demo.spark_check", "demo.spark_report")
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
    if top == "time" and not fits(name, ("clock", "cli", "demo", "pipeline", "spark")):
        yield "time comes from hastore.clock"


def test_imports_go_one_way():
    check(
        f"{where(path, line)}: {complaint}"
        for path in MODULES
        for line, imported in imports(parse(path))
        for complaint in import_complaints(module_name(path), imported)
    )


def import_graph():
    """Return module -> modules of hastore that it imports, also in a function or for types only."""
    graph = {module_name(path): set() for path in MODULES}
    for path in MODULES:
        for _, imported in imports(parse(path)):
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
    graph = import_graph()
    assert graph["cli.main"] == {"__init__", "cli.common", "cli.lazy"}
    assert find_circle(graph) is None
    graph["cli.common"].add("cli.main")
    assert set(find_circle(graph)) == {"cli.common", "cli.main"}


def test_each_package_has_its_own_import_rule():
    check(
        f"{path.relative_to(ROOT)}: no rule of its own in MAY_IMPORT"
        for path in PACKAGES
        if ".".join(path.relative_to(PACKAGE).parts) not in MAY_IMPORT
    )


def functions(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return (node for node in ast.walk(parse(path)) if isinstance(node, kinds))


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
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
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
        for node in ast.walk(parse(path))
        if (name := evaluates(node))
    )


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
        for node in ast.walk(parse(path))
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


def test_documents_that_comments_name_exist():
    named = re.compile(r"\b([A-Za-z][A-Za-z0-9_/-]*\.md)\b")
    check(
        f"{path.relative_to(ROOT)}: there is no document {name}"
        for path in (*ALL_PYTHON, *sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md")
        for name in named.findall(path.read_text())
        if not any((base / name).exists() for base in (ROOT, ROOT / "docs", path.parent))
    )
