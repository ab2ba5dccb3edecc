"""Check a configuration: each value's type and range, addresses, keys that contradict each other.

`read_value` turns a scalar of the file into a typed value, `check_config` then looks at the whole.
Every error names file, line, key, problem and remedy, by `Places`. This module is pure: it reads no
file and resolves no host name.
"""

import re
import types
import typing
from enum import Enum
from typing import Protocol

import yaml

from hastore.addresses import is_loopback, is_wildcard, parse_address, parse_servers
from hastore.config.model import (
    DAY_MS,
    GIB,
    KIB,
    MIB,
    Config,
    Flush,
    Mode,
    Range,
    Role,
    StoreKind,
    Unit,
    Wire,
)
from hastore.errors import ConfigError, UsageError
from hastore.record.delays import parse_levels

MAX_NAME_SERVERS = 16
HEARTBEATS_PER_ELECTION = 3  # at least, in one election timeout
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}")


class YamlMark(Protocol):
    """A place in a YAML file; lines count from 0."""

    line: int


class Places:
    """The line of each dotted key, for error texts; a key given by `-o` has no line."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lines: dict[str, int | None] = {}
        self._overridden: set[str] = set()

    def note(self, key: str, mark: YamlMark | None) -> None:
        """Remember the line of `key`; `mark` is None for a key from the command line."""
        if mark is None:
            self._overridden.add(key)
        elif key not in self._overridden:
            self._lines[key] = mark.line + 1

    def alias(self, key: str, other: str) -> None:
        """Give `key` the line of `other`."""
        self._lines[key] = self._lines.get(other)

    def is_given(self, key: str) -> bool:
        """Return whether the file, or the command line, has the dotted key itself."""
        return key in self._lines or key in self._overridden

    def line(self, key: str) -> int | None:
        """Return the line of the key, or of the nearest section around it, or None."""
        while key:
            line = self._lines.get(key)
            if line is not None:
                return line
            key = key.rpartition(".")[0]
        return None

    def error(self, key: str, problem: str, remedy: str) -> ConfigError:
        """Return the error for `key`: `file:line: key: problem; remedy`."""
        if key in self._overridden:
            return ConfigError(f"-o {key}: {problem}; {remedy}")
        line = self.line(key)
        where = self.path if line is None else f"{self.path}:{line}"
        return ConfigError(f"{where}: {key}: {problem}; {remedy}")


def _comparable(host: str) -> str:
    """Return a host in the form in which two names of the same host are equal."""
    return "127.0.0.1" if host == "localhost" else host.lower()


def check_config(config: Config, places: Places, *, security: bool = True) -> None:
    """Raise ConfigError, with file, line and key, if the configuration contradicts itself.

    Without `security`, the section `security` and what may be beyond loopback are not checked.
    """
    for key, name in (("cluster", config.cluster), ("group", config.group)):
        if not _NAME.fullmatch(name):
            remedy = "use 1 to 127 of A-Z a-z 0-9 _ . -, with a letter or digit first"
            raise places.error(key, f"{name!r} is not a valid name", remedy)
    if config.node not in config.nodes:
        raise places.error("node", f"node {config.node} is missing from nodes", "add it there")
    endpoints = _check_addresses(config, places)
    if config.mode is Mode.DLEDGER:
        _check_dledger(config, places)
    else:
        _check_group(config, places)
        _check_classic(config, places, endpoints)
    _check_store(config, places)
    _check_registry(config, places)
    _check_name_servers(config, places, endpoints)
    if security:
        _check_security(config, places)


def config_notes(config: Config, *, starts: bool = False) -> list[str]:
    """Return what is valid in a configuration, but rarely meant.

    When a node of mode dledger `starts`, the number of `nodes` is no note: who the members are is
    in its log, and a node that is to be added, or to replace another one, is listed too.
    """
    notes = []
    if config.store.group_read:
        notes.append(
            "store.group_read is true: every user of the node's group can read all messages in "
            f"{config.store.root}"
        )
    if config.registry_allow_plain_password and config.registry_ca is None:
        notes.append(
            "registry_allow_plain_password is true: whoever reads the way to ZooKeeper learns the "
            "password, and can change the roles of the group"
        )
    if config.registry_allow_unauthenticated and _is_open_registry(config):
        notes.append(
            "registry_allow_unauthenticated: true: whoever reaches ZooKeeper can change the roles "
            "of the group; set registry_acl_file"
        )
    notes += _open_api_notes(config)
    own = config.nodes[config.node]
    for name, told in (("api", "clients"), ("ha", "the other nodes")):
        host = _host(getattr(own, name))
        if is_wildcard(host):
            notes.append(
                f"nodes.{config.node}.{name} is {host}: {told} would look for the node on their "
                f"own machine; name its address there, and {host} as bind.{name}"
            )
    known = config.ha.secret_file is not None or config.security.ha is Wire.TLS
    reached = (config.bound("ha"), own.ha)
    if not known and not all(is_loopback(_host(address)) for address in reached):
        notes.append(
            "ha.allow_unauthenticated: true: the links between the nodes are not tamper-proof, and "
            "whoever reaches them may speak for a node; set ha.secret_file, or security.ha: tls"
        )
    size = len(config.nodes)
    if config.mode is Mode.DLEDGER:
        if size % 2 == 0 and not starts:
            spare = (size - 1) // 2
            notes.append(
                f"`nodes` has {size} nodes; a group of {size} members goes on without {spare} of "
                f"them, as one of {size - 1} does: use an odd number of members"
            )
        if config.store.kind is StoreKind.MEMORY:
            notes.append(
                "store.kind: memory: a node is empty after a restart; a majority of the nodes that "
                "restarts at once loses all messages, and the group must be started anew"
            )
        elif config.store.flush is Flush.ASYNC:
            notes.append(
                "store.flush: async: a put is acknowledged before it is on a disk (QUORUM_MEM); "
                "if a majority of the nodes loses power at once, acknowledged messages are lost"
            )
    return notes


Endpoint = tuple[str, int]


def _check_addresses(config: Config, places: Places) -> dict[Endpoint, str]:
    """Return the key of each address; raises ConfigError for a bad or repeated address."""
    seen: dict[Endpoint, str] = {}
    for number, addresses in config.nodes.items():
        for name in ("api", "ha", "http"):
            key, text = f"nodes.{number}.{name}", getattr(addresses, name)
            endpoint = _endpoint(places, key, text)
            if endpoint[1] and endpoint in seen:
                problem = f"{text} is also {seen[endpoint]}: a node would connect to itself"
                raise places.error(key, problem, "give each address a port of its own")
            seen[endpoint] = key
    _check_bind(config, places, seen)
    return seen


def _endpoint(places: Places, key: str, text: str) -> Endpoint:
    """Return host and port of the address that `key` has; raises ConfigError."""
    is_api = key.endswith(".api")
    bare = text.removeprefix("tcp://") if is_api else text
    endpoint = None if is_api and bare == text else parse_address(bare)
    if endpoint is None:
        form = "tcp://HOST:PORT" if is_api else "HOST:PORT"
        raise places.error(key, f"{text!r} is not an address", f"write {form}")
    return _comparable(endpoint[0]), endpoint[1]


def _check_bind(config: Config, places: Places, seen: dict[Endpoint, str]) -> None:
    """Raise ConfigError for an address under `bind` that is bad, or that another one has.

    Adds them to `seen`, the key of each address.
    """
    bound: dict[Endpoint, str] = {}
    for name in ("api", "ha", "http"):
        text, own = getattr(config.bind, name), f"nodes.{config.node}.{name}"
        key = own if text is None else f"bind.{name}"
        host, port = _endpoint(places, key, config.bound(name))
        other = seen.get((host, port), own)
        same = [of for (on, at), of in bound.items() if at == port and _overlap(on, host)]
        if port and (other != own or same):
            problem = f"{config.bound(name)} is also {same[0] if same else other}"
            raise places.error(key, problem, "give each address a port of its own")
        bound[host, port] = key
    for endpoint, key in bound.items():
        seen.setdefault(endpoint, key)


def _overlap(host: str, other: str) -> bool:
    """Whether two hosts cannot both be bound with the same port."""
    return host == other or is_wildcard(host) or is_wildcard(other)


def _host(address: str) -> str:
    """Return the host of an address that was checked."""
    endpoint = parse_address(address.removeprefix("tcp://"))
    assert endpoint is not None, "the configuration was checked"
    return endpoint[0]


def _check_group(config: Config, places: Places) -> None:
    size = len(config.nodes)
    counted = config.ha.count_classic_peers
    if size == 1:
        if config.role is Role.SYNC_MASTER and not counted:
            problem = "a SYNC_MASTER needs a slave, and nodes lists only this node"
            raise places.error("role", problem, "list the slaves under nodes, or use ASYNC_MASTER")
        if config.role is Role.SLAVE and config.ha.classic_master is None:
            problem = "nodes lists only this node, so there is no master to follow"
            raise places.error(
                "role", problem, "list the other nodes under nodes, or set ha.classic_master"
            )
        return
    if not 1 <= config.acks <= size - 1:
        problem = f"{config.acks} slaves cannot confirm a put in a group of {size} nodes"
        if config.acks == 0:
            problem = "0 means that no slave confirms a synchronous put"
        alone = " (an ASYNC_MASTER waits for none all the same)" if config.acks == 0 else ""
        remedy = f"use 1 to {size - 1}{alone}"
        raise places.error("acks", problem, remedy)


def _check_classic(config: Config, places: Places, endpoints: dict[Endpoint, str]) -> None:
    ha = config.ha
    if ha.count_classic_peers and not ha.allow_classic_peers:
        problem = "is true, but ha.allow_classic_peers is false"
        raise places.error(
            "ha.count_classic_peers", problem, "set ha.allow_classic_peers: true too"
        )
    if ha.classic_broker is not None:
        broker = parse_address(ha.classic_broker)
        if broker is None or broker[1] == 0:
            problem = f"{ha.classic_broker!r} is not an address"
            raise places.error("ha.classic_broker", problem, "write HOST:PORT, or null")
    if ha.classic_master is None:
        return
    key = "ha.classic_master"
    endpoint = parse_address(ha.classic_master)
    if endpoint is None or endpoint[1] == 0:
        raise places.error(
            key, f"{ha.classic_master!r} is not an address", "write HOST:PORT, or null"
        )
    host, port = endpoint
    same = endpoints.get((_comparable(host), port))
    if same is not None:
        raise places.error(
            key,
            f"{ha.classic_master} is {same}: a node cannot follow itself or its own group",
            "name a RocketMQ master, or null",
        )
    if config.assigned_role.is_master:
        problem = f"a {config.assigned_role.value} follows no master"
        raise places.error(key, problem, "set it to null, or role: SLAVE")


def _check_dledger(config: Config, places: Places) -> None:
    group, store = config.dledger, config.store
    beat, election = group.heartbeat_interval_ms, group.election_timeout_ms
    if beat * HEARTBEATS_PER_ELECTION > election:
        problem = f"{beat} ms is more than a third of dledger.election_timeout, {election} ms"
        remedy = "one late heart beat would begin an election; set it to a fifth of that"
        raise places.error("dledger.heartbeat_interval", problem, remedy)
    short = {
        f"dledger.{name}": value
        for name, value in (
            ("append_timeout", group.append_timeout_ms),
            ("transfer_timeout", group.transfer_timeout_ms),
        )
        if value < election
    }
    for key, value in short.items():
        problem = f"{value} ms is less than dledger.election_timeout, {election} ms"
        others = "".join(f", and {one} ({ms} ms) too" for one, ms in short.items() if one != key)
        raise places.error(key, problem, f"set it to {2 * election}ms or more{others}")
    preferred = group.preferred_leader
    if preferred is not None and preferred not in config.nodes:
        problem = f"node {preferred} is missing from nodes"
        raise places.error("dledger.preferred_leader", problem, "name a node of the group, or null")
    if store.kind is StoreKind.MEMORY and store.flush is Flush.SYNC:
        problem = "memory puts nothing on the disk, but store.flush is sync"
        remedy = "use file, or set store.flush: async and dledger.allow_async_flush: true"
        raise places.error("store.kind", problem, remedy)
    if store.flush is Flush.ASYNC and not group.allow_async_flush:
        problem = (
            "async acknowledges puts that are on no disk: a power loss of a majority loses them"
        )
        remedy = "remove it, or set dledger.allow_async_flush: true; the level is then QUORUM_MEM"
        raise places.error("store.flush", problem, remedy)


def _check_store(config: Config, places: Places) -> None:
    store = config.store
    if store.kind is StoreKind.MEMORY and config.mode is not Mode.DLEDGER:
        problem = "memory exists only in mode dledger"
        raise places.error("store.kind", problem, "use file, or set mode: dledger")
    try:
        parse_levels(store.message_delay_level)
    except UsageError as wrong:
        remedy = "write RocketMQ's messageDelayLevel, such as 1s 5s 10s 30s 1m"
        raise places.error("store.message_delay_level", str(wrong), remedy) from wrong
    if "\0" in store.root:
        raise places.error("store.root", "contains a NUL byte", "name a folder")
    if store.root == "/":
        raise places.error(
            "store.root", "is the root of the file system", "name a folder of its own"
        )
    if config.ha.heartbeat_interval_ms >= config.ha.housekeeping_interval_ms:
        problem = "is not less than ha.housekeeping_interval, after which a silent link is closed"
        raise places.error("ha.heartbeat_interval", problem, "set it to a quarter of that")


def _check_registry(config: Config, places: Places) -> None:
    """Check where the registry is, and that not anybody can change roles there."""
    if config.registry is None:
        for key in (
            *("registry_acl_file", "registry_allow_unauthenticated"),
            "registry_allow_plain_password",
            *("registry_ca", "registry_certificate", "registry_key"),
        ):
            if getattr(config, key):
                raise places.error(key, "is set, but registry is null", "remove it")
        return
    _check_registry_tls(config, places)
    try:
        servers = parse_servers(config.registry)
    except UsageError as wrong:
        raise places.error("registry", *str(wrong).split("; ", 1)) from wrong
    if config.ha.classic_master is not None:
        problem = "the role of a node that follows a RocketMQ master is in its file"
        raise places.error("registry", problem, "set registry or ha.classic_master to null")
    has_password = config.registry_acl_file is not None
    if config.registry_allow_plain_password and not has_password:
        problem = "is true, but registry_acl_file is null"
        raise places.error("registry_allow_plain_password", problem, "remove it")
    for server in servers.split(","):
        endpoint = parse_address(server)
        assert endpoint is not None, "parse_servers has checked it"
        if is_loopback(endpoint[0]):
            continue
        where = f"{endpoint[0]} is beyond loopback"
        if not has_password and not config.registry_allow_unauthenticated:
            problem = f"{where}, and anyone there could change roles"
            remedy = "set registry_acl_file, or set registry_allow_unauthenticated: true"
            raise places.error("registry", problem, remedy)
        plain = config.registry_ca is None and not config.registry_allow_plain_password
        if has_password and plain:
            problem = f"{where}, and ZooKeeper's protocol sends the password in the clear"
            remedy = "set registry_ca, for TLS, or set registry_allow_plain_password: true"
            raise places.error("registry", problem, remedy)


def _check_registry_tls(config: Config, places: Places) -> None:
    own = {name: getattr(config, name) for name in ("registry_certificate", "registry_key")}
    given = [name for name, path in own.items() if path is not None]
    if len(given) == 1:
        missing = next(name for name in own if name not in given)
        raise places.error(given[0], f"is given without {missing}", "give both, or neither")
    if given and config.registry_ca is None:
        problem = "is given without registry_ca, so the registry is not spoken to by TLS"
        raise places.error(given[0], problem, "set registry_ca to the CA of ZooKeeper's servers")


def _check_security(config: Config, places: Places) -> None:
    """Check the section `security`, and what may be beyond loopback."""
    security = config.security
    files = {name: getattr(security, name) for name in ("ca", "certificate", "key")}
    missing = [name for name, path in files.items() if path is None]
    if missing and len(missing) < len(files):
        given = next(name for name in files if name not in missing)
        problem = f"is given without {' and '.join(missing)}"
        remedy = "give ca, certificate and key together; `hastore keys cert` makes them"
        raise places.error(f"security.{given}", problem, remedy)
    for name in ("api", "ha", "http"):
        if getattr(security, name) is Wire.TLS and missing:
            problem = "is tls, but there is no certificate"
            remedy = "set security.ca, certificate and key; `hastore keys ca` and `cert` make them"
            raise places.error(f"security.{name}", problem, remedy)
    if security.allow_plain_keys and security.identities is None:
        problem = "is true, but security.identities is null"
        raise places.error("security.allow_plain_keys", problem, "name the file of identities")
    for name in ("ha", "api", "http"):
        _check_beyond_loopback(config, places, name)


def remoting_refusal(config: Config) -> str | None:
    """Return why RocketMQ's clients are refused; None if they are served."""
    enabled = config.remoting.enabled
    if enabled is None:
        reached = (config.bound("api"), config.nodes[config.node].api)
        enabled = all(is_loopback(_host(address)) for address in reached)
    if enabled:
        return None
    return "this node does not serve RocketMQ's clients: set remoting.enabled: true"


def _check_name_servers(config: Config, places: Places, endpoints: dict[Endpoint, str]) -> None:
    key, seen = "remoting.name_servers", set[Endpoint]()
    servers = config.remoting.name_servers
    if len(servers) > MAX_NAME_SERVERS:
        raise places.error(key, f"{len(servers)} servers", f"name {MAX_NAME_SERVERS} at most")
    for text in servers:
        endpoint = parse_address(text)
        if endpoint is None or endpoint[1] == 0:
            raise places.error(key, f"{text!r} is not an address", "write HOST:PORT of each server")
        endpoint = (_comparable(endpoint[0]), endpoint[1])
        if endpoint in endpoints:
            problem = f"{text} is {endpoints[endpoint]}: the group's nodes know it without that"
            raise places.error(key, problem, "name RocketMQ's own name servers")
        if endpoint in seen:
            raise places.error(key, f"{text} is listed twice", "keep one of them")
        seen.add(endpoint)
    refusal = remoting_refusal(config) if servers else None
    if refusal is not None:
        raise places.error(key, "is set, but " + refusal.partition(":")[0], "set remoting.enabled")


def _beyond_loopback(config: Config, name: str) -> dict[str, str]:
    """Return the hosts beyond loopback of an address of this node, by their keys in the file."""
    hosts = {f"nodes.{config.node}.{name}": _host(getattr(config.nodes[config.node], name))}
    if getattr(config.bind, name) is not None:
        hosts = {f"bind.{name}": _host(config.bound(name)), **hosts}
    return {key: host for key, host in hosts.items() if not is_loopback(host)}


def _open_api_notes(config: Config) -> list[str]:
    """Return what the flags let strangers do at the addresses for clients, and what ends that."""
    security = config.security
    if security.identities is None:
        if not (_beyond_loopback(config, "api") or _beyond_loopback(config, "http")):
            return []
        return [
            "api.allow_unauthenticated: true: whoever reaches this node can read all messages, put "
            "others, and read its status; set security.identities, and tls for api and http"
        ]
    if security.api is Wire.TLS or not _beyond_loopback(config, "api"):
        return []
    return [
        "security.api is plain beyond loopback: whoever is between a client and this node can read "
        "the messages, and take over a connection; set security.api: tls"
    ]


def _is_open_registry(config: Config) -> bool:
    """Whether there is a registry beyond loopback in which anybody may write."""
    if config.registry is None or config.registry_acl_file is not None:
        return False
    endpoints = map(parse_address, parse_servers(config.registry).split(","))
    return not all(is_loopback(one[0]) for one in endpoints if one is not None)


def _check_beyond_loopback(config: Config, places: Places, name: str) -> None:
    """Raise ConfigError if an address beyond loopback is open to anyone who reaches it.

    That counts for what the node binds, and for where others reach it: whatever passes the latter
    on to an address on loopback lets strangers in, too.
    """
    security = config.security
    section = config.ha if name == "ha" else config.api
    beyond = _beyond_loopback(config, name)
    if not beyond or section.allow_unauthenticated:
        return
    tls = getattr(security, name) is Wire.TLS
    key, host = next(iter(beyond.items()))
    where = f"{host} is beyond loopback"
    if name == "ha":
        if not tls and config.ha.secret_file is None:
            remedy = "set security.ha: tls, or ha.secret_file, or ha.allow_unauthenticated: true"
            raise places.error(key, f"{where} and open to anyone", remedy)
        return
    flag = "api.allow_unauthenticated: true"
    if security.identities is None:
        remedy = f"set security.identities and security.{name}: tls, keep it on 127.0.0.1, or set "
        raise places.error(key, f"{where} and open to anyone", remedy + flag)
    if not tls and not (name == "api" and security.allow_plain_keys):
        remedy = f"set security.{name}: tls, or keep it on 127.0.0.1"
        if name == "api":
            remedy += ", or set security.allow_plain_keys: true"
        raise places.error(key, f"{where}, but speaks without TLS", remedy)


SIZE_UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}
# Unit -> the noun in errors, the suffixes allowed in the file with their factors, the remedy.
_UNITS: dict[Unit, tuple[str, dict[str, int], str]] = {
    Unit.ITEMS: ("whole number", {"": 1}, "write a whole number"),
    Unit.BYTES: (
        "size",
        SIZE_UNITS,
        "write a size like 64KiB or 1GiB",
    ),
    Unit.MILLISECONDS: (
        "time",
        {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": DAY_MS},
        "write a time like 500ms, 5s or 72h",
    ),
}
_QUANTITY = re.compile(r"(-?[0-9][0-9_]*)\s*([A-Za-z]*)")
_PLAIN_TAGS = frozenset({"str", "int", "float", "bool", "timestamp"})
_TRUTH = {"true": True, "false": False}


def read_value(places: Places, key: str, node: yaml.Node, kind: typing.Any) -> typing.Any:
    """Return the scalar `node` as a value of a field's type `kind`; raises ConfigError.

    A number's Range defines its unit: a size is returned in bytes, a time in milliseconds.
    """
    optional = typing.get_origin(kind) in (types.UnionType, typing.Union)
    if optional:
        kind = next(one for one in typing.get_args(kind) if one is not types.NoneType)
    if kind == tuple[str, ...]:
        return _texts(places, key, node)
    if not isinstance(node, yaml.ScalarNode):
        raise places.error(key, "must be a single value", "see conf/master.yaml")
    text: str = node.value
    if node.tag.endswith(":null"):
        if optional:
            return None
        raise places.error(key, "has no value", "give one, or remove the key")
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN_TAGS:
        raise places.error(key, f"has the tag {node.tag}", "write a plain value without a tag")
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise places.error(key, f"{text!r} is neither true nor false", "write true or false")
        return _TRUTH[text.lower()]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _choice(places, key, text, kind)
    if typing.get_origin(kind) is typing.Annotated:
        return _number(places, key, text, kind.__metadata__[0])
    if not text.strip():
        raise places.error(key, "is empty", "give a value, or remove the key")
    return text


def _texts(places: Places, key: str, node: yaml.Node) -> tuple[str, ...]:
    """Return a list of texts; one text may have several, with commas or semicolons between them."""
    if isinstance(node, yaml.ScalarNode):
        text = "" if node.tag.endswith(":null") else read_value(places, key, node, str)
        return tuple(one.strip() for one in re.split("[,;]", text) if one.strip())
    if not isinstance(node, yaml.SequenceNode):
        raise places.error(key, "is neither a list nor a text", "write [HOST:PORT, HOST:PORT]")
    return tuple(read_value(places, key, one, str).strip() for one in node.value)


def _choice(places: Places, key: str, text: str, kind: type[Enum]) -> Enum:
    choices = {str(choice.value): choice for choice in kind}
    if text not in choices:
        raise places.error(key, f"{text!r} is not one of {', '.join(choices)}", "use one of these")
    return choices[text]


def _number(places: Places, key: str, text: str, allowed: Range) -> int:
    noun, units, remedy = _UNITS[allowed.unit]
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or len(match[1]) > 19:
        raise places.error(key, f"{text!r} is not a {noun}", remedy)
    number = int(match[1].replace("_", ""))
    if match[2] not in units and (number != 0 or match[2]):
        problem = f"{text!r} has the unit {match[2]!r}" if match[2] else f"{text!r} has no unit"
        raise places.error(key, problem, remedy)
    value = number * units.get(match[2], 1)
    if not allowed.least <= value <= allowed.most:
        unit = "" if allowed.unit is Unit.ITEMS else f" {allowed.unit.value}"
        why = f": {allowed.why}" if allowed.why and value > allowed.most else ""
        problem = f"{value}{unit} is out of range{why}"
        raise places.error(key, problem, f"use {allowed.least} to {allowed.most}{unit}")
    return value


def parse_size(text: str) -> tuple[int, str] | None:
    """Return the number and the unit of a size, "" without one, as the file has sizes; else None.

    `SIZE_UNITS` has the bytes of each unit.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or len(match[1]) > 19 or match[2] not in SIZE_UNITS:
        return None
    return int(match[1].replace("_", "")), match[2]


def human_size(size: int) -> str:
    """Return a number of bytes for people to read: `512 B`, `64 KiB`, `1.5 GiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"
