"""`hastore init`: write the configuration files and the secret of a new group."""

import importlib.resources
import json
import os
import pathlib
import secrets
import shlex
import string
from collections.abc import Iterable

import click
import yaml

from hastore.cli.common import DONE, Folder, print_json, print_note, program, with_json
from hastore.config.file import load_config, load_names
from hastore.config.model import Mode, Role
from hastore.errors import UsageError

BASE_PORT = 10_911
MAX_NODES = 9
_TEMPLATE = "node.yaml.template"
_DLEDGER_TEMPLATE = "dledger.yaml.template"
_KEY_COLUMNS = 27  # width before the comment of a key
_OPS = "ops.yaml"
_OPS_TEXT = """\
# The administrator as a client: set HASTORE_SECURITY to the path of this file (docs/security.md).
tls_ca: tls/ca.pem
identity: ops
key_file: ops.key
"""


def render(
    number: int,
    nodes: dict[int, int],
    *,
    role: Role | None,
    acks: int = 1,
    root: str,
    secret_file: str | None,
    title: str,
    command: str,
    file: str,
) -> str:
    """Return a node's commented file; `nodes` maps a node to the first of its three ports.

    Without a role it is a file of mode dledger.
    """
    template = _DLEDGER_TEMPLATE if role is None else _TEMPLATE
    text = importlib.resources.files("hastore.cli").joinpath(template).read_text("utf-8")
    lines = [
        f'  {each}: {{api: "tcp://127.0.0.1:{port}", ha: "127.0.0.1:{port + 1}", '
        f'http: "127.0.0.1:{port + 2}"}}'
        for each, port in nodes.items()
    ]
    secret = "null" if secret_file is None else _quoted(secret_file)
    return string.Template(text).substitute(
        command=command,
        check=command.rpartition("/")[2],
        node=f"node: {number}".ljust(_KEY_COLUMNS),
        nodes="\n".join(lines),
        root=f"root: {_quoted(root)}".ljust(_KEY_COLUMNS - 2),
        secret=f"secret_file: {secret}".ljust(_KEY_COLUMNS - 2),
        title=title,
        file=file,
        role=f"role: {role.value if role else ''}".ljust(_KEY_COLUMNS),
        acks=f"acks: {acks}".ljust(_KEY_COLUMNS),
    )


@click.command("init", short_help="Write the configuration files of a new group.")
@click.argument("folder", metavar="DIR", type=Folder())
@click.option(
    "--mode", "mode_name", default=Mode.CLASSIC.value, show_default=True,
    type=click.Choice([mode.value for mode in Mode]),
    help="classic: a master and slaves; dledger: the nodes elect their leader.",
)  # fmt: skip
@click.option(
    "--nodes", "count", type=click.IntRange(1, MAX_NODES), metavar="N",
    help="Number of nodes of the group.  [default: 2; 3 in mode dledger]",
)  # fmt: skip
@click.option(
    "--port", default=BASE_PORT, show_default=True, type=click.IntRange(1_024, 65_000),
    metavar="P",
    help="The first node's api port. Its ha and http ports follow; the next node begins 10 higher.",
)  # fmt: skip
@click.option(
    "--tls", is_flag=True,
    help="TLS on every address, and identities; prints the commands that make their files first.",
)  # fmt: skip
@with_json
def init_command(
    folder: str, mode_name: str, count: int | None, port: int, tls: bool, as_json: bool
) -> int:
    """Write DIR/node1.yaml and so on, with comments, and DIR/secret (mode 0600); print the commands
    that start the group, and set HASTORE_BOOTSTRAP for the commands after them.

    All nodes are on loopback. To use several machines, edit the addresses under `nodes`; they must
    be the same in every file. Exit code 2 when one of the files exists: init overwrites no file.

    With --tls the files ask for TLS everywhere and for identities. The first commands that init
    prints make the certificates, and an administrator with DIR/ops.yaml as its HASTORE_SECURITY.
    Edit the addresses before you make the certificates: they name the nodes' hosts.
    """
    mode = Mode(mode_name)
    count = count or (2 if mode is Mode.CLASSIC else 3)
    place = pathlib.Path(folder).absolute()
    ports = {number: port + 10 * (number - 1) for number in range(1, count + 1)}
    paths = {number: place / f"node{number}.yaml" for number in ports}
    secret = place / "secret"
    made = (*paths.values(), secret, *((place / _OPS,) if tls else ()))
    taken = [path for path in made if path.exists()]
    if taken:
        raise UsageError(f"{taken[0]} already exists; give another DIR, or remove it")
    try:
        place.mkdir(parents=True, exist_ok=True)
        _write(secret, secrets.token_urlsafe(32) + "\n", 0o600)
        for number, path in paths.items():
            text = _file_of(mode, number, ports, path, secret)
            if tls:
                text = _with_tls(text, place, number)
            _write(path, text, 0o644)
            # Raises when the file would not be valid. The certificates are not there yet.
            (load_names if tls else load_config)(str(path))
        if tls:
            _write(place / _OPS, _OPS_TEXT, 0o644)
    except OSError as failure:
        raise UsageError(f"{place} cannot be written: {failure}; give another DIR") from failure
    bootstrap = ",".join(f"127.0.0.1:{each}" for each in ports.values())
    if as_json:
        files = [str(path) for path in paths.values()]
        more = {"client": str(place / _OPS)} if tls else {}
        print_json({"files": files, "secret": str(secret), "bootstrap": bootstrap, **more})
        return DONE
    print_note(f"wrote {count} configuration files and a secret into {place}. To start the group:")
    if tls:
        _print_key_commands(place, paths.values())
    for number, path in paths.items():
        print(f"{program(_starter(mode, number))} -c {shlex.quote(str(path))} &")
    print(f"export HASTORE_BOOTSTRAP={bootstrap}")
    print(f"{program('hastore')} status --wait 30 --bootstrap {bootstrap}")
    return DONE


def _file_of(
    mode: Mode, number: int, ports: dict[int, int], path: pathlib.Path, secret: pathlib.Path
) -> str:
    """Return the content of the file of one node."""
    role = None
    if mode is Mode.CLASSIC:
        master = Role.SYNC_MASTER if len(ports) > 1 else Role.ASYNC_MASTER
        role = master if number == 1 else Role.SLAVE
    return render(
        number,
        ports,
        role=role,
        acks=1,  # counts for a node alone once it has a slave
        root=str(path.parent / "data" / f"node{number}"),
        secret_file=str(secret),
        title=f"node {number} of {len(ports)}, written by `hastore init`.",
        command=_starter(mode, number),
        file=str(path),
    )


def _with_tls(text: str, place: pathlib.Path, number: int) -> str:
    """Return the text of a node's file with its section `security` filled in."""
    values = {
        "ca": place / "tls" / "ca.pem",
        "certificate": place / "tls" / f"node{number}.pem",
        "key": place / "tls" / f"node{number}.key",
        "api": "tls",
        "ha": "tls",
        "http": "tls",
        "identities": place / "identities.yaml",
    }
    before, head, section = text.partition("\nsecurity:\n")
    lines = section.splitlines(keepends=True)
    for key, value in values.items():
        place_of = next(at for at, line in enumerate(lines) if line.startswith(f"  {key}: "))
        comment = lines[place_of].partition("#")[2]
        lines[place_of] = f"  {key}: {_quoted(str(value))}".ljust(_KEY_COLUMNS) + f" #{comment}"
    return before + head + "".join(lines)


def _print_key_commands(place: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Print the commands that make the certificates and the administrator."""
    command, tls = program("hastore"), shlex.quote(str(place / "tls"))
    configs = " ".join(f"-c {shlex.quote(str(path))}" for path in files)
    identities, key = (shlex.quote(str(place / name)) for name in ("identities.yaml", "ops.key"))
    print(f"{command} keys ca --dir {tls}")
    print(f"{command} keys cert --dir {tls} {configs}")
    print(
        f"{command} keys new ops --admin --produce '*' --consume '*' --file {identities} "
        f"--out {key}"
    )
    print(f"export HASTORE_SECURITY={shlex.quote(str(place / _OPS))}")


def _quoted(path: str) -> str:
    """Return a path as YAML reads it: in a folder such as `a #1` the rest would be a comment."""
    try:
        is_plain = yaml.safe_load(path) == path
    except (yaml.YAMLError, ValueError):
        is_plain = False
    return path if is_plain else json.dumps(path)


def _starter(mode: Mode, number: int) -> str:
    if mode is Mode.DLEDGER:
        return "hastore-dledger"
    return "hastore-master" if number == 1 else "hastore-slave"


def _write(path: pathlib.Path, text: str, mode: int) -> None:
    """Create a file with this mode; raises FileExistsError when it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
