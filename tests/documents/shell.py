"""A shell for the commands of the documents, as they are printed.

It is the system's `sh`. On its PATH `hastore` hands its arguments, input and folder to this
process, which runs the command (tests/cli/kit.py). What starts a node starts a real one, and
returns when it serves: `hastore-master`, `hastore-slave`, `hastore-dledger`, `hastore serve`, and
`systemctl start hastore@NAME` with the file /etc/hastore/NAME.yaml. Paths and hosts of the document
are replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import select
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import psutil
import yaml

from hastore.config.file import load_config
from hastore.testing import groups
from hastore.testing.groups import Ports
from tests.cli import kit
from tests.walk_through import processes

LIMIT_S = 120.0  # only a hang exceeds it
PROGRAMS = ("hastore", "hastore-master", "hastore-slave", "hastore-dledger", "systemctl")
OF_THE_USER = ("HASTORE_BOOTSTRAP", "HASTORE_SECURITY")
AT_ONCE = "HASTORE_TEST_AT_ONCE"  # in place of `&`: the start of a node returns before it serves
STUB = """#!{python} -IS
import json, os, socket, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
told = {{name: os.environ[name] for name in {variables!r} if name in os.environ}}
request = [words, os.getcwd(), told, sys.stdin.buffer.read().decode("latin-1")]
with socket.socket(socket.AF_UNIX) as link:
    link.connect("\\0{address}")
    link.sendall(json.dumps(request).encode())
    link.shutdown(socket.SHUT_WR)
    code, out, err = json.loads(link.makefile().read())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""


class Service(groups.Node):
    """A node that runs as its file says; its start, stop and status are those of a group's."""

    def __init__(self, path: pathlib.Path) -> None:
        """Read the file."""
        self.config = path
        self.log, self._out = path.with_suffix(".log"), path.with_suffix(".out")
        self._process, self._paused = None, False
        self._read_file()

    def _read_file(self) -> None:
        config = load_config(str(self.config))
        own = config.nodes[config.node]
        self.number = config.node
        self.api, self.ha, self.http = own.api, own.ha, own.http
        self.store = pathlib.Path(config.store.root).absolute()

    def start(self, *, wait: bool = True) -> None:
        """Start it as its file says now."""
        self._read_file()
        super().start(wait=wait)

    @property
    def ready_line(self) -> str:
        """The line that it prints once it serves."""
        return self._out.read_text()


class Shell:
    """Types commands in `folder`; ends all nodes at its end."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Put the programs on the PATH."""
        self.folder = folder
        self.etc = folder / "etc"  # stands for /etc/hastore
        self.services: dict[pathlib.Path, Service] = {}
        self.variables: dict[str, str] = {}  # of the user, such as HASTORE_BOOTSTRAP
        self.ports = Ports()
        self._listener = socket.socket(socket.AF_UNIX)
        address = f"hastore-documents-{os.getpid()}-{id(self)}"
        self._listener.bind(f"\0{address}")
        self._listener.listen()
        stubs = folder / ".programs"
        stubs.mkdir(parents=True)
        told = (*OF_THE_USER, AT_ONCE)
        for name in PROGRAMS:
            stub = stubs / name
            stub.write_text(STUB.format(python=sys.executable, variables=told, address=address))
            stub.chmod(0o755)
        (folder / "bin").symlink_to(stubs)
        self.etc.mkdir()

    def close(self) -> None:
        """Kill the nodes, free the ports. Fails if another process runs in the folder."""
        for service in self.services.values():
            service.kill()
        self._listener.close()
        self.ports.close()
        left = [one for one in processes(self.folder) if not is_warm(one)]
        for one in left:
            one.kill()
        assert left == [], "a command that is not on the shell's PATH was run"

    def service(self, name: str | pathlib.Path) -> Service:
        """Return the node of a file, or of `NAME.yaml` in what stands for /etc/hastore."""
        path = self.etc / f"{name}.yaml" if isinstance(name, str) else name.absolute()
        if path not in self.services:
            self.services[path] = Service(path)
        return self.services[path]

    # ---- what a document leaves to the reader

    def elsewhere(self, *files: pathlib.Path) -> str:
        """Give the nodes of these files free ports and small log files; return their bootstrap.

        That is the step "put the machines' addresses under `nodes`".
        """
        nodes = yaml.safe_load(files[0].read_text())["nodes"]
        numbers = sorted(nodes)
        others = dict(zip(numbers, self.ports.addresses(len(numbers)).values(), strict=True))
        for file in files:
            text = file.read_text()
            for number, old in nodes.items():
                for name in ("api", "ha", "http"):
                    text = text.replace(f'"{old[name]}"', f'"{others[number][name]}"')
            text = text.replace("commitlog_file_size: 1GiB", "commitlog_file_size: 1MiB")
            file.write_text(text)
        return ",".join(others[number]["api"].removeprefix("tcp://") for number in numbers)

    def make_group(self, *options: str) -> list[Service]:
        """Make a group with `hastore init`, its files where /etc/hastore is; start its nodes."""
        self.run(f"hastore init etc/g0 {' '.join(options)}")
        files = sorted((self.etc / "g0").glob("node*.yaml"))
        self.variables["HASTORE_BOOTSTRAP"] = self.elsewhere(*files)
        for file in files:
            file.rename(self.etc / file.name)
        services = [self.service(file.stem) for file in files]
        for service in services:
            service.start(wait=False)
        for service in services:
            service.wait_ready()
        self.run("hastore status --wait 60")
        return services

    # ---- commands

    def run(
        self, typed: str, code: int = 0, **places: str | pathlib.Path | Sequence[object]
    ) -> subprocess.CompletedProcess[str]:
        """Type a block; it must end with this exit code, by default none of its lines may fail.

        `places` replace words of the document; a list has one for each occurrence.
        """
        typed = replaced(typed, places)
        typed = typed.replace("/etc/hastore/", f"{self.etc}/")
        typed = re.sub(r"^(.*) &$", rf"{AT_ONCE}=1 \1", typed, flags=re.M)
        environment = {
            "PATH": f"{self.folder}/.programs:{pathlib.Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.folder), "LANG": "C.UTF-8", **self.variables,
        }  # fmt: skip
        out, err = self.folder / ".out", self.folder / ".err"
        with open(out, "wb") as to, open(err, "wb") as errors:
            process = subprocess.Popen(
                ["sh", "-eu", "-c", typed], cwd=self.folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=to, stderr=errors,
            )  # fmt: skip
            try:
                self._serve(process)
            finally:
                process.kill()
                process.wait()
        told, problems = out.read_text(), err.read_text()
        assert process.returncode == code, f"{process.returncode}: {typed}\n{told}{problems}"
        assert "Traceback" not in problems, problems
        return subprocess.CompletedProcess(typed, code, told, problems)

    def _serve(self, process: subprocess.Popen[bytes]) -> None:
        """Carry out what the programs ask for, until the shell has ended."""
        deadline = time.monotonic() + LIMIT_S
        end = os.pidfd_open(process.pid)
        try:
            while process.poll() is None:
                left_s = deadline - time.monotonic()
                assert left_s > 0, "the shell hangs"
                if self._listener in select.select([self._listener, end], [], [], left_s)[0]:
                    link, _ = self._listener.accept()
                    self._answer(link, *json.loads(link.makefile().read()))
        finally:
            os.close(end)

    def _answer(
        self, link: socket.socket, words: list[str], folder: str,
        variables: Mapping[str, str], stdin: str,
    ) -> None:  # fmt: skip
        with link, contextlib.chdir(folder), as_user(variables):
            link.sendall(json.dumps(self._carry_out(words, stdin.encode("latin-1"))).encode())

    def _carry_out(self, words: list[str], stdin: bytes) -> tuple[int, str, str]:
        name, *arguments = words
        if name == "systemctl":
            return self._systemctl(*arguments)
        if starts_node(words):
            service = self.service(pathlib.Path(arguments[-1]))
            return self._start(service, wait=AT_ONCE not in os.environ)
        done = kit.program(name, *arguments, stdin=stdin)
        return done.returncode, done.stdout, done.stderr

    def _systemctl(self, verb: str, *words: str) -> tuple[int, str, str]:
        names = [word.removeprefix("hastore@") for word in words if not word.startswith("-")]
        for name in names:
            service = self.service(name)
            if verb in ("stop", "restart"):
                assert service.stop() == 0, service.log.read_text()
            if verb in ("start", "restart", "enable"):
                self._start(service)
            elif verb == "status" and not service.running:
                return 3, "", f"{name} does not run\n"
        return 0, "", ""

    @staticmethod
    def _start(service: Service, *, wait: bool = True) -> tuple[int, str, str]:
        service.start(wait=wait)
        return 0, service.ready_line, ""


def starts_node(words: Sequence[str]) -> bool:
    """Whether a command runs a node until it is stopped."""
    name, *arguments = words
    runs = name in PROGRAMS[1:4] or (name == "hastore" and arguments[:1] == ["serve"])
    return runs and "--check" not in arguments


def is_warm(process: psutil.Process) -> bool:
    """Whether it is the server of hastore.testing.warm, which has the folder of its first node."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("warm_server" in word for word in process.cmdline())
    return True  # it has ended


@contextlib.contextmanager
def as_user(variables: Mapping[str, str]) -> Any:
    """Give this process the variables of a user for a moment, and no others of that kind."""
    with mock.patch.dict(os.environ, variables):
        for name in set(OF_THE_USER) - set(variables):
            os.environ.pop(name, None)
        yield


def replaced(typed: str, places: Mapping[str, str | pathlib.Path | Sequence[object]]) -> str:
    """Replace words of a document; each must be there."""
    for word, place in places.items():
        values = [place] if isinstance(place, (str, pathlib.Path)) else [*place]
        count = typed.count(word)
        assert count and len(values) in (1, count), f"{word!r} is {count} times in {typed!r}"
        for value in values * (count if len(values) == 1 else 1):
            typed = _once(typed, word, value)
    return typed.replace("\0", "")


def _once(typed: str, word: str, value: object) -> str:
    """Replace the next occurrence; a NUL after each letter keeps `word` out of what is put in."""
    hidden = "\0".join(shlex.quote(str(value)))
    return typed.replace(word, hidden, 1)


def eventually(look: Callable[[], object], what: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + LIMIT_S
    while not look():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
