"""The packages of hastore: what each owns and which modules it may import, from the ground up.

`tests/test_style.py` holds the code against this table. `python -m tests.packages` writes the table
of docs/architecture.md from it.
"""

import functools
import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = (
    "<!-- packages, written by: python -m tests.packages -->\n",
    "<!-- end of packages -->\n",
)
# What every package may import; the table does not repeat it.
COMMON = (
    *("errors", "bounded_log", "clock", "counters", "heap", "listeners"),
    *("service", "shares"),
    "addresses",
    "config.model",
)


class Package(NamedTuple):
    """A package: its modules may import its own, COMMON and `imports`, all of earlier packages."""

    name: str  # with dots
    owns: str
    imports: tuple[str, ...] = ()


TABLE = (
    Package("protocol", "the codecs: HA link, HELLO, ZMTP, remoting, client API. Pure"),
    Package("record", "the record format: layout, codec, entries, properties, hashes. Pure"),
    Package("fs", "access to files; tests replace it to inject faults. Private files"),
    Package(
        "config",
        "the configuration file, typed, with its checks",
        ("record.delays", "fs.private_files"),
    ),
    Package(
        "security",
        "identities, their keys and rights; the SCRAM exchange; the audit log; TLS: an"
        " engine without a socket, contexts, sockets; frames with a MAC; certificates; who makes"
        " room on a full port",
        ("config.checks", "fs.private_files", "fs.protocols"),
    ),
    Package(
        "registry",
        "roles and addresses in ZooKeeper: a node's own object, the addresses of a group"
        " for clients ([operations.md](operations.md#roles-in-zookeeper))",
        ("fs", "security.tls_contexts", "security.tls_engine"),
    ),
    Package(
        "store.state",
        "the small state files: limits page, checkpoint, `abort`, lock, progress of replay",
        ("fs",),
    ),
    Package(
        "store.log",
        "the commit log: mapped files, allocation, syncs, recovery",
        ("record", "fs", "store.state.limits", "store.state.entry_state"),
    ),
    Package(
        "store.derived",
        "what is derived from the log: consume queues and key index, the walks that read"
        " records out of its bytes, and the contract between them and replay",
        ("record", "fs", "store.state.crc_frame", "store.state.time_falls"),
    ),
    Package(
        "store.append",
        "the master's append: validation, deduplication, queue offsets, uniform batches",
        ("record", "fs", "store.state.crc_frame", "store.log", "store.derived.contract"),
    ),
    Package(
        "store",
        "`LogStore`: opens, composes, cuts and closes a store; `MessageStore` and"
        " `EntryMessageStore`: how bytes get into it in mode classic and dledger; replay and its"
        " throttle; pulls; retention; archives of cut bytes",
        ("record", "fs", "store.state", "store.log", "store.derived", "store.append"),
    ),
    # Another process may own the store: nothing that appends to it or replays it.
    Package(
        "store.offline",
        "a reader of a store's folder for other processes: `hastore log`, Spark",
        ("record", "fs", "store.state", "store.derived"),
    ),
    # It writes what replay writes, to files of its own, and locks a store to put them in place.
    Package(
        "store.rebuild",
        "queues and key index of a store built anew from its log, in parallel, for"
        " `hastore pipeline index`",
        ("record", "fs", "store.state", "store.derived", "store.offline"),
    ),
    Package(
        "ha.rules",
        "the decisions: counting of reports, epochs, promotion, following. Pure",
        ("protocol.hello",),
    ),
    Package(
        "ha.node",
        "a node's identity, durable state and write gate; `ReplicaLog`, the only way in which `ha/`"
        " reaches the store",
        ("protocol", "fs", "security.tls_contexts", "store.message_store", "ha.rules"),
    ),
    Package(
        "ha.replica",
        "changes of a replica's log: digests, receiving, rewind",
        ("protocol", "ha.rules", "ha.node"),
    ),
    Package(
        "ha.hello",
        "the HELLO exchange: connections that the HA port accepts, calls, answers, surveys; links"
        " on which requests of clients are forwarded",
        (
            *("protocol", "security.tls_contexts", "security.tls_engine", "security.tls_socket"),
            *("security.slots", "security.sealed_socket"),
            *("ha.rules", "ha.node", "ha.replica.digests"),
        ),
    ),
    Package(
        "ha.master",
        "the master's side: connections, streams, reports, waiting puts",
        (
            *("protocol", "security.tls_socket", "ha.rules", "ha.node", "ha.replica.digests"),
            *("security.slots", "security.sealed_socket", "ha.hello"),
        ),
    ),
    Package(
        "ha.slave",
        "the slave's side: link, stream, CRC check; the classic link",
        (
            *("protocol", "record", "security.tls_socket", "ha.rules", "ha.node", "ha.replica"),
            "ha.hello",
        ),
    ),
    Package(
        "ha",
        "`Promoter`: one attempt at a promotion, and the copy of missing bytes",
        (
            *("protocol", "security.tls_socket", "ha.rules", "ha.node", "ha.replica"),
            "ha.hello.peer",
        ),
    ),
    # The state machine knows its messages and nothing else; its store knows what it appends.
    Package(
        "dledger.core",
        "the rules of the DLedger mode as one state machine: election, dispatching,"
        " commits, members, reads. Pure ([dledger.md](dledger.md))",
        ("protocol.dledger",),
    ),
    Package(
        "dledger.links",
        "the links between the nodes of a DLedger group: HELLO, frames, who is a member",
        (
            *("protocol", "security.tls_contexts", "security.tls_socket", "ha.rules.following"),
            *("security.slots", "security.sealed_socket", "ha.node.node_state", "ha.hello"),
            "ha.master.link_writer",
        ),
    ),
    Package(
        "dledger.store",
        "the entry stores of the DLedger mode, in files and in memory; hard state",
        (
            *("protocol.dledger", "record", "fs", "dledger.core.events"),
            "store.append.results",
            *("store.log_store", "store.message_store"),
            "store.entry_message_store",
        ),
    ),
    Package(
        "dledger.driver",
        "`DLedgerDriver`: the DLedger core over a store, links and clocks; requests of an"
        " administrator",
        (
            *("protocol", "fs", "store.append.results"),
            "ha.master.group_transfer",
            *("dledger.core", "dledger.links", "dledger.store"),
        ),
    ),
    Package(
        "client",
        "what the clients share: checks of arguments, messages and results, how a client"
        " proves who it is, how it ends",
        ("protocol.api", "record", "security.identity"),
    ),
    Package(
        "client.connections",
        "a client's connections: plain sockets or libzmq, which node is the master,"
        " requests in steps that never block",
        (
            *("protocol", "fs.private_files", "security", "client"),
            *("registry.group_watch", "registry.cluster_watch", "registry.session"),
        ),
    ),
    Package(
        "client.consumer",
        "`Consumer`, `Positions`, `Admin`: fetch from replicas, commit positions, ask nodes",
        ("protocol", "record", "client", "client.connections"),
    ),
    Package(
        "client.producer",
        "`Producer`: queue messages, send them in batches, settle their Futures",
        ("protocol.api", "record", "client", "client.connections"),
    ),
    Package(
        "aio",
        "the clients for asyncio: the same cores on an event loop",
        (
            *("protocol.api", "client", "client.connections", "client.consumer"),
            "client.producer",
        ),
    ),
    # The node may be down, so nothing of a running one; another node is asked as a client asks it.
    Package(
        "repair",
        "damaged bytes of a log replaced by those of another node, in place",
        (
            *("protocol.api", "record", "fs", "store.state", "store.offline.log_files"),
            *("ha.rules.epochs", "ha.node.node_state"),
            *("client.security", "client.connections.requester"),
        ),
    ),
    # The node is behind ApiBackend; of the store only what a put takes and returns is known.
    Package(
        "server.api",
        "the client API: connections, handlers, replies; the records of committed"
        " positions. It reaches the node only through `server/api/backend.py`",
        (
            *("protocol", "record", "security", "ha.rules", "ha.master.group_transfer"),
            *("store.append.results", "store.message_store"),
        ),
    ),
    Package(
        "server.remoting",
        "RocketMQ's own clients, on the port of the client API: one handler for each kind of"
        " request",
        (
            *("protocol", "record", "config.checks", "security", "store.message_store", "ha.hello"),
            *("ha.rules", "store.append.results"),
            "server.api",
        ),
    ),
    Package(
        "server.metrics",
        "what /metrics shows of a node: the catalog of its metrics, and where each comes from",
        (
            *("protocol.committed_positions", "fs.filesystem", "security", "store.log_store"),
            "server.api.server",
        ),
    ),
    Package(
        "server",
        "`Node`, `DLedgerNode`: compose, connect and start a node of either mode; its backend, as"
        " API and HTTP see it; `RoleService`: follows the file, or ZooKeeper, and the"
        " group, promotes and demotes; retention, and the committed positions that it must"
        " keep; the HTTP port",
        (
            *("protocol", "record", "fs", "config", "security", "registry"),
            "store.append.results",
            *("store.log_store", "store.message_store"),
            *("store.state.marker_files", "store.derived.consume_queue"),
            "repair.mending",
            *("ha", "dledger", "server.api", "server.remoting", "server.metrics"),
        ),
    ),
    Package(
        "spark.arrow",
        "Arrow batches from raw records, column by column",
        ("record",),
    ),
    Package(
        "spark.options",
        "what a query asks for: options, offsets, times, ranges of its tasks",
        ("record.layout", "record.message_filter"),
    ),
    Package(
        "spark.read",
        "ranges of a store's folder or of running nodes, and the plan which to read",
        (
            *("protocol.api", "record", "store.offline.reader", "ha.rules.epochs", "client"),
            *("spark.arrow", "spark.options"),
        ),
    ),
    Package("spark.sink", "each row of a write once", ("record", "client", "spark.options")),
    Package(
        "spark",
        "the Spark data source: what Spark and users call; streams",
        (
            *("ha.rules.epochs", "spark.arrow", "spark.options", "spark.read"),
            "spark.sink",
        ),
    ),
    Package(
        "pipeline",
        "the jobs of `hastore pipeline` as functions over a Spark session",
        ("fs", "store.rebuild", "client", "spark"),
    ),
    # Two logs compared: raw files and limits of folders, the digests of nodes.
    Package(
        "pipeline.audit",
        "the job `audit`: two logs compared by digest",
        (
            *("protocol.api", "record", "fs.filesystem", "store.state.limits"),
            *("store.offline", "client", "pipeline"),
        ),
    ),
    # Another process may own the store: it reads one, and makes another.
    Package(
        "backup",
        "backups of a node's store: taken while it runs, checked, restored as a new node",
        (
            *("record", "fs", "store.state", "store.offline.log_files"),
            *("ha.rules.epochs", "ha.node.node_state"),
            *("dledger.core.events", "dledger.store.hard_state"),
        ),
    ),
    # Events in, findings out: the tests of all modes judge by it.
    Package("history.rules", "what was promised, judged over a history of events. Pure"),
    Package(
        "history",
        "histories of what clients saw: the recorder, files, the log of a store",
        ("record", "store.offline.reader", "client", "history.rules"),
    ),
    Package(
        "demo",
        "the parts of `hastore demo`; the command itself is in `cli/`",
        (
            *("config.checks", "fs", "record.codec", "client.messages"),
            *("client.producer.producer", "store.offline.reader", "history", "spark.session"),
        ),
    ),
    Package(
        "cli",
        "the command line: each module parses one command and prints its results",
        (
            *("protocol", "record.properties", "record.topic_records", "record.compression"),
            *("record.delays", "record.layout", "record.message_filter"),
            *("fs", "config", "security", "backup", "repair", "dead_letters"),
            *("registry.editing", "store.cuts", "store.offline", "store.state.entry_state"),
            *("store.state.limits", "store.state.marker_files"),
            *("ha.hello.peer", "dledger.driver.requests", "client", "server.run", "demo"),
            *("server.recover_group", "history"),
        ),
    ),
    # Groups of real nodes, which the commands start, flip and ask.
    Package(
        "testing",
        "`hastore.testing`: real groups for the tests of applications, and `hastore dev`",
        ("config.file", "cli", "fs.private_files"),
    ),
    # The commands of the jobs; they start Spark by calling pipeline.
    Package(
        "cli.pipeline",
        "the commands of `hastore pipeline`",
        ("fs", "pipeline", "cli.common", "cli.main"),
    ),
)
# Modules with a rule of their own, instead of their package's: what they may import.
MODULES = {
    "errors": (),
    "clock": (),
    "counters": (),
    "heap": (),
    "listeners": (),
    "service": (),
    "shares": (),
    "bounded_log": ("clock",),
    "addresses": ("errors",),
    "__init__": ("client",),  # the public names
    "dead_letters": ("clock", "errors", "record", "client"),  # over the clients
    "__main__": ("cli.main",),
    "pytest_plugin": ("testing",),
    "otel": ("__init__", "aio", "client", "client.producer", "errors"),  # not imported by others
    "fs.protocols": ("errors",),
    "repair.mending": ("errors", "record", "ha.rules.epochs"),  # a running node uses it too
    "config.model": (),
    "security.scram": ("errors",),
    "security.identity": ("security.scram",),  # all that a client without identities loads
    "security.identity_file": (
        *("config.checks", "config.model", "errors", "security.identity", "security.scram"),
    ),
    "security.tls_engine": ("errors", "security"),
    "store.state.crc_frame": (),
    "store.derived.contract": ("errors", "record"),
    "store.derived.scalar_walk": ("errors", "record", "store.derived"),
    "store.derived.vector_walk": ("errors", "record", "store.derived"),
    "store.derived.column_batch": ("errors", "record", "store.derived"),
    # Reading knows nothing of what appends, replays or removes.
    "store.message_reader": (
        *("clock", "errors", "record", "fs", "store.derived"),
        *("store.log.commit_log", "store.log.record_walk", "store.state.time_falls"),
    ),
    # The only module of ha that imports the store.
    "ha.node.replica_log": ("errors", "store.message_store"),
    "ha.node.gate": ("errors",),
    "ha.node.member": (*COMMON, "protocol", "security.tls_contexts", "ha.rules", "ha.node"),
    "ha.node.node_state": (*COMMON, "fs", "ha.rules", "ha.node"),
    # The only module of ha that knows the record format.
    "ha.slave.crc_check": ("errors", "ha.node.replica_log", "record"),
    "ha.slave.slave_stream": (
        *(*COMMON, "protocol", "security.tls_socket", "ha.rules", "ha.node", "ha.replica"),
        *("ha.hello", "ha.slave"),
    ),
    "client": ("client",),  # the names
    "client.arguments": ("clock", "errors", "protocol.api", "record.compression"),
    "client.lifecycle": ("errors",),
    "client.messages": ("errors", "protocol.api", "record"),
    "client.security": ("errors", "client.arguments", "security.identity"),
    # Only the records of committed positions know the store.
    "server.api.backend": (
        *(*COMMON, "protocol", "record", "ha.rules", "ha.master.group_transfer"),
        *("store.append.results", "server.api"),
    ),
    "cli.main": ("cli.common",),
}
# Modules that only compute: time and bytes are arguments.
PURE = (
    *("protocol", "record", "addresses", "config.checks"),
    *("registry.entry", "security.scram", "security.identity", "security.identity_file"),
    *("security.certificates", "security.tls_engine", "security.rocketmq_acl"),
    *("ha.rules", "ha.replica.rewind", "dledger.core"),
    *("store.derived.contract", "store.derived.scalar_walk", "store.derived.vector_walk"),
    *("store.derived.column_batch", "store.state.crc_frame", "backup.items", "history.rules"),
)


def fits(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the prefixes or below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@functools.cache
def package_of(module: str) -> str:
    """Return the package that has a module; the module itself if it is in none."""
    names = [package.name for package in TABLE if fits(module, (package.name,))]
    return max(names, key=len, default=module)


@functools.cache
def allowed(module: str) -> tuple[str, ...]:
    """Return the prefixes of what a module may import."""
    if module in MODULES:
        return MODULES[module]
    package = next(one for one in TABLE if one.name == package_of(module))
    common = ("errors", "addresses", "config.model") if fits(module, PURE) else COMMON
    return (*common, *package.imports, package.name)


def table() -> str:
    """Return the table of docs/architecture.md: the packages from the ground up."""
    lines = ["| package | owns | imports |", "|---|---|---|"]
    for package in TABLE:
        imported = dict.fromkeys(package_of(one).replace(".", "/") for one in package.imports)
        cells = ", ".join(f"`{one}`" for one in imported) or "nothing else"
        lines.append(f"| `{package.name.replace('.', '/')}/` | {package.owns} | {cells} |")
    return "\n".join(lines) + "\n"


def written(text: str) -> str:
    """Return the document with the table as it must be."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
