"""`hastore keys ca` and `hastore keys cert`: certificates for the nodes and clients of a group.

Only these commands need the library `cryptography`; nodes and clients use what they write.
"""

import datetime
import os
import typing
from collections.abc import Iterable, Sequence

import click

from hastore.addresses import address_text, is_loopback, is_wildcard, parse_address
from hastore.cli.common import (
    DONE,
    Decorator,
    Folder,
    print_json,
    print_note,
    print_text,
    with_json,
)
from hastore.clock import SYSTEM_CLOCK
from hastore.config.file import load_names
from hastore.config.model import Config
from hastore.errors import ConfigError, UsageError
from hastore.fs.private_files import (
    PRIVATE_MODE,
    PUBLIC_MODE,
    create_file,
    folder_locked,
    read_private,
    replace_file,
)
from hastore.security.identity import name_problem
from hastore.security.tls_engine import NodeName

if typing.TYPE_CHECKING:
    from hastore.security.certificates import Authority, Pair

CA_DAYS, DAYS = 3_650, 365
MOST_DAYS = 36_500
MAX_PEM_BYTES = 64 * 1024

with_folder = click.option(
    "--dir", "folder", required=True, type=Folder(), metavar="DIR", help="The folder of the CA."
)


def with_days(default: int) -> Decorator:
    """Add `--days`."""
    option: Decorator = click.option(
        "--days",
        type=click.IntRange(1, MOST_DAYS),
        default=default,
        show_default=True,
        metavar="N",
        help="For how long it is valid.",
    )
    return option


@click.command("ca", short_help="Make the CA of a group.")
@with_folder
@click.option("--name", default="hastore CA", show_default=True, help="What it is called.")
@with_days(CA_DAYS)
@with_json
def ca_command(folder: str, name: str, days: int, as_json: bool) -> int:
    """Make a CA: DIR/ca.pem, its certificate, and DIR/ca.key, its private key (mode 0600).

    ca.pem goes to every node and every client. Whoever has ca.key can make certificates for any
    node and any client: keep it off the nodes, and make a copy. Exit code 2 when one of the files
    exists: nothing is overwritten.
    """
    certificates = _library()
    most = certificates.MAX_COMMON_NAME
    if not name.isprintable() or not 1 <= len(name.encode()) <= most:
        raise UsageError(f"--name: use 1 to {most} printable characters, {most} bytes in UTF-8")
    _make_folder(folder)
    certificate, key = _paths(folder, "ca")
    with folder_locked(certificate):
        _write_new(certificate, key, certificates.make_ca(name, days, _now()))
    if as_json:
        print_json({"ca": certificate, "key": key})
        return DONE
    print_text(f"wrote {certificate}: copy it to every node and client")
    print_text(f"wrote {key}: keep it secret, and off the nodes; `hastore keys cert` needs it")
    return DONE


@click.command("cert", short_help="Make the certificate of a node, or of a client.")
@with_folder
@click.option(
    "-c", "--config", "files", multiple=True, metavar="FILE",
    help="Make that of the node with this configuration file; may be repeated.",
)  # fmt: skip
@click.option(
    "--client", "clients", multiple=True, metavar="NAME",
    help="Make that of the client with this name; may be repeated.",
)  # fmt: skip
@click.option(
    "--host", "hosts", multiple=True, metavar="HOST",
    help="With -c: one more name or address by which clients reach the node; may be repeated.",
)  # fmt: skip
@with_days(DAYS)
@click.option("--renew", is_flag=True, help="Replace a certificate and its key.")
@with_json
def cert_command(
    folder: str,
    files: tuple[str, ...],
    clients: tuple[str, ...],
    hosts: tuple[str, ...],
    days: int,
    renew: bool,
    as_json: bool,
) -> int:
    """Make certificates, signed by the CA in DIR, with their private keys (mode 0600) beside them.

    With -c FILE: DIR/nodeN.pem and DIR/nodeN.key for node N. The certificate names the hosts of the
    node's addresses, its cluster, its group and its number. With --client NAME: DIR/client-NAME.pem
    and DIR/client-NAME.key; NAME is that of an identity (`hastore keys new NAME --certificate`).

    Exit code 2 when a file exists. With --renew a new certificate and a new key replace the old
    ones; a running node takes them within seconds. Without --host it names what the old one named,
    too. No certificate is valid longer than the CA.
    """
    if not files and not clients:
        raise UsageError("give -c NODE.yaml for a node's certificate, or --client NAME")
    if hosts and not files:
        raise UsageError("--host needs -c: a client's certificate names no host")
    if hosts and len(files) > 1:
        raise UsageError("--host belongs to one node; give one -c with it")
    for host in hosts:
        if parse_address(address_text(host, 0)) is None:
            raise UsageError(f"--host: {host!r} is neither a host name nor an address; give one")
    for name in clients:
        problem = name_problem(name)
        if problem is not None:
            raise UsageError(f"--client: {problem}")
    configs = [(path, load_names(path)) for path in files]
    authority = _authority(folder)
    made_at = _now()
    if made_at + datetime.timedelta(days=days) > authority.not_after:
        print_note(_cut_short(days, authority.not_after))
    with folder_locked(os.path.join(folder, "ca.pem")):
        for path, config in configs:
            node = NodeName(config.cluster, config.group, config.node)
            paths = _paths(folder, f"node{config.node}")
            names = _hosts(config, hosts)
            if renew and not hosts:
                names += _kept_names(paths[0], names)
            pair = authority.node(node, names, days, made_at)
            _write(*paths, pair, renew)
            _tell_node(path, config, folder, paths, names, pair, as_json)
        for client in clients:
            pair = authority.client(client, days, made_at)
            paths = _paths(folder, f"client-{client}")
            _write(*paths, pair, renew)
            _tell_client(folder, paths, client, pair, as_json)
    return DONE


def _tell_node(
    file: str,
    config: Config,
    folder: str,
    paths: tuple[str, str],
    hosts: Iterable[str],
    pair: "Pair",
    as_json: bool,
) -> None:
    certificate, key = paths
    ca, _ = _paths(folder, "ca")
    until = _until(pair)
    if as_json:
        made = {"node": config.node, "hosts": list(hosts), "until": until}
        print_json({**made, "ca": ca, "certificate": certificate, "key": key})
        return
    name = NodeName(config.cluster, config.group, config.node)
    print_text(f"wrote {certificate} and {key}: {name}, at {', '.join(hosts)}, until {until}")
    security = config.security
    named = (security.ca, security.certificate, security.key)
    if all(
        given is not None and os.path.abspath(given) == os.path.abspath(path)
        for given, path in zip(named, (ca, certificate, key), strict=True)
    ):
        return
    print_text(f"On the node, in {file}:")
    print_text(f"  security:\n    ca: {ca}\n    certificate: {certificate}\n    key: {key}")


def _tell_client(
    folder: str, paths: tuple[str, str], name: str, pair: "Pair", as_json: bool
) -> None:
    certificate, key = paths
    ca, _ = _paths(folder, "ca")
    if as_json:
        made = {"client": name, "until": _until(pair)}
        print_json({**made, "ca": ca, "certificate": certificate, "key": key})
        return
    print_text(
        f"wrote {certificate} and {key}: client {name}, until {_until(pair)}; the client needs "
        f"them, and {ca}"
    )


def _cut_short(days: int, ca_ends: datetime.datetime) -> str:
    """Return why a certificate is not valid for as long as was asked."""
    return (
        f"note: valid until the CA ends, {ca_ends:%Y-%m-%d %H:%M} UTC, not for {days:,} days; to "
        'go on for longer, replace the CA (docs/security.md, "Replace the CA")'
    )


def _until(pair: "Pair") -> str:
    until: datetime.datetime = _library().not_after(pair.certificate)
    return until.strftime("%Y-%m-%d %H:%M UTC")


def _hosts(config: Config, more: Sequence[str]) -> list[str]:
    """Return the names of a node: the hosts of its addresses, those of `more`.

    A node on loopback is reached by each name of loopback; so is one that binds a wildcard, which
    is no name, by the commands on its own machine.
    """
    own = config.nodes[config.node]
    bound = [getattr(config.bind, name) for name in ("api", "ha", "http")]
    hosts = []
    for text in (own.api, own.ha, own.http, *(one for one in bound if one is not None)):
        endpoint = parse_address(text.removeprefix("tcp://"))
        if endpoint is not None:
            hosts.append(endpoint[0])
    found = [*more, *(host for host in hosts if not is_wildcard(host))]
    if any(map(is_loopback, found)) or (found and any(bound) and any(map(is_wildcard, hosts))):
        found += ["localhost", "127.0.0.1", "::1"]
    if not found:
        raise UsageError(
            f"nodes.{config.node} has only wildcard addresses; give the node's names with --host"
        )
    return list(dict.fromkeys(found))


def _kept_names(certificate: str, names: Sequence[str]) -> list[str]:
    """Return what the certificate that is renewed names besides: what `--host` has given it.

    Clients that reach the node by such a name would be locked out. Those of loopback are kept only
    if the node is there now.
    """
    if not os.path.exists(certificate):  # `_write` says so
        return []
    try:
        named = _library().names_of(_content(certificate))
    except ValueError:
        print_note(f"note: {certificate} cannot be read: names that --host gave it are not kept")
        return []
    kept = [host for host in named if host not in names and not is_loopback(host)]
    if kept:
        print_note(
            f"note: {', '.join(kept)} stays in {certificate}, as in the one before; to have other "
            "names, give them with --host"
        )
    return kept


def _authority(folder: str) -> "Authority":
    certificates = _library()
    certificate, key = _paths(folder, "ca")
    try:
        with open(certificate, "rb") as file:
            pem = file.read(MAX_PEM_BYTES)
    except OSError as failure:
        raise ConfigError(
            f"{certificate}: cannot be read: {failure.strerror}; give the folder in which `hastore "
            "keys ca` made the CA"
        ) from failure
    pair = certificates.Pair(pem, read_private(key, MAX_PEM_BYTES))
    authority: Authority = certificates.Authority(pair, folder)
    return authority


def _write(certificate: str, key: str, pair: "Pair", renew: bool) -> None:
    if not renew:
        _write_new(certificate, key, pair)
        return
    for path in (certificate, key):
        if not os.path.exists(path):
            raise UsageError(f"{path}: there is nothing to renew; leave out --renew")
    before = _content(key)  # its mode may be what is wrong with it
    replace_file(key, pair.key, PRIVATE_MODE)
    try:
        replace_file(certificate, pair.certificate, PUBLIC_MODE)
    except BaseException:  # also Ctrl-C: the new key does not fit the old certificate
        if _content(certificate) != pair.certificate:
            replace_file(key, before, PRIVATE_MODE)
        raise


def _content(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as failure:
        raise ConfigError(
            f"{path}: cannot be read: {failure.strerror}; check path and permissions"
        ) from failure


def _write_new(certificate: str, key: str, pair: "Pair") -> None:
    """Write both files, or none; UsageError if one of them exists."""
    for path in (certificate, key):
        if os.path.lexists(path):
            raise UsageError(
                f"{path}: exists already; give another DIR, remove it, or, for a certificate, "
                "--renew"
            )
    create_file(key, pair.key, PRIVATE_MODE)
    try:
        create_file(certificate, pair.certificate, PUBLIC_MODE)
    except (UsageError, ConfigError):
        os.unlink(key)
        raise


def _paths(folder: str, stem: str) -> tuple[str, str]:
    base = os.path.join(os.path.abspath(folder), stem)
    return f"{base}.pem", f"{base}.key"


def _make_folder(folder: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as failure:
        raise UsageError(
            f"{folder} cannot be made: {failure.strerror}; give another DIR"
        ) from failure


def _now() -> datetime.datetime:
    return datetime.datetime.fromtimestamp(SYSTEM_CLOCK.wall_ms() / 1000, datetime.UTC)


def _library() -> typing.Any:
    """Return the module that needs `cryptography`; UsageError, with the remedy, without it."""
    try:
        from hastore.security import certificates
    except ImportError as failure:
        raise UsageError(
            "certificates are made by the library cryptography; install it with pip install "
            "'hastore[tls]', on the machine where you make them"
        ) from failure
    return certificates
