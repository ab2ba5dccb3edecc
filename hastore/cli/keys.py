"""`hastore keys`: the identities of clients and their keys (`ca`, `cert`: certificates.py)."""

import dataclasses
import os
import re
import secrets
from collections.abc import Callable

import click

from hastore.cli.common import (
    DONE,
    LazyGroup,
    counted,
    fitting_table,
    print_json,
    print_note,
    print_text,
    terminal_columns,
    with_json,
)
from hastore.clock import SYSTEM_CLOCK
from hastore.errors import HastoreError, UsageError
from hastore.fs.private_files import PRIVATE_MODE, create_file, folder_locked
from hastore.security.identity import Identity, Key, Secret, short
from hastore.security.identity_editor import IdentityEditor
from hastore.security.identity_file import format_time, parse_time

_COMMANDS = {
    "ca": "hastore.cli.certificates:ca_command",
    "cert": "hastore.cli.certificates:cert_command",
    "new": "hastore.cli.keys:new_command",
    "list": "hastore.cli.keys:list_command",
    "rights": "hastore.cli.keys:rights_command",
    "revoke": "hastore.cli.keys:revoke_command",
}


@click.group(
    "keys", cls=LazyGroup, places=_COMMANDS, short_help="Make certificates, identities and keys."
)
def keys_group() -> None:
    """Make the certificates of a group; manage the identities of clients and their keys.

    docs/security.md describes the whole.
    """


_LAST_MS = parse_time("9999-12-31T23:59:59Z") or 0
_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

with_file = click.option(
    "--file", "path", required=True, metavar="FILE", help="The identities file."
)


def with_patterns(command: Callable[..., int]) -> Callable[..., int]:
    """Add the options that give the patterns of a right."""
    for option, name, what in (
        ("--group", "groups", "It may be in these consumer groups; may be repeated."),
        ("--consume", "consume", "It may read these topics; may be repeated."),
        (
            "--produce",
            "produce",
            "It may put messages into these topics; may be repeated. `*` is any characters.",
        ),
    ):
        add = click.option(option, name, multiple=True, metavar="PATTERN", help=what)
        command = add(command)
    return command


def _instant(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    """Return a time to come in milliseconds since 1970: `24h` from now, 2026-11-23T18:30:00Z."""
    if value is None:
        return None
    now_ms = SYSTEM_CLOCK.wall_ms()
    after = re.fullmatch(r"([0-9]{1,7})([smhd])", value, re.ASCII)
    at_ms = now_ms + int(after[1]) * _UNITS_MS[after[2]] if after else parse_time(value)
    if at_ms is None or at_ms > _LAST_MS:
        problem = f"{short(value)} is not a time; write 24h, 7d or 2026-11-23T18:30:00Z"
        raise click.BadParameter(problem, context, option)
    if at_ms <= now_ms:
        raise click.BadParameter(f"{short(value)} is over; give a time to come", context, option)
    return at_ms


@click.command("new", short_help="Make an identity, or another key for one.")
@click.argument("name")
@with_file
@with_patterns
@click.option("--admin", is_flag=True, help="It may administer nodes, also from elsewhere.")
@click.option(
    "--certificate",
    is_flag=True,
    help="A client certificate with this common name proves it; makes no key.",
)
@click.option(
    "--rocketmq",
    is_flag=True,
    help="Make a secret for RocketMQ's clients instead of a key. The identities file has it too.",
)
@click.option(
    "--rotate", is_flag=True, help="Give an identity that exists another key; the old ones count on"
)
@click.option(
    "--old-until",
    callback=_instant,
    metavar="TIME",
    help="With --rotate: until when the old keys count, e.g. 24h.",
)
@click.option(
    "--out",
    metavar="KEYFILE",
    help="Where to write the key (default: NAME.key, for RocketMQ's clients NAME.rocketmq.yml).",
)
@click.option("--show", is_flag=True, help="Print the key; without --out, write no file.")
@with_json
def new_command(
    name: str,
    path: str,
    produce: tuple[str, ...],
    consume: tuple[str, ...],
    groups: tuple[str, ...],
    admin: bool,
    certificate: bool,
    rocketmq: bool,
    rotate: bool,
    old_until: int | None,
    out: str | None,
    show: bool,
    as_json: bool,
) -> int:
    """Make the identity NAME in FILE, and its key, which is written once.

    FILE is made if there is none. The key is a file of mode 0600 for the client; the identities
    file has only what a node needs to check it. A running node takes the change within seconds.

    With --rotate, NAME gets one more key: the clients can change to it one by one, until the old
    ones are revoked with `hastore keys revoke NAME --old`, or run out.

    With --rocketmq, the client is one of RocketMQ's: NAME is its AccessKey, and the key's file is
    a conf/tools.yml of mqadmin's with its SecretKey, which the identities file has, too.
    """
    if rotate and (produce or consume or groups or admin or certificate):
        raise UsageError("--rotate leaves the rights as they are; use `hastore keys rights`")
    if old_until is not None and not rotate:
        raise UsageError("--old-until needs --rotate")
    if certificate and (out or show or rocketmq):
        raise UsageError(
            "--certificate makes no key and no secret: leave out --out, --show and --rocketmq"
        )
    key = None if certificate else secrets.token_hex(32)
    ending = "rocketmq.yml" if rocketmq else "key"
    key_file = None if key is None or (show and out is None) else out or f"{name}.{ending}"
    if key_file is not None and _is_same(key_file, path):
        raise UsageError(f"--out {key_file} is the file of identities: the key needs its own file")
    wall_ms = SYSTEM_CLOCK.wall_ms()
    with folder_locked(path):
        editor = IdentityEditor(path, create=not rotate)
        old = 0
        if rotate:
            assert key is not None
            give = editor.rotate_secret if rocketmq else editor.rotate
            old = give(name, key, old_until, wall_ms)
        else:
            wanted = Identity(name, produce, consume, admin, certificate, groups=groups or None)
            own = None if rocketmq else key
            editor.add(wanted, own, wall_ms, secret=key if rocketmq else None)
        _write(editor, None if key is None else _key_text(name, key, rocketmq), key_file)
    if as_json:
        made: dict[str, object] = {"name": name, "file": path, "key_file": key_file}
        if rotate:
            made["old_keys"] = old
        if show:
            made["key"] = key
        print_json(made)
        return DONE
    what = "secret" if rocketmq else "key"
    print_text(f"identity {name}: {f'another {what}' if rotate else 'made'} in {path}")
    if key_file is not None:
        print_text(f"its {what} is in {key_file}: give it to the client, and to nobody else")
    if show:
        print_text(f"its {what}: {key}")
    _print_old(what, old, old_until)
    if rocketmq and consume and not groups:
        print_note(f"identity {name} may be in no consumer group: use `hastore keys rights`")
    return DONE


def _is_same(key_file: str, path: str) -> bool:
    """Whether both name one file; a path that the system does not take is refused elsewhere."""
    try:
        return os.path.realpath(key_file) == os.path.realpath(path)
    except ValueError:
        return False


def _print_old(what: str, old: int, old_until: int | None) -> None:
    """Say how long older keys count."""
    if old:
        until = f"until {format_time(old_until)}" if old_until else "until you revoke them"
        counts = "counts" if old == 1 else "count"
        print_text(f"{counted(old, f'older {what}')} {counts} {until}")


def _key_text(name: str, key: str, rocketmq: bool) -> str:
    """Return the text of a key's file; that of a secret is a tools.yml of mqadmin's."""
    return f'accessKey: "{name}"\nsecretKey: "{key}"\n' if rocketmq else f"{key}\n"


def _write(editor: IdentityEditor, text: str | None, key_file: str | None) -> None:
    """Write the key's file, then the identities; if that fails, the key's file goes again."""
    if text is not None and key_file is not None:
        create_file(key_file, text.encode(), PRIVATE_MODE)
    try:
        editor.save()
    except HastoreError:
        if key_file is not None:
            os.unlink(key_file)
        raise


@click.command("list", short_help="List the identities and their rights.")
@with_file
@with_json
def list_command(path: str, as_json: bool) -> int:
    """List the identities in FILE with their rights. Nothing secret is shown."""
    identities = IdentityEditor(path).identities
    wall_ms = SYSTEM_CLOCK.wall_ms()
    if as_json:
        for one in identities:
            shown = {
                "keys": [_key_json(each, wall_ms) for each in one.keys],
                "secrets": [_key_json(each, wall_ms) for each in one.secrets],
            }
            certificate = {"certificate": one.by_certificate}
            print_json({"name": one.name, **one.rights, **certificate, **shown})
        return DONE
    rows = [
        (
            one.name,
            *_shown_rights(one).values(),
            _proved_by(one, wall_ms),
        )
        for one in identities
    ]
    head = ("NAME", "PRODUCE", "CONSUME", "GROUPS", "ADMIN", "PROVED BY")
    for line in fitting_table(head, rows, keep=5, width=terminal_columns()):
        click.echo(line)
    if not identities:
        print_note(f"{path} has no identities")
    return DONE


def _key_json(key: Key | Secret, wall_ms: int) -> dict[str, object]:
    return {
        "made": format_time(key.made_ms) if key.made_ms is not None else None,
        "until": format_time(key.until_ms) if key.until_ms is not None else None,
        "counts": key.counts(wall_ms),
    }


def _proved_by(identity: Identity, wall_ms: int) -> str:
    ways = ["certificate"] if identity.by_certificate else []
    for key in identity.timed:
        what = "key" if isinstance(key, Key) else "secret"
        made = f" of {format_time(key.made_ms)}" if key.made_ms is not None else ""
        if key.until_ms is None:
            until = ""
        elif key.counts(wall_ms):
            until = f" until {format_time(key.until_ms)}"
        else:
            until = f", ended {format_time(key.until_ms)}"
        ways.append(f"{what}{made}{until}")
    return "; ".join(ways)


@click.command("rights", short_help="Change the rights of an identity, or its quota.")
@click.argument("name")
@with_file
@with_patterns
@click.option("--no-produce", is_flag=True, help="It may put messages into no topic.")
@click.option("--no-consume", is_flag=True, help="It may read no topic.")
@click.option("--no-group", is_flag=True, help="It may be in no consumer group.")
@click.option(
    "--any-group",
    is_flag=True,
    help="As without the right: hastore's own clients may be in every group, RocketMQ's in none.",
)
@click.option("--admin/--no-admin", default=None, help="Whether it may administer nodes.")
@click.option(
    "--quota",
    multiple=True,
    metavar="NAME=VALUE",
    help="A bound, as bytes_per_s=10MiB; `NAME=` removes it. May be repeated.",
)
@with_json
def rights_command(
    name: str,
    path: str,
    produce: tuple[str, ...],
    no_produce: bool,
    consume: tuple[str, ...],
    no_consume: bool,
    groups: tuple[str, ...],
    no_group: bool,
    any_group: bool,
    admin: bool | None,
    quota: tuple[str, ...],
    as_json: bool,
) -> int:
    """Change what the identity NAME in FILE may do; without an option, show it.

    An option replaces all patterns of its right; rights without an option stay. The keys of the
    identity go on to count. A running node takes the change within seconds, and ends the
    identity's connections; its clients connect again.
    """
    for option, ways in (
        ("--produce", (bool(produce), no_produce)),
        ("--consume", (bool(consume), no_consume)),
        ("--group", (bool(groups), no_group, any_group)),
    ):
        if sum(ways) > 1:
            raise UsageError(f"{option} and its opposite do not go together: leave one out")
    bounds = _bounds(quota)
    with folder_locked(path):
        editor = IdentityEditor(path)
        before = editor.find(name)
        wanted = dataclasses.replace(
            before,
            produce=() if no_produce else produce or before.produce,
            consume=() if no_consume else consume or before.consume,
            groups=None if any_group else () if no_group else groups or before.groups,
            is_admin=before.is_admin if admin is None else admin,
        )
        after = editor.set_rights(wanted, bounds)
        if after != before:
            editor.save()
    old, new = ({**_shown_rights(one), "quota": _shown_quota(one)} for one in (before, after))
    if as_json:
        limits = None if after.quota is None else dataclasses.asdict(after.quota)
        shown = {"name": name, "file": path, **after.rights, "quota": limits}
        print_json({**shown, "changed": after != before})
        return DONE
    for right, text in new.items():
        was = "" if text == old[right] else f"  (was {old[right]})"
        print_text(f"{right + ':':9}{text}{was}")
    if after != before:
        print_text(
            f"identity {name} is changed in {path}: nodes that use this file end its connections, "
            "and its clients connect again"
        )
    return DONE


def _bounds(quota: tuple[str, ...]) -> dict[str, str]:
    """Return the texts of `--quota` by name."""
    found = {}
    for one in quota:
        bound, equals, text = one.partition("=")
        if not equals:
            raise UsageError(f"--quota {short(one)} has no `=`; write it as in topics=50")
        if bound in found:
            raise UsageError(f"--quota {short(bound)} is given twice; leave one out")
        found[bound] = text
    return found


def _shown_rights(identity: Identity) -> dict[str, str]:
    return {
        "produce": ",".join(identity.produce) or "-",
        "consume": ",".join(identity.consume) or "-",
        "groups": "-" if identity.groups == () else ",".join(identity.groups or ("any",)),
        "admin": "yes" if identity.is_admin else "-",
    }


def _shown_quota(identity: Identity) -> str:
    quota = {} if identity.quota is None else dataclasses.asdict(identity.quota)
    bounds = [f"{bound}={number}" for bound, number in quota.items() if number is not None]
    return ",".join(bounds) or "-"


@click.command("revoke", short_help="Remove an identity, or its old keys.")
@click.argument("name")
@with_file
@click.option("--old", is_flag=True, help="Remove all its keys but the newest; the identity stays.")
@with_json
def revoke_command(name: str, path: str, old: bool, as_json: bool) -> int:
    """Remove the identity NAME from FILE; a running node ends its connections within seconds."""
    with folder_locked(path):
        editor = IdentityEditor(path)
        identity = editor.find(name)
        removed = editor.revoke_old(name) if old else len(identity.timed)
        if not old:
            editor.revoke(name)
        if not old or removed:
            editor.save()
    if as_json:
        print_json({"name": name, "file": path, "keys": removed, "identity_removed": not old})
    elif not old:
        print_text(f"identity {name} is revoked: nodes that use {path} end its connections")
    elif removed:
        print_text(f"identity {name}: {counted(removed, 'old key')} revoked")
    else:
        print_note(f"identity {name} has no old keys")
    return DONE
