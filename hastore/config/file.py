"""Read a node's configuration file into a `Config`, and edit its `role` in place.

PyYAML parses the file into YAML nodes with line numbers, so each error reads `file:line: key:
problem; remedy`. Nothing in the file is evaluated. Tags, unknown keys, keys that are given twice
and values of the wrong kind are errors. The keys are the fields of the structs in `model.py`,
without the suffix `_ms`; sizes and times have units. `checks.py` then looks for contradictions. A
relative path is relative to the working directory of the process that reads the file.

msgspec could convert the file into the structs, but its errors have no line, hide the key of a
mapping such as `nodes`, and name neither the allowed values nor a remedy. Units, ranges and
suggestions would still need code of our own.
"""

import difflib
import os
import re
import stat
import typing
from collections.abc import Iterable, Mapping

import msgspec
import yaml

from hastore.config.checks import Places, check_config, read_value
from hastore.config.classic_key import read_credentials
from hastore.config.model import (
    MIB,
    ApiConfig,
    BindConfig,
    Config,
    DLedgerConfig,
    Flush,
    HAConfig,
    LogConfig,
    Mode,
    NodeAddress,
    RemotingConfig,
    RetentionConfig,
    Role,
    SecurityConfig,
    StoreConfig,
)
from hastore.errors import ConfigError
from hastore.fs.private_files import CHECK_PATH, LOCK_WAIT_S, folder_locked, replace_file

MAX_FILE_BYTES = 1 * MIB
MIN_SECRET_BYTES, MAX_SECRET_BYTES = 16, 4096
OVERRIDE = "-o"

_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "bind": BindConfig,
    "store": StoreConfig,
    "retention": RetentionConfig,
    "ha": HAConfig,
    "api": ApiConfig,
    "remoting": RemotingConfig,
    "dledger": DLedgerConfig,
    "security": SecurityConfig,
    "log": LogConfig,
}
_MADE_BY = {  # the remedies where these files are missing
    "security.ca": "make it with `hastore keys ca`, or correct the path",
    "security.certificate": "make it with `hastore keys cert`, or correct the path",
    "security.key": "make it with `hastore keys cert`, or correct the path",
}
_REGISTRY_TLS = ("registry_ca", "registry_certificate", "registry_key")
_REGISTRY = (
    *("registry", "registry_acl_file", *_REGISTRY_TLS),
    *("registry_allow_unauthenticated", "registry_allow_plain_password"),
)
_SCALARS = ("cluster", "group", "node", "mode", "role", "acks", *_REGISTRY)
_TOP_KEYS = (*_SCALARS, "nodes", *_SECTIONS)
_SAMPLES = {Mode.CLASSIC: "conf/master.yaml", Mode.DLEDGER: "conf/dledger-n0.yaml"}
_RENAMED = {"max_size_bytes": "max_size"}
# Keys without a meaning in mode dledger, and what the mode has instead.
_CLASSIC_KEYS = {
    "role": "the nodes elect their leader; dledger.preferred_leader names the node to prefer",
    "acks": "a put is acknowledged once a majority of the nodes has it",
    **dict.fromkeys(_REGISTRY, "the nodes elect their leader, so there is no role to register"),
    "store.flush_timeout": "dledger.append_timeout bounds how long a put waits",
    "ha.ack_point": "a node confirms what is on its disk, see store.flush",
    "ha.slave_timeout": "dledger.append_timeout bounds how long a put waits",
    "ha.heartbeat_interval": "see dledger.heartbeat_interval",
    "ha.housekeeping_interval": "see dledger.election_timeout",
    "ha.transfer_batch_size": "see dledger.push_batch_size",
    "ha.max_gap_not_in_sync": "a majority of the nodes decides",
    "ha.allow_classic_peers": "RocketMQ's slaves can follow only a node of mode classic",
    "ha.count_classic_peers": "RocketMQ's slaves can follow only a node of mode classic",
    "ha.classic_master": "only a node of mode classic can follow a RocketMQ master",
    "ha.classic_broker": "only a node of mode classic can follow a RocketMQ master",
    "ha.classic_key_file": "only a node of mode classic can follow a RocketMQ master",
    "ha.sync_from": "RocketMQ's slaves can follow only a node of mode classic",
}


def load_config(path: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Read and check the file at `path`; `overrides` maps dotted keys to values, as `-o` does.

    `store.root` becomes absolute. Raises ConfigError for a wrong file; its text is one line with
    file, line, key and remedy.
    """
    return parse_config(_read_text(path), path, overrides)


def load_names(path: str) -> Config:
    """Read the file at `path` for what it names: its group, its nodes and their addresses.

    Secrets and certificates, and what may be beyond loopback, are not checked: the certificate that
    the file names may be the one that is made next. Raises ConfigError as `load_config` does.
    """
    return parse_names(_read_text(path), path)


def parse_names(text: str, path: str) -> Config:
    """Read `text` as the content of the file `path` for what it names; see `load_names`."""
    reader = _Reader(path)
    config = reader.config(reader.compose(text))
    check_config(config, reader.places, security=False)
    return config


def parse_config(text: str, path: str, overrides: Mapping[str, str] | None = None) -> Config:
    """Read and check `text` as the content of the file `path`; see `load_config`."""
    reader = _Reader(path)
    root = reader.compose(text)
    for key, value in (overrides or {}).items():
        reader.override(root, key, value)
    config = reader.config(root)
    check_config(config, reader.places)
    _check_secret(config, reader.places)
    _check_classic_key(config, reader.places)
    _check_registry_acl(config, reader.places)
    _check_tls_files(config, reader.places)
    return config


def _check_tls_files(config: Config, places: Places) -> None:
    """Raise ConfigError for a file of TLS that cannot be read, or a key that others may read.

    What is in the files is checked when the node starts (security/tls_contexts.py).
    """
    security = config.security
    files = {f"security.{name}": getattr(security, name) for name in ("ca", "certificate", "key")}
    files |= {key: getattr(config, key) for key in _REGISTRY_TLS}
    for key, path in files.items():
        if path is not None:
            private = key in ("security.key", "registry_key")
            _content(places, key, path, private=private, missing=_MADE_BY.get(key, CHECK_PATH))


def _check_secret(config: Config, places: Places) -> None:
    """Raise ConfigError for a secret that is unreadable, open to others, or of wrong length."""
    path = config.ha.secret_file
    if path is None:
        return
    key = "ha.secret_file"
    size = len(_content(places, key, path))
    if not MIN_SECRET_BYTES <= size <= MAX_SECRET_BYTES:
        remedy = f"write {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} random bytes into it"
        length = f"{size}" if size < MIN_SECRET_BYTES else f"more than {MAX_SECRET_BYTES}"
        raise places.error(key, f"{path} contains {length} bytes", remedy)


def _check_classic_key(config: Config, places: Places) -> None:
    """Raise ConfigError for a key file that is unreadable, open to others, or lacks one of both."""
    path = config.ha.classic_key_file
    if path is None:
        return
    try:
        read_credentials(path)
    except ConfigError as wrong:
        raise places.error("ha.classic_key_file", *str(wrong).split("; ", 1)) from wrong


def _check_registry_acl(config: Config, places: Places) -> None:
    """Raise ConfigError for an ACL file that is unreadable, open to others, or no user:password."""
    path, key = config.registry_acl_file, "registry_acl_file"
    if path is None:
        return
    if not re.fullmatch(rb"[!-9;-~]{1,255}:[!-~]{1,255}", _content(places, key, path)):
        problem = f"{path} does not hold one line user:password of printable ASCII"
        raise places.error(key, problem, "write the line; the password may have a colon, not user")


def _content(
    places: Places, key: str, path: str, *, private: bool = True, missing: str = CHECK_PATH
) -> bytes:
    """Return how a file begins, without white space around it.

    Raises ConfigError if it cannot be read, or is `private` and open to other users; `missing` is
    the remedy if there is none.
    """
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as failure:
        remedy = missing if isinstance(failure, FileNotFoundError) else CHECK_PATH
        problem = f"{path} cannot be read: {failure.strerror}"
        raise places.error(key, problem, remedy) from failure
    except ValueError as failure:  # a NUL, or what is no Unicode
        raise places.error(key, f"{path!r} cannot be a path: {failure}", "name a file") from failure
    if private and mode & 0o077:
        raise places.error(key, f"{path} is open to other users", f"run chmod 600 {path}")
    return content


def parse_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """Split the `dotted.key=value` arguments of `-o`; raises ConfigError for any other form."""
    overrides: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                f"{OVERRIDE} {pair}: is not an assignment; write {OVERRIDE} dotted.key=value"
            )
        overrides[key.strip()] = value.strip()
    return overrides


def config_error(path: str, key: str, problem: str, remedy: str) -> ConfigError:
    """Return the error, with the line, for a problem of `key` that the caller found."""
    reader = _Reader(path)
    reader.config(reader.compose(_read_text(path)))
    return reader.places.error(key, problem, remedy)


def edit_role(path: str, role: Role) -> None:
    """Write `role` into the file at `path`, durably and atomically; all other bytes are kept.

    A master follows no other node, so a master's role also sets `ha.classic_master` to null. If
    the result would not be valid, raises ConfigError and leaves the file unchanged.
    """
    path = os.path.realpath(path)  # replace the file that a symbolic link points to, not the link
    with folder_locked(path, LOCK_WAIT_S):  # against other commands, and the node itself
        edited = text_with_role(_read_text(path), path, role)
        parse_config(edited, path)
        replace_file(path, edited.encode(), stat.S_IMODE(os.stat(path).st_mode))


def text_with_role(text: str, path: str, role: Role) -> str:
    """Return the content of the file `path` with `role`; it may not be valid. See `edit_role`."""
    root = _Reader(path).compose(text)
    ha = _find(root, "ha")
    edited = text
    if role.is_master and isinstance(ha, yaml.MappingNode):
        follows = _find(ha, "classic_master")
        if follows is not None and not follows.tag.endswith(":null"):
            edited = _with_scalar(edited, ha, "classic_master", "null")
            root = _Reader(path).compose(edited)
    return _with_scalar(edited, root, "role", role.value)


def text_with_addresses(text: str, path: str, nodes: Mapping[int, Mapping[str, str]]) -> str:
    """Return the content of the file `path` with these addresses of its nodes.

    They are by node, and then by key: api, ha, http. All other bytes are kept.
    """
    for number, addresses in nodes.items():
        for key, address in addresses.items():
            listed = _find(_Reader(path).compose(text), "nodes")
            node = _find(listed, str(number)) if isinstance(listed, yaml.MappingNode) else None
            if not isinstance(node, yaml.MappingNode):
                problem = f"{path}: nodes.{number}: is not listed; list its addresses there"
                raise ConfigError(problem)
            found = _find(node, key)
            if found is None or found.value != address:
                text = _with_scalar(text, node, key, address)
    return text


def _with_scalar(text: str, mapping: yaml.MappingNode, key: str, value: str) -> str:
    """Return the text with `key: value` in one of its mappings; the key is added if missing."""
    found = next((pair for pair in mapping.value if pair[0].value == key), None)
    if found is None:
        start = mapping.start_mark.index
        if mapping.flow_style:
            return f"{text[: start + 1]}{key}: {value}, {text[start + 1 :]}"
        return f"{text[:start]}{key}: {value}\n{' ' * mapping.start_mark.column}{text[start:]}"
    name, node = found
    alias = re.compile(r"[ \t]*:[ \t]+(\*[^\s,\]}]+)").match(text, name.end_mark.index)
    if alias is not None:  # the marks of its node are those of the anchor
        start, end = alias.span(1)
    else:
        start, end = node.start_mark.index, node.end_mark.index
    space = "" if text[start - 1].isspace() else " "  # a key may have no value: `role:`
    comment = re.compile(r"( +)#").match(text, end)  # keeps its column if there is room
    if comment is not None:
        value = value.ljust(comment.end(1) - 1 - start) + " "
        end = comment.end(1)
    return text[:start] + space + value + text[end:]


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as failure:
        raise ConfigError(f"{path}: cannot be read: {failure.strerror}; check -c FILE") from failure
    if len(data) > MAX_FILE_BYTES:
        raise _too_large(path)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as broken:
        line = data[: broken.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: is not UTF-8; save it as UTF-8") from broken


def _too_large(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: is larger than {MAX_FILE_BYTES} bytes; is it a configuration file?"
    )


def _first_line(failure: BaseException) -> str:
    return (str(failure).splitlines() or [type(failure).__name__])[0]


class _Reader:
    """Turn YAML nodes into structs, and remember the line of each key."""

    def __init__(self, path: str) -> None:
        self.places = Places(path)

    def compose(self, text: str) -> yaml.MappingNode:
        """Return the file's top mapping; raises ConfigError if the text is no YAML mapping."""
        path = self.places.path
        if len(text.encode(errors="surrogatepass")) > MAX_FILE_BYTES:
            raise _too_large(path)  # of an edit: the next start would not read it
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as broken:
            mark = broken.problem_mark or broken.context_mark
            line = mark.line + 1 if mark is not None else 1
            raise ConfigError(
                f"{path}:{line}: is not valid YAML: {broken.problem}; correct it"
            ) from broken
        except (yaml.YAMLError, RecursionError, ValueError) as broken:
            raise ConfigError(
                f"{path}: is not valid YAML: {_first_line(broken)}; correct it"
            ) from broken
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}:1: is not a mapping of keys; start from conf/master.yaml")
        return root

    def override(self, root: yaml.MappingNode, dotted: str, text: str) -> None:
        """Set the key `dotted` of the tree to the scalar `text`; create missing sections."""
        self.places.note(dotted, None)
        if dotted == "role":
            raise self.places.error(
                dotted, "cannot be overridden: a running node follows its file", "edit the file"
            )
        null = text in ("", "~", "null")
        tag = f"tag:yaml.org,2002:{'null' if null else 'str'}"
        mapping = root
        *parents, last = dotted.split(".")
        for parent in parents:
            below = _find(mapping, parent)
            if below is None:
                below = yaml.MappingNode("tag:yaml.org,2002:map", [])
                mapping.value.append((_key(parent), below))
            if not isinstance(below, yaml.MappingNode):
                raise self.places.error(
                    dotted, f"{parent} is not a section", "see conf/master.yaml"
                )
            # Copy the section: an alias elsewhere in the file shares this node.
            below = yaml.MappingNode(below.tag, list(below.value), below.start_mark)
            mapping.value = [
                (name, below if name.value == parent else one) for name, one in mapping.value
            ]
            mapping = below
        mapping.value = [pair for pair in mapping.value if pair[0].value != last]
        mapping.value.append((_key(last), yaml.ScalarNode(tag, text)))

    def config(self, root: yaml.MappingNode) -> Config:
        """Return the configuration; converts each value and checks its range."""
        top = self._entries(root, "", _TOP_KEYS)
        mode = Mode.CLASSIC
        if "mode" in top:
            mode = read_value(self.places, "mode", top["mode"], Mode)
        if mode is Mode.CLASSIC and "dledger" in top:  # a file without its mode lacks a role too
            problem = "has no meaning in mode classic"
            raise self.places.error("dledger", problem, "remove it, or set mode: dledger")
        roles = ("role",) if mode is Mode.CLASSIC else ()
        for key in ("cluster", "group", "node", *roles, "nodes", "store"):
            if key not in top:
                raise self.places.error(key, "is missing", f"add it, as in {_SAMPLES[mode]}")
        sections = {
            name: self._section(name, kind, top.get(name)) for name, kind in _SECTIONS.items()
        }
        if mode is Mode.DLEDGER:
            self._refuse_classic_keys()
            sections["store"].setdefault("flush", Flush.SYNC)
        sections["store"]["retention"] = RetentionConfig(**sections.pop("retention"))
        if "root" not in sections["store"]:
            raise self.places.error("store.root", "is missing", "name the folder of the store")
        sections["store"]["root"] = os.path.abspath(sections["store"]["root"])
        scalars = {
            field.name: read_value(self.places, field.name, top[field.name], field.type)
            for field in msgspec.structs.fields(Config)
            if field.name in _SCALARS and field.name in top
        }
        return Config(
            **scalars,
            nodes=self._nodes(top["nodes"]),
            bind=BindConfig(**sections["bind"]),
            store=StoreConfig(**sections["store"]),
            ha=HAConfig(**sections["ha"]),
            api=ApiConfig(**sections["api"]),
            remoting=RemotingConfig(**sections["remoting"]),
            dledger=DLedgerConfig(**sections["dledger"]),
            security=SecurityConfig(**sections["security"]),
            log=LogConfig(**sections["log"]),
        )

    def _refuse_classic_keys(self) -> None:
        """Raise ConfigError for a key that has no meaning in mode dledger."""
        for key, instead in _CLASSIC_KEYS.items():
            if self.places.is_given(key):
                problem = f"has no meaning in mode dledger: {instead}"
                raise self.places.error(key, problem, "remove it, or set mode: classic")

    def _nodes(self, node: yaml.Node) -> dict[int, NodeAddress]:
        nodes: dict[int, NodeAddress] = {}
        for name, below in self._entries(node, "nodes", None).items():
            key = f"nodes.{name}"
            number = int(name) if name.isascii() and name.isdigit() and len(name) <= 9 else 0
            if not 1 <= number <= 65535:
                raise self.places.error(key, "is not a node number", "use 1 to 65535")
            if number in nodes:
                raise self.places.error(key, f"node {number} is listed twice", "keep one of them")
            self.places.alias(f"nodes.{number}", key)
            values = self._section(f"nodes.{number}", NodeAddress, below)
            for address in ("api", "ha", "http"):
                if address not in values:
                    raise self.places.error(
                        f"nodes.{number}.{address}",
                        "is missing",
                        "set api, ha and http of each node",
                    )
            nodes[number] = NodeAddress(**values)
        return nodes

    def _section(
        self, name: str, kind: type[msgspec.Struct], node: yaml.Node | None
    ) -> dict[str, typing.Any]:
        """Return the fields that the mapping `node` gives for the struct `kind`."""
        if node is None:
            return {}
        fields = {
            _RENAMED.get(field.name, field.name.removesuffix("_ms")): field
            for field in msgspec.structs.fields(kind)
            if field.name != "retention"
        }
        found: dict[str, typing.Any] = {}
        for key, below in self._entries(node, name, tuple(fields)).items():
            field = fields[key]
            found[field.name] = read_value(self.places, f"{name}.{key}", below, field.type)
        return found

    def _entries(
        self, node: yaml.Node, name: str, known: tuple[str, ...] | None
    ) -> dict[str, yaml.Node]:
        """Return a mapping's values by key; raises ConfigError for unknown or repeated keys."""
        prefix = f"{name}." if name else ""
        if isinstance(node, yaml.ScalarNode) and node.tag.endswith(":null"):
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise self.places.error(name, "must be a mapping of keys", "see conf/master.yaml")
        entries: dict[str, yaml.Node] = {}
        for key_node, below in node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            dotted = prefix + key
            first = self.places.line(dotted) if key in entries else None
            self.places.note(dotted, key_node.start_mark)
            if key in entries:
                raise self.places.error(
                    dotted, f"is given twice (also line {first})", "keep one of them"
                )
            if known is not None and key not in known:
                near = difflib.get_close_matches(key, known, 1)
                remedy = (
                    f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(known)}"
                )
                raise self.places.error(dotted, "is unknown", remedy)
            entries[key] = below
        return entries


def _find(mapping: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((below for name, below in mapping.value if name.value == key), None)


def _key(name: str) -> yaml.ScalarNode:
    return yaml.ScalarNode("tag:yaml.org,2002:str", name)
