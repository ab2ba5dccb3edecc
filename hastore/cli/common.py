"""What all commands share: exit codes, one-line errors, options, the nodes' addresses, and output.

`LazyGroup` imports the modules of its commands only when they are used, so that each starts fast.

`JsonErrors` has commands whose `--json` covers errors: each ends with one JSON object on stdout. A
program that runs such a command reads its last line of stdout: the summary, or an object with
`error`, `type` and `exit_code`. The line `error: ...` for people is on stderr in both cases.
"""

import difflib
import importlib
import io
import json
import math
import os
import pathlib
import shlex
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import click

from hastore.addresses import is_group_address, parse_address, parse_group_address
from hastore.bounded_log import one_line
from hastore.config.checks import SIZE_UNITS, parse_size
from hastore.config.file import load_config, parse_overrides
from hastore.errors import ConfigError, HastoreError, StoreError, UsageError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem
    from rich.console import Console
    from rich.progress import Progress
_JSON_ASKED = "hastore.json"  # in click's meta: whether the arguments have --json


class LazyGroup(click.Group):
    """Import a command's module only when the command is used or listed.

    `places` maps each command to "module:object", in the order in which the help lists them.
    """

    def __init__(self, *args: Any, places: Mapping[str, str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = places

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they were given."""
        return list(self._places)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command; None for an unknown name."""
        if cmd_name not in self._places:
            return None
        module, _, name = self._places[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command; the error for an unknown name suggests the nearest one."""
        name = args[0]
        near = [] if name in self._places else difflib.get_close_matches(name, self._places, 1)
        if near:
            ctx.fail(f"No such command {name!r}, did you mean {near[0]}?")
        return super().resolve_command(ctx, args)


DONE = 0
FAILED = 1
WRONG = 2  # wrong usage or configuration
STORE = 3  # the store is in use or broken
DIFFER = 4  # a put is not confirmed, no node takes default puts, or two logs differ
_INTERRUPTED = 130
# Before click 8.2 a group without arguments prints its help and exits with 0, without this error.
_NO_ARGUMENTS: tuple[type[click.UsageError], ...] = tuple(
    kind for kind in (getattr(click.exceptions, "NoArgsIsHelpError", None),) if kind
)


LONGEST_S = 1e9  # 31 years; the system's calls do not take any time


class Seconds(click.FloatRange):
    """A time to wait, in seconds: above 0, or, with `or_none`, at least 0. NaN is refused.

    `inf`, or any time above LONGEST_S, is that time.
    """

    def __init__(self, *, or_none: bool = False) -> None:
        super().__init__(0, min_open=not or_none)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; fail as click does if the text is not a number in the range."""
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a time to wait.", param, ctx)
        return min(seconds, LONGEST_S)


def size_from_mib(
    text: str, context: click.Context | None = None, option: click.Parameter | None = None
) -> int:
    """Return the bytes of a size with a unit as in a node's file; a number alone is MiB.

    Raises click.BadParameter.
    """
    found = parse_size(text)
    problem = f"{text!r} is no size; write one like 256MiB or 1GiB"
    if found is not None:
        number, unit = found
        size = number * SIZE_UNITS[unit or "MiB"]
        if SIZE_UNITS["MiB"] <= size <= 1024 * SIZE_UNITS["TiB"]:
            return size
        problem = f"{text} is not in the range: 1MiB to 1024TiB"
    raise click.BadParameter(problem, ctx=context, param=option)


class Folder(click.types.StringParamType):
    """A folder's place. An empty one, as of a shell's variable that is not set, is refused.

    It would be the working directory.
    """

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Return the place; fail as click does if it is empty."""
        place = str(super().convert(value, param, ctx))
        if not place.strip():
            self.fail("it is empty; name a folder (. is the working directory)", param, ctx)
        return place


def complete_files(
    _context: click.Context, _parameter: click.Parameter, begin: str
) -> "list[CompletionItem]":
    """Let the shell complete a file's name."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(begin, type="file")]


def _complete_addresses(
    _context: click.Context, _parameter: click.Parameter, begin: str
) -> "list[CompletionItem]":
    """Complete the last one of addresses, to those of HASTORE_BOOTSTRAP or of conf/."""
    from click.shell_completion import CompletionItem

    try:
        known = bootstrap_addresses(None)
    except HastoreError:  # a shell shows no errors while it completes
        return []
    before, comma, last = begin.rpartition(",")
    names = [one.removeprefix("tcp://") for one in known]
    fitting = [one for one in names if one.startswith(last) and one not in before.split(",")]
    return [CompletionItem(before + comma + one) for one in fitting]


_SECURITY = "HASTORE_SECURITY"
_WIDE = 100_000  # columns if stdout is a pipe: no line is wrapped or shortened
stdout: "Console"
stderr: "Console"


def __getattr__(name: str) -> Any:
    """Create `stdout` or `stderr` on first use: a node starts faster without rich."""
    if name not in ("stdout", "stderr"):
        raise AttributeError(name)
    from rich.console import Console

    file = sys.stderr if name == "stderr" else sys.stdout
    made = Console(stderr=name == "stderr", width=None if file.isatty() else _WIDE)
    return globals().setdefault(name, made)


def run(command: click.Command, name: str) -> NoReturn:
    """Run a command and exit with its code; each error is one line on stderr."""
    _open_standard_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a name may have any letters
    sys.exit(run_code(command, name))


def _open_standard_streams() -> None:
    """Put the null device in the place of standard streams that whoever started this has closed.

    The next files would get their numbers: what the interpreter or a library writes to descriptor 2
    at its end would be in the log.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))


def run_code(
    command: click.Command, name: str, arguments: list[str] | None = None, *, obj: object = None
) -> int:
    """Run a command and return its exit code; `obj` becomes the object of click's context."""
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False, obj=obj)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except _NO_ARGUMENTS as wrong:
        print_note(wrong.format_message())
        return WRONG
    except (click.ClickException, HastoreError, OSError) as failed:
        code, text = explain(failed, name)
        print_error(text)
        return code
    except (KeyboardInterrupt, click.Abort):
        return _INTERRUPTED


def explain(error: click.ClickException | HastoreError | OSError, name: str) -> tuple[int, str]:
    """Return the exit code for an error, and the text for people; `name` is the program's."""
    match error:
        case click.UsageError():
            path = error.ctx.command_path if error.ctx is not None else name
            return WRONG, f"{path}: {error.format_message().rstrip('.')}; see {path} --help"
        case click.ClickException():
            return WRONG, f"{name}: {error.format_message()}"
        case ConfigError() | UsageError():
            return WRONG, str(error)
        case StoreError():
            return STORE, str(error)
        case HastoreError():
            return FAILED, str(error)
        case PermissionError():
            remedy = (
                "run the command as the user who owns it; for a store see also store.group_read"
            )
            return FAILED, f"{name}: {error}; {remedy}"
        case _:
            return FAILED, f"{name}: {error}"


def print_note(text: str) -> None:
    """Print a line on stderr."""
    print(shown(text), file=sys.stderr, flush=True)


def shown(text: str) -> str:
    """Return a text as a terminal may get it: what is not printable is escaped, but for its lines.

    A part of it may be of a client's choice, such as its id.
    """
    return "\n".join(map(one_line, text.split("\n")))


def print_error(text: str) -> None:
    """Print an error as one line on stderr; a part of it may come from a node, or from a peer."""
    print_note("error: " + one_line(" ".join(text.split())))


def print_text(text: str, style: str | None = None) -> None:
    """Print a line for people on stdout, without markup.

    The terminal wraps it, so that a path or a command in it can be copied whole.
    """
    console: Console = __getattr__("stdout")
    console.print(shown(text), style=style, markup=False, highlight=False, soft_wrap=True)


def counted(number: int, name: str) -> str:
    """Return e.g. "1 file" or "2 files"."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def fitting_table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    keep: int = 1,
    right: Collection[str] = (),
    width: int | None,
) -> list[str]:
    """Return the lines of a table that is at most `width` characters wide (None: no limit).

    If not all columns fit, the last ones are left out, but never the first `keep` columns. The
    columns named in `right` are aligned to the right. What is not printable in a cell is escaped.
    """
    rows = [list(map(one_line, row)) for row in rows]
    sizes = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    shown = len(head)
    while width is not None and shown > keep and sum(sizes[:shown]) + 2 * (shown - 1) > width:
        shown -= 1
    lines = []
    for row in (head, *rows):
        cells = [
            cell.rjust(size) if name in right else cell.ljust(size)
            for cell, size, name in zip(row[:shown], sizes, head, strict=False)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def terminal_columns() -> int | None:
    """Return the width of the terminal at stdout (or COLUMNS); None in a pipe."""
    console: Console = __getattr__("stdout")
    return console.width if console.is_terminal else None


def program(name: str) -> str:
    """Return the command by which this user can run `hastore`, `hastore-master` and so on.

    If the folder of the running program has this command, it is used: by its bare name if the PATH
    leads to that file, else by its path. Otherwise a command on the PATH is used by its bare name.
    If there is none, the result is this Python with `-m hastore`.
    """
    called = sys.argv[0]
    beside = os.path.join(os.path.dirname(called), name)
    found = shutil.which(name)
    if os.path.basename(called).startswith("hastore") and os.access(beside, os.X_OK):
        if found is None or not os.path.samefile(found, beside):
            return shlex.quote(beside)
    if found is not None:
        return name
    module = shlex.quote(sys.executable) + " -m hastore"
    return module if name == "hastore" else f"{module} serve"


def print_json(value: Mapping[str, Any]) -> None:
    """Print one object as a line of JSON on stdout."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def progress_bar(*, visible: bool = True) -> "Progress":
    """Return a progress display on stderr; hidden when stderr is not a terminal."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console: Console = __getattr__("stderr")
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not visible or not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # data for a pipe stays on stdout
    )


def bootstrap_addresses(given: str | None) -> list[str]:
    """Return the nodes' client addresses: `given`, else HASTORE_BOOTSTRAP, else those in `conf/`.

    `conf/` is searched in the working directory, then in the checkout. Raises UsageError for a bad
    address, and when no address is found.
    """
    named = "--bootstrap" if given else "HASTORE_BOOTSTRAP"  # where a wrong one is to be corrected
    text = given or os.environ.get("HASTORE_BOOTSTRAP")
    if not text:
        return _configured_addresses()
    if is_group_address(text):
        try:
            return [str(parse_group_address(text))]
        except UsageError as wrong:
            raise UsageError(f"{named}: {wrong}") from wrong
    addresses = []
    for part in text.split(","):
        scheme = "zmq+tcp://" if part.strip().startswith("zmq+tcp://") else "tcp://"
        bare = part.strip().removeprefix(scheme)
        if parse_address(bare) is None:
            raise UsageError(
                f"{named}: {part.strip()!r} is not an address; write HOST:PORT,HOST:PORT"
            )
        addresses.append(scheme + bare)
    return addresses


def _configured_addresses() -> list[str]:
    checkout = pathlib.Path(__file__).resolve().parents[2]
    for folder in (pathlib.Path.cwd() / "conf", checkout / "conf"):
        classic = [folder / name for name in ("master.yaml", "slave.yaml")]
        files = [file for file in classic if file.is_file()]
        addresses: dict[str, None] = {}
        for file in files or sorted(folder.glob("dledger-n*.yaml")):
            nodes = load_config(str(file)).nodes.values()
            addresses.update(dict.fromkeys(node.api for node in nodes))
        if addresses:
            return list(addresses)
    raise UsageError(
        "no node address is known; give --bootstrap HOST:PORT,HOST:PORT or set HASTORE_BOOTSTRAP"
    )


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _use_security(
    context: click.Context, _option: click.Parameter | None, path: str | None
) -> None:
    """Let all clients of this command use a security file, as if HASTORE_SECURITY named it."""
    if path is None:
        return
    before = os.environ.get(_SECURITY)

    def restore() -> None:
        if before is None:
            os.environ.pop(_SECURITY, None)
        else:
            os.environ[_SECURITY] = before

    os.environ[_SECURITY] = os.path.abspath(path)
    context.call_on_close(restore)


def keep_security(context: click.Context) -> None:
    """Make the path in HASTORE_SECURITY absolute, for a command that changes its folder."""
    _use_security(context, None, os.environ.get(_SECURITY) or None)


with_security: Decorator = click.option(
    "--security",
    metavar="FILE",
    expose_value=False,
    callback=_use_security,
    help="How to prove who this command is: a YAML file (default: HASTORE_SECURITY).",
)


def with_bootstrap(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--bootstrap`, which arrives as `bootstrap`, and `--security`."""
    option = click.option(
        "--bootstrap",
        metavar="ADDR,ADDR",
        shell_complete=_complete_addresses,
        help="The nodes' api addresses, or zk://HOST:PORT/CLUSTER/GROUP (default: "
        "HASTORE_BOOTSTRAP, else the files in conf/).",
    )
    return option(with_security(function))


with_json: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object per line, for programs."
)
with_config: Decorator = click.option(
    "-c", "--config", "path", required=True, metavar="FILE", shell_complete=complete_files,
    help="The node's configuration file.",
)  # fmt: skip


def with_patience(default_s: float, help_text: str) -> Decorator:
    """Add `--patience SECONDS`, which arrives as `patience_s`."""
    return click.option(
        "--patience",
        "patience_s",
        type=Seconds(),
        default=default_s,
        show_default=True,
        metavar="SECONDS",
        help=help_text,
    )


def with_overrides(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-o dotted.key=value`, which arrives as the mapping `overrides`."""
    return click.option(
        "-o",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        callback=lambda _context, _option, pairs: parse_overrides(pairs),
        help="Override a configuration key (not role), e.g. -o store.flush=sync.",
    )(function)


class Stopped(click.exceptions.Exit):
    """A signal ended the command; the text says what remains, and the code is 128 + its number."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code)
        self.text = text


class JsonErrors(LazyGroup):
    """A group of commands that print an error as JSON, too, if they are called with --json."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Note whether errors are wanted as JSON: those of the arguments are among them."""
        ctx.meta[_JSON_ASKED] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. With --json, the object is printed after the line on stderr."""
        if not ctx.meta[_JSON_ASKED]:
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except Stopped as stop:
            _print_failure("Stopped", stop.text, stop.exit_code)
            raise
        except BrokenPipeError:
            raise
        except (click.ClickException, HastoreError, OSError) as error:
            code, text = explain(error, ctx.find_root().info_name or "")
            print_error(text)
            _print_failure(type(error).__name__, text, code)
            raise click.exceptions.Exit(code) from error
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as defect:
            kind = type(defect).__name__
            _print_failure(kind, str(defect) or kind, FAILED)
            raise


def _print_failure(kind: str, text: str, code: int) -> None:
    """Print the object of a command that has failed."""
    print_json({"error": " ".join(text.split()), "type": kind, "exit_code": code})
