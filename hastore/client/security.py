"""How a client proves who it is and knows the nodes: files and names, no secrets.

    tls_ca: ca.pem              # the group's CA: the client then speaks TLS, and nothing else
    tls_certificate: app.pem    # the client's certificate, with
    tls_key: app.key            # its private key
    identity: orders-app        # the client's name, proved by
    key_file: orders-app.key    # its key, as `hastore keys new` has written it
    registry_ca: zoo-ca.pem     # with an address zk://...: TLS to ZooKeeper, whose CA this is
    registry_certificate: app-zoo.pem    # what ZooKeeper asks the client for, if it does, with
    registry_key: app-zoo.key   # its private key

Each line may be left out. Paths in such a file are relative to its folder.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass

from hastore.client.arguments import refusal
from hastore.errors import UNREADABLE_YAML, ConfigError, UsageError
from hastore.security.identity import key_problem, name_problem

ENVIRONMENT = "HASTORE_SECURITY"
_PATHS = (
    *("tls_ca", "tls_certificate", "tls_key", "key_file"),
    *("registry_ca", "registry_certificate", "registry_key"),
)
_EXPECTED = "a hastore.Security, a mapping of its fields, or the path of a YAML file with them"


@dataclass(frozen=True, slots=True)
class Security:
    """How a client proves who it is, and how it knows the nodes; raises UsageError.

    `tls_ca`: the CA's certificate (PEM); with it the client speaks TLS with nodes that have a
    certificate of this CA, and with no others. `tls_certificate` and `tls_key`: the client's own.
    `identity` and `key_file`: the client's name, and the file with its key. `registry_ca`,
    `registry_certificate` and `registry_key`: the same for ZooKeeper, if an address is `zk://...`.
    All but `identity` are paths of files, which are read at each new connection, so keys can be
    replaced.
    """

    tls_ca: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    identity: str | None = None
    key_file: str | None = None
    registry_ca: str | None = None
    registry_certificate: str | None = None
    registry_key: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            given = getattr(self, field.name)
            if isinstance(given, os.PathLike) and field.name in _PATHS:
                object.__setattr__(self, field.name, os.fspath(given))
            elif given is not None and (not isinstance(given, str) or not given):
                raise refusal(f"security.{field.name}", given, "a str, or None")
            elif given is not None and field.name in _PATHS and not _is_path(given):
                raise refusal(f"security.{field.name}", given, "the path of a file")
        _together("tls_certificate", self.tls_certificate, "tls_key", self.tls_key)
        _together("identity", self.identity, "key_file", self.key_file)
        if self.key_file is not None and key_problem(os.path.basename(self.key_file)) is None:
            raise UsageError(
                "security.key_file: a key stands where a path belongs; write it into a file of "
                "mode 0600, and replace this key, it was shown"
            )
        _together(
            *("registry_certificate", self.registry_certificate),
            *("registry_key", self.registry_key),
        )
        if self.registry_certificate is not None and self.registry_ca is None:
            raise UsageError(
                "security.registry_ca is missing: without it ZooKeeper is not spoken to by TLS"
            )
        problem = None if self.identity is None else name_problem(self.identity)
        if problem is not None:
            raise UsageError(f"security.identity: {problem}")
        if self.tls_certificate is not None and self.tls_ca is None:
            raise UsageError(
                "security.tls_ca is missing: without the CA the client speaks no TLS, and its "
                "certificate proves nothing"
            )


SecurityLike = Security | Mapping[str, str | None] | str | os.PathLike[str] | None


def as_security(given: SecurityLike) -> Security | None:
    """Return the checked settings; None means those in the file HASTORE_SECURITY, if it is set.

    Raises UsageError for other arguments, ConfigError for a file that is not valid.
    """
    if given is None:
        path = os.environ.get(ENVIRONMENT)
        return read_security(path) if path else None
    if isinstance(given, Security):
        return given
    if isinstance(given, Mapping):
        return _of(given, "security")
    if isinstance(given, str | os.PathLike):
        return read_security(os.fspath(given))
    raise refusal("security", given, _EXPECTED)


def named_file() -> str | None:
    """Return the absolute path of the file that HASTORE_SECURITY names; None without one.

    For tasks elsewhere, which do not have this process's variables and folder.
    """
    path = os.environ.get(ENVIRONMENT)
    return os.path.abspath(path) if path else None


def with_tls(
    security: Security | None, ca: str, certificate: str | None, key: str | None
) -> Security:
    """Return settings that speak TLS: their own if they do already, else with these files."""
    if security is None:
        return Security(ca, certificate, key)
    if security.tls_ca is not None:
        return security
    return dataclasses.replace(security, tls_ca=ca, tls_certificate=certificate, tls_key=key)


def read_security(path: str) -> Security:
    """Return the settings in a YAML file; raises ConfigError."""
    import yaml  # late: most clients have no such file

    try:
        text = pathlib.Path(path).read_text("utf-8")
    except (OSError, ValueError) as failure:
        why = getattr(failure, "strerror", None) or failure
        raise ConfigError(
            f"{path}: cannot be read: {why}; check the path (HASTORE_SECURITY, --security, Spark's "
            "hastore.security.file); each executor of Spark needs the file too"
        ) from failure
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, *UNREADABLE_YAML) as failure:
        raise ConfigError(f"{path}: is not valid YAML; correct it") from failure
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: has no keys; write tls_ca, identity, key_file and so on")
    folder = pathlib.Path(path).absolute().parent
    for name in _PATHS:
        if isinstance(found.get(name), str) and found[name]:
            found[name] = str(folder / found[name])
    try:
        return _of(found, path)
    except UsageError as failure:
        raise ConfigError(f"{path}: {failure}") from failure


def _of(given: Mapping[str, str | None], where: str) -> Security:
    known = [field.name for field in dataclasses.fields(Security)]
    unknown = [str(name)[:40] for name in given if name not in known]
    if unknown:
        raise UsageError(f"{where}: {unknown[0]!r} is unknown; the keys are {', '.join(known)}")
    return Security(**given)


def _is_path(given: str) -> bool:
    """Whether the system takes it as a path."""
    try:
        return b"\0" not in os.fsencode(given)
    except UnicodeEncodeError:
        return False


def _together(one: str, first: str | None, other: str, second: str | None) -> None:
    if (first is None) != (second is None):
        missing = one if first is None else other
        raise UsageError(f"security.{missing} is missing: {one} and {other} belong together")
