"""`hastore doctor`: checks of a node, or with `--all` of its group, and the remedies.

Of a node whose file is on this machine file, store, ports, disk and peers are checked. Of another
what it says itself counts: its problems, its notes, and what is pending.
"""

import errno
import json
import os
import pathlib
import resource
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import click

from hastore.addresses import parse_address
from hastore.cli.common import (
    DONE,
    FAILED,
    print_json,
    print_text,
    with_config,
    with_json,
    with_overrides,
    with_security,
)
from hastore.cli.group_files import GroupFiles, Status
from hastore.cli.own_node import (
    RegistryPlace,
    ask_own,
    file_mismatch,
    of_each,
    pending_texts,
    registered,
)
from hastore.cli.status import SYNC_REFUSED, GroupAnswers, refusal_text
from hastore.client.connections.transport import NoAnswer, Quiet
from hastore.clock import SYSTEM_CLOCK
from hastore.config.checks import config_notes, human_size
from hastore.config.file import load_config
from hastore.config.model import Config, Mode, Wire
from hastore.errors import (
    AuthenticationError,
    ClassicPeerError,
    ConfigError,
    HastoreError,
    NotAuthenticatedError,
    StoreError,
)
from hastore.fs.filesystem import REAL
from hastore.ha.hello.peer import call
from hastore.listeners import listen
from hastore.protocol.ha_link import BODY_BYTES_MAX
from hastore.protocol.hello import NONCE_BYTES, Answer, Hello, Purpose, Refused, StoreKnown
from hastore.security.identities import load_identities
from hastore.security.identity_file import parse_identities
from hastore.security.tls_contexts import NodeTls
from hastore.store.offline.log_files import LogFiles
from hastore.store.state.entry_state import EntryState
from hastore.store.state.limits import read_limits
from hastore.store.state.marker_files import (
    is_store_name,
    ledger_name,
    other_log_problem,
    restore_problem,
)


def ask_peer(config: Config, node: int, address: str, timeout_ms: float) -> tuple[Hello, Answer]:
    """Return the HELLO of the node at `address`, which is to be `node`, and its answer to a survey.

    The survey has no epoch and no history, so the node does not act on it. In mode dledger it is
    the question of a new node, whether its number is known with another store: it changes nothing
    either. Raises OSError when the node does not answer, and AuthenticationError, ClassicPeerError
    or ProtocolError as `peer.call` does. A peer with another secret closes the connection, which
    raises ProtocolError.
    """
    path = config.ha.secret_file
    secret = None if path is None else pathlib.Path(path).read_bytes().strip()
    elects = config.mode is Mode.DLEDGER
    hello = Hello(
        purpose=Purpose.DLEDGER if elects else Purpose.SURVEY,
        mode=config.mode.value,
        new_store=elects,
        cluster=config.cluster,
        group=config.group,
        node=config.node,
        store_id=_store_id(config.store.root),
        role="" if config.role is None else config.role.value,
        open_epoch=0,
        promised_epoch=0,
        history=(),
        min_offset=0,
        max_offset=0,
        confirmed_offset=0,
        ack_point=config.ha.ack_point.value,
        unclean=False,
        largest_frame=BODY_BYTES_MAX,
        file_size=config.store.commitlog_file_size,
        nonce=secrets.token_bytes(NONCE_BYTES),
    )
    opened = call(
        address, hello, secret, SYSTEM_CLOCK, timeout_ms, NodeTls(config).ha,
        may_be_old=_may_be_old(config, node),
    )  # fmt: skip
    opened.close()
    return opened.hello, opened.answer


def _store_id(root: str) -> str:
    """Return the id of this node's store; a random one when the store does not exist yet."""
    state = _state(root)
    try:
        return secrets.token_hex(16) if state is None else str(state["store_id"])
    except (LookupError, TypeError) as failure:
        raise StoreError(f"{root} has no state of a node: {failure}") from failure


def _may_be_old(config: Config, node: int) -> bool:
    """Whether another node may be of the version before (NodeState.may_be_old)."""
    root = config.store.root
    state = _state(root)
    if config.mode is Mode.DLEDGER and EntryState(REAL, root).is_of_version_before():
        return True  # what node.json says is dropped at the next start (DLedgerNode)
    if state is None or state.get("proved_only"):
        return False
    return node not in state.get("proved_nodes", ())


def _state(root: str) -> Any:
    """Return what node.json has; None when the store does not exist yet."""
    path = pathlib.Path(root) / "hastore" / "node.json"
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as failure:
        raise StoreError(f"{path} cannot be read: {_why_and_remedy(failure)}") from failure
    except ValueError as failure:
        raise StoreError(
            f"{path} is not the state of a node: {failure}; restore it, or see "
            '"A dead disk" in docs/runbook.md'
        ) from failure


def _why_and_remedy(failure: OSError) -> str:
    """Return why a file or folder of the store cannot be looked at, and what to do."""
    why = failure.strerror or str(failure)
    if failure.errno in (errno.EACCES, errno.EPERM):
        return f"{why}; run the command as the node's user"
    return f'{why}; look at the disk (`dmesg`), and see "A dead disk" in docs/runbook.md'


MIN_FREE_FILES = 4  # free space to have, in log files: those allocated ahead, queues, index
_CONNECT_S = 1.0


class Severity(Enum):
    """How a check ended."""

    GOOD = "good"
    NOTE = "note"  # worth knowing, nothing to repair
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. If it is BAD, the text includes the remedy."""

    check: str
    verdict: Severity
    text: str


def check_node(path: str, config: Config) -> Iterator[Finding]:
    """Check a node and its surroundings; starts and changes nothing.

    `config` is the content of the file at `path`.
    """
    running: dict[str, Any] | None
    try:
        said = ask_own(config, config.node, _CONNECT_S)
        if isinstance(said, NoAnswer) and _may_run(config, said):
            node, running = _silent_node(config, said), {}
        else:
            running = None if isinstance(said, NoAnswer) else said
            node = _node(path, config, running)
    except NotAuthenticatedError as refused:
        node = Finding("node", Severity.BAD, str(refused))
        running = {}
    yield node
    for note in config_notes(config):
        yield Finding("config", Severity.NOTE, note)
    yield from _problems(path, config, running or {}, node.text)
    for one in (running or {}).get("name_servers", []):
        yield _name_server(one)
    for text in (running or {}).get("notes", []):
        yield Finding("note", Severity.NOTE, text.replace("-c FILE", f"-c {path}"))
    for text in pending_texts(path, running or {}):
        yield Finding("pending", Severity.NOTE, text)
    yield from _tls(config)
    if config.security.identities is not None:
        yield _identities(config.security.identities)
    if config.log.file is not None:
        yield _log_file(config.log.file)
    yield from _store(config, running is not None)
    if config.registry is not None:
        yield _registry(config, running)
    if running is None:
        yield from _ports(config)
    yield from _peers(registered(config))
    yield _descriptors()


def _may_run(config: Config, silence: NoAnswer) -> bool:
    """Whether a node that does not answer may run all the same: a process has its port here."""
    if silence.kind in (Quiet.REFUSED, Quiet.UNREACHABLE):
        return False
    failure = _why_not_bound(config, "api")
    return failure is not None and failure.errno == errno.EADDRINUSE


def _silent_node(config: Config, silence: NoAnswer) -> Finding:
    """Tell of a node whose port is taken and that does not answer."""
    text = (
        f"node {config.node} does not answer ({silence.text}), though a process has its port "
        f"{config.bound('api')}: the node hangs, is stopped or very busy, or another program is "
        "there; look at that process (`ss -ltnp`), at the disk (`dmesg`) and at `hastore status` "
        "before you start or promote a node"
    )
    return Finding("node", Severity.BAD, text)


def _node(path: str, config: Config, status: dict[str, Any] | None) -> Finding:
    if status is None:
        return Finding("node", Severity.NOTE, f"node {config.node} is not running")
    differs = file_mismatch(path, config, status)
    if differs is not None:
        remedy = "check the node's own file, or start the node with this one"
        return Finding("node", Severity.BAD, f"{differs}; {remedy}")
    reason = status.get("reason")
    elects = config.mode is Mode.DLEDGER
    word = "term" if elects else "epoch"
    text = f"node {config.node} runs as {status.get('role')}, {word} {status.get('epoch')}"
    leads = status.get("leader") in (None, config.node) if elects else (
        config.assigned_role.is_master
    )  # fmt: skip
    if reason and leads:
        return Finding("node", Severity.BAD, f"{text}, not writable: {reason}")
    refused = status.get("default_refused")
    if refused and status.get("writable"):
        what = "it takes puts with acks=1 only, and refuses those that do not set acks"
        return Finding("node", Severity.BAD, f"{text}; {what}: {refused}")
    return Finding("node", Severity.GOOD, text)


def _problems(
    path: str, config: Config, running: dict[str, Any], told: str
) -> Iterator[Finding]:
    """Tell the problems of the running node that have no line of their own.

    `told` is what is said of the node already.
    """
    elsewhere = {one["problem"] for one in running.get("name_servers", [])}
    for problem in running.get("problems", []):
        if problem in elsewhere or (config.registry is not None and "registry" in problem):
            continue
        if problem.removeprefix(f"{SYNC_REFUSED}: ") not in told:
            yield Finding("problem", Severity.BAD, problem.replace("-c FILE", f"-c {path}"))


def _tls(config: Config) -> Iterator[Finding]:
    if not config.security.uses_tls:
        return
    try:
        problems = NodeTls(config).problems()
    except ConfigError as wrong:
        yield Finding("tls", Severity.BAD, str(wrong))
        return
    for problem in problems:
        yield Finding("tls", Severity.NOTE, problem)
    if not problems:
        text = f"{config.security.certificate} is this node's, and valid"
        yield Finding("tls", Severity.GOOD, text)


def _identities(path: str) -> Finding:
    """Check the file of identities: its content, and who may read it."""
    try:
        found = parse_identities(load_identities(path).data, path).identities.values()
    except ConfigError as wrong:
        return Finding("identities", Severity.BAD, str(wrong))
    signing = sum(1 for one in found if one.secrets)
    text = f"{path} is for its user alone; it has {len(found)} identities"
    if signing:
        text += f", {signing} with secrets of RocketMQ's clients as they are: keep copies private"
    return Finding("identities", Severity.GOOD, text)


def _log_file(path: str) -> Finding:
    """Look whether the node could open its log file: it does not start without."""
    folder = os.path.dirname(os.path.abspath(path))
    problem = None
    if os.path.exists(path):
        if os.path.isdir(path):
            problem = "it is a folder"
        elif not os.access(path, os.W_OK):
            problem = f"uid {os.getuid()} may not write it"
    elif not os.path.isdir(folder):
        problem = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"uid {os.getuid()} may make no file in {folder}"
    if problem is None:
        return Finding("log", Severity.GOOD, f"{path} can be written")
    remedy = "name a file that the node's user may write, in a folder that exists"
    return Finding("log", Severity.BAD, f"log.file: {path} cannot be opened: {problem}; {remedy}")


def _store(config: Config, runs: bool) -> Iterator[Finding]:
    """Look at the store and its disk. What cannot be read is bad: only ENOENT means "not there"."""
    root = config.store.root
    try:
        folder = _nearest_folder(root)
        yield from _store_in(config, folder, runs)
    except StoreError as wrong:
        yield Finding("store", Severity.BAD, str(wrong))
    except OSError as failure:
        text = f"{failure.filename or root} cannot be read: {_why_and_remedy(failure)}"
        yield Finding("store", Severity.BAD, text)


def _nearest_folder(root: str) -> str:
    """Return the store's folder, or the one in which its folders are to be made.

    Raises StoreError if something else is there, OSError if that cannot be seen.
    """
    folder = root
    while True:
        try:
            there = stat.S_ISDIR(os.stat(folder).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            if not os.path.islink(folder):
                folder = os.path.dirname(folder)
                continue
            there = False  # the link leads nowhere
        if there:
            return folder
        raise StoreError(f"{folder} is no folder; move it away, or change store.root")


def _store_in(config: Config, folder: str, runs: bool) -> Iterator[Finding]:
    root = config.store.root
    if not os.access(folder, os.W_OK | os.X_OK):
        text = f"{folder} is not writable for uid {os.getuid()}; chown it, or change store.root"
        if os.statvfs(folder).f_flag & os.ST_RDONLY:
            text = (
                f"the disk of {folder} is mounted read-only, as the kernel does after an error: "
                "look at the disk (`dmesg`), and mount it anew, or change store.root"
            )
        yield Finding("store", Severity.BAD, text)
        return
    state = "exists" if folder == root else "is created at the first start"
    problem = (
        restore_problem(REAL, root)
        or other_log_problem(REAL, root, config.mode, config.node)
        or _state_problem(root)
        or _file_size_problem(config)
    )
    yield Finding("store", Severity.BAD if problem else Severity.GOOD, problem or f"{root} {state}")
    if folder == root:
        yield _privacy(config)
    free, needed = shutil.disk_usage(folder).free, MIN_FREE_FILES * config.store.commitlog_file_size
    files = f"{MIN_FREE_FILES} commit log files take {human_size(needed)}"
    text = f"{human_size(free)} free, {files}"
    # The size of the files is that of the log that is there, on every node of the group.
    other = "lower store.commitlog_file_size on every node"
    if _has_log(config):
        other = "set retention.max_size, which takes effect at once"
    remedy = f"; free space, or {other}"
    verdict = Severity.GOOD if free >= needed else Severity.NOTE if runs else Severity.BAD
    yield Finding("disk", verdict, text + (remedy if free < needed else ""))


def _privacy(config: Config) -> Finding:
    """Look whether other users can read the store, or change what is in its folder."""
    root, shared = config.store.root, config.store.group_read
    status, user = os.stat(root), os.geteuid()
    if user and status.st_uid not in (user, 0):  # root may look at the store of any user
        text = f"{root} belongs to user {status.st_uid}, who can change all that is in it"
        remedy = f"run this as the user of the node, or chown {user} {root}"
        return Finding("privacy", Severity.BAD, f"{text}; {remedy}")
    # A volume of a container belongs to root, and the node writes there by a group of its own.
    by_group = bool(user) and user != status.st_uid and _in_group(status.st_gid)
    if status.st_mode & (0o002 if by_group else 0o022):
        remedy = f"run chmod {'o' if by_group else 'go'}-w {root}"
        if user not in (0, status.st_uid) and not by_group:  # it needs that right itself, so far
            remedy = f"as root, run chown {user} {root}, then chmod go-w {root}"
        text = f"{root} can be changed by other users; {remedy}"
        return Finding("privacy", Severity.BAD, text)
    opened = _open_to_others(root, 0o027 if shared else 0o077)
    if opened:
        mode = "g-w,o-rwx" if shared else "go-rwx"
        text = f"other users may read {', '.join(opened)}"
        remedy = f"run chmod {mode} {' '.join(opened)}"
        if not any(os.path.islink(path) for path in opened):  # the node follows no link
            remedy = f"start the node, which closes them, or {remedy}"
        return Finding("privacy", Severity.BAD, f"{text}; {remedy}")
    if by_group and status.st_mode & 0o020:
        text = f"{root} can be changed by group {status.st_gid}, as which this user writes there"
        remedy = "let nobody else be in that group"
        return Finding("privacy", Severity.NOTE, f"{text}; {remedy}")
    who = "the node's user and group" if shared else "the node's user alone"
    return Finding("privacy", Severity.GOOD, f"what is in {root} is for {who}")


def _in_group(group: int) -> bool:
    return group in {os.getegid(), *os.getgroups()}


def _open_to_others(root: str, excess: int) -> list[str]:
    """Return what is the store's in its root, and has one of these rights; links are followed."""
    paths = [f"{root}/{name}" for name in REAL.list_dir(root) if is_store_name(name)]
    return [path for path in paths if os.path.exists(path) and os.stat(path).st_mode & excess]


def _has_log(config: Config) -> bool:
    """Whether the store has a log, whose files have their size for good."""
    if config.mode is Mode.DLEDGER:
        return REAL.is_dir(f"{config.store.root}/{ledger_name(config.node)}/data")
    return REAL.is_dir(f"{config.store.root}/commitlog")


def _state_problem(root: str) -> str | None:
    """Return why a node would not start with the state in its store; None if it would."""
    try:
        _store_id(root)
    except StoreError as broken:
        return str(broken)
    return None


def _file_size_problem(config: Config) -> str | None:
    """Return why a node would not start with the existing log files; None if it would start."""
    root, expected = config.store.root, config.store.commitlog_file_size
    if not _has_log(config):
        return None
    log = f"{root}/{ledger_name(config.node)}" if config.mode is Mode.DLEDGER else root
    try:
        files = LogFiles(log).list()
        limits = read_limits(REAL, root)
    except StoreError as broken:
        return str(broken)
    for file in files:
        # After a crash the last file may be too short. The next start extends it, if the limits
        # page has the same file size.
        torn = file is files[-1] and file.size < expected
        if file.size == expected or torn and limits is not None and limits.file_size == expected:
            continue
        return (
            f"{file.path} has {file.size} bytes ({human_size(file.size)}), but "
            f"store.commitlog_file_size is {expected} ({human_size(expected)}): "
            "set the key to the size that the store was created with, or restore the file"
        )
    return None


def _name_server(one: dict[str, Any]) -> Finding:
    """Tell what the running node is at one of RocketMQ's name servers."""
    if one["problem"] is not None:
        return Finding("name server", Severity.BAD, one["problem"])
    brokers = ", ".join(one["brokers"])
    if not brokers:
        return Finding("name server", Severity.NOTE, f"{one['address']}: not registered yet")
    return Finding("name server", Severity.GOOD, f"{one['address']}: registered as {brokers}")


def _registry(config: Config, running: dict[str, Any] | None) -> Finding:
    """Look at the node's object in ZooKeeper, as the operator's commands would."""
    told = [text for text in (running or {}).get("problems", []) if "registry" in text]
    if told:
        return Finding("registry", Severity.BAD, "; ".join(told))
    try:
        role = RegistryPlace(config).read_role()
    except HastoreError as wrong:
        return Finding("registry", Severity.BAD, str(wrong))
    if role is None:
        text = f"{config.registry} has no object of node {config.node}; the node writes it"
        return Finding("registry", Severity.NOTE, text)
    return Finding("registry", Severity.GOOD, f"{config.registry}: the role is {role.value}")


def _ports(config: Config) -> Iterator[Finding]:
    for name in ("api", "ha", "http"):
        text, told = config.bound(name), getattr(config.nodes[config.node], name)
        failure = _why_not_bound(config, name)
        if failure is not None:
            remedy = f"free it, or change nodes.{config.node}.{name} in every node's file"
            if getattr(config.bind, name) is not None:
                remedy = f"free it, or change bind.{name}"
            yield Finding(name, Severity.BAD, f"{text}: {failure.strerror}; {remedy}")
            continue
        others = "" if told == text else f"; others are told {told}"
        yield Finding(name, Severity.GOOD, f"{text} is free{others}")


def _why_not_bound(config: Config, name: str) -> OSError | None:
    """Return why the node cannot bind one of its addresses now; None if it can."""
    endpoint = parse_address(config.bound(name).removeprefix("tcp://"))
    assert endpoint is not None  # the configuration was checked
    try:
        listen(*endpoint, None, ipv4_first=name != "api").close()  # as the node will bind it
    except OSError as failure:
        return failure
    return None


def _peers(config: Config) -> Iterator[Finding]:
    for number, addresses in config.nodes.items():
        if number == config.node:
            continue
        verdict, text = _peer(config, number, addresses.ha)
        yield Finding(f"node {number}", verdict, f"{addresses.ha} {text}")


def _peer(config: Config, number: int, address: str) -> tuple[Severity, str]:
    """Say HELLO to another node. The answer proves the secret and says which node it is."""
    try:
        hello, answer = ask_peer(config, number, address, _CONNECT_S * 1_000)
    except OSError as failure:
        return Severity.NOTE, f"does not answer ({failure.strerror or failure}); is it running?"
    except (AuthenticationError, ClassicPeerError) as wrong:
        return Severity.BAD, f"is not a peer: {wrong}"
    except (ConfigError, StoreError) as broken:
        return Severity.BAD, f"was not asked: {broken}"
    except HastoreError as wrong:
        causes = "its ha.secret_file differs (or its ha.max_connections are in use)"
        return Severity.BAD, f"closed the connection during HELLO ({wrong}); most likely {causes}"
    if hello.node != number:
        return Severity.BAD, f"is node {hello.node}; correct `nodes` in the file"
    if hello.file_size != config.store.commitlog_file_size:
        theirs, ours = human_size(hello.file_size), human_size(config.store.commitlog_file_size)
        remedy = "store.commitlog_file_size must be the same on every node"
        return Severity.BAD, f"has commit log files of {theirs}, this node of {ours}; {remedy}"
    if isinstance(answer, Refused):
        return Severity.BAD, f"refuses this node: {answer.reason}"
    if isinstance(answer, StoreKnown) and answer.other:
        lost = "this node has lost its disk; it catches up by itself once it runs"
        return Severity.NOTE, f"knows node {config.node} with another store: {lost}"
    tls = "by TLS, " if config.security.ha is Wire.TLS else ""
    secret = "with the same secret" if config.ha.secret_file else "without a secret, as here"
    return Severity.GOOD, f"answers, {tls}{secret}"


def _descriptors() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        return Finding(
            "files", Severity.NOTE, f"the limit is {soft} open files; `ulimit -n 65536` is safer"
        )
    return Finding("files", Severity.GOOD, f"the limit is {soft} open files")


Found = tuple[int | None, Finding]  # of a node; None: of the group

_COLOURS = {Severity.GOOD: None, Severity.NOTE: "yellow", Severity.BAD: "bold red"}


def check_group(path: str, config: Config) -> Iterator[Found]:
    """Check all nodes of the file's group; `config` is the content of the file at `path`."""
    group = GroupFiles(path)
    problems: dict[int, str] = {}

    def ask(number: int) -> Status | None:
        try:
            return group.ask(number)
        except HastoreError as wrong:
            problems[number] = str(wrong)
            return None

    told = of_each(config.nodes, ask)
    group.seen |= {number: status for number, status in told.items() if status is not None}
    yield from _group(group.seen, refused=bool(problems))
    for number in config.nodes:
        file = group.file_of(number)
        if file is not None:
            found = _file_and_node(file, config if file == path else load_config(file))
        elif number in problems:
            found = iter([Finding("node", Severity.BAD, problems[number])])
        else:
            found = _remote(group, number)
        for one in found:
            yield number, one
        if file is not None and number not in group.seen and number not in problems:
            yield number, _silent(group, number)


def _group(seen: dict[int, Status], *, refused: bool) -> Iterator[Found]:
    """Say whether puts that do not set acks are taken; `refused`: a node runs and says nothing."""
    answers = [{**one, "answers": True} for one in seen.values()]
    if not answers:
        text = "no node answers: start the nodes"
        if refused:
            text = "no node answers this command: see the reason of each node"
        yield None, Finding("group", Severity.BAD, text)
        return
    problem = refusal_text(GroupAnswers(answers, []))
    if problem is not None:
        yield None, Finding("group", Severity.BAD, problem)
        return
    takers = [number for number, one in seen.items() if one["writable"]]
    if len(takers) > 1:
        named = ", ".join(map(str, takers))
        text = f"node {named} take puts at the same time; only a flip does that, for a moment"
        yield None, Finding("group", Severity.BAD, f"{text}: look again, then at their reasons")
        return
    yield None, Finding("group", Severity.GOOD, f"node {takers[0]} takes puts")


def _file_and_node(path: str, config: Config) -> Iterator[Finding]:
    yield Finding("file", Severity.GOOD, f"{path} is valid")
    yield from check_node(path, config)


def _silent(group: GroupFiles, number: int) -> Finding:
    text = f"{group.name(number)} does not answer: start it, or look at the way to it"
    return Finding("node", Severity.BAD, text)


def _remote(group: GroupFiles, number: int) -> Iterator[Finding]:
    """Check a node whose file is on another machine, by what it says."""
    status = group.seen.get(number)
    if status is None:
        yield _silent(group, number)
        return
    epoch = f"{'term' if 'term' in status else 'epoch'} {status['epoch']}"
    text = f"node {number} runs as {status['role']}, {epoch}"
    file = status.get("config")
    if file:
        text += f"; `hastore doctor -c {file}` on its machine checks store, disk and ports too"
    yield Finding("node", Severity.GOOD, text)
    for problem in status.get("problems") or []:
        yield Finding("problem", Severity.BAD, problem)
    for note in status.get("notes") or []:
        yield Finding("note", Severity.NOTE, note)
    for pending in pending_texts(file, status):
        yield Finding("pending", Severity.NOTE, pending)


def _print(found: Iterable[Found], *, every: bool, as_json: bool) -> bool:
    """Print the findings; return whether one is bad."""
    lines = list(found)
    width = max(len(one.check) for _, one in lines)
    for number, one in lines:
        if as_json:
            about = {"node": number} if every else {}
            print_json({**about, "check": one.check, "verdict": one.verdict.value,
                        "text": one.text})  # fmt: skip
            continue
        text = f"{one.check.ljust(width)}  {one.verdict.value.ljust(4)}  {one.text}"
        if every:
            text = f"{('group' if number is None else f'node {number}').ljust(8)}  {text}"
        print_text(text, _COLOURS[one.verdict])
    return any(one.verdict is Severity.BAD for _, one in lines)


@click.command("doctor", short_help="Check a node's file, ports, disk and peers.")
@with_config
@click.option(
    "--all", "every", is_flag=True,
    help="Check all nodes of the file: all of those whose files are here, of others what they say.",
)  # fmt: skip
@with_security
@with_overrides
@with_json
def doctor_command(path: str, every: bool, overrides: dict[str, str], as_json: bool) -> int:
    """Check a node's file, ports, disk and peers; exit code 1 when a check is bad."""
    config = load_config(path, overrides)
    if every:
        found = check_group(path, config)
    else:
        found = ((config.node, one) for one in _file_and_node(path, config))
    return FAILED if _print(found, every=every, as_json=as_json) else DONE
