"""The small files that no other workload writes, each by the code of the product that owns it."""

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, BinaryIO
from unittest.mock import patch

import msgspec

from hastore.clock import SYSTEM_CLOCK
from hastore.config.model import Role
from hastore.fs import private_files
from hastore.registry.remembered import RegistryMemory
from hastore.server.role_source import OneShotFile, OneShotFlags
from hastore.server.scrub_service import Progress
from hastore.store.state.limits import Limits, LimitsPage, read_limits
from hastore.store.state.replay_progress import ReplayState, read_dispatched
from tests.crash.recording import RecordingFileSystem
from tests.crash.violation import Violation

ROOT = "/node"
IDENTITIES = "/etc/identities.yaml"


class Descriptors:
    """The calls of `os` and `tempfile` that private files make, over a recorded disk."""

    O_RDONLY, O_WRONLY, O_CREAT, O_EXCL = os.O_RDONLY, os.O_WRONLY, os.O_CREAT, os.O_EXCL
    O_CLOEXEC, O_DIRECTORY = os.O_CLOEXEC, os.O_DIRECTORY

    def __init__(self, fs: RecordingFileSystem) -> None:
        self._fs = fs
        self._open: list[Any] = []
        self.unlink, self.replace = fs.remove, fs.rename
        self.path = SimpleNamespace(
            realpath=os.path.normpath, abspath=os.path.normpath, dirname=os.path.dirname,
            exists=fs.exists,
        )  # fmt: skip

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        del mode
        self._open.append(path if flags & os.O_DIRECTORY else self._fs.create_new(path))
        return len(self._open) - 1

    def mkstemp(self, prefix: str, dir: str) -> tuple[int, str]:
        path = f"{dir}/{prefix}{len(self._open)}"
        return self.open(path, 0), path

    def fdopen(self, descriptor: int, mode: str) -> BinaryIO:
        del mode
        return _Stream(self._open[descriptor], descriptor)

    def fsync(self, descriptor: int) -> None:
        one = self._open[descriptor]
        self._fs.sync_dir(one) if isinstance(one, str) else one.sync()

    def stat(self, path: str) -> Any:
        del path
        return SimpleNamespace(st_uid=0, st_gid=0)

    def fchmod(self, descriptor: int, mode: int) -> None: ...

    def fchown(self, descriptor: int, user: int, group: int) -> None: ...

    def close(self, descriptor: int) -> None: ...

    def geteuid(self) -> int:
        return 0


class _Stream:
    def __init__(self, file: Any, descriptor: int) -> None:
        self._file = file
        self._descriptor = descriptor

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes) -> None:
        self._file.pwrite(data, 0)

    def flush(self) -> None: ...

    def fileno(self) -> int:
        return self._descriptor


class SmallRun:
    """Write the files in any order; each is promised by itself."""

    def __init__(self, fs: RecordingFileSystem, seed: int) -> None:
        self.fs = fs
        self.chance = random.Random(seed)
        self.number = 0
        fs.make_dirs(f"{ROOT}/hastore")
        fs.make_dirs(f"{ROOT}/config")
        fs.make_dirs("/etc")
        fs.make_dirs("/job")
        self.page = LimitsPage(fs, ROOT)
        self.page.open(Limits(boot_id=bytes(16), file_size=8192))
        self.progress = ReplayState(fs, f"{ROOT}/hastore/replay", units=1, slots=1, entries=1)
        self.flushed = self.synced = 0
        fs.promise((0, 0))

    def go(self, count: int) -> None:
        """Carry out steps."""
        steps: list[Callable[[], None]] = [
            self.flip, self.scrub, self.registry, self.broker, self.job, self.identity,
            self.limits, self.limits, self.replay,
        ]  # fmt: skip
        for _ in range(count):
            self.number += 1
            self.chance.choice(steps)()

    def flip(self) -> None:
        """Ask for a flip once, and take the request."""
        now = SYSTEM_CLOCK.wall_ms()
        request = OneShotFile(command="promote", epoch=self.number, wall_ms=now)
        self.fs.replace_bytes(f"{ROOT}/hastore/once.json", msgspec.json.encode(request))
        if self.chance.random() < 0.7:
            OneShotFlags(self.fs, ROOT, SYSTEM_CLOCK).take_flags("promote", self.number)

    def scrub(self) -> None:
        now = Progress(self.number, 1, 2, [])
        self.fs.replace_bytes(f"{ROOT}/hastore/scrub.json", msgspec.json.encode(now) + b"\n")

    def registry(self) -> None:
        memory = RegistryMemory(self.fs, ROOT, 1)
        memory.load()
        memory.save(role=self.chance.choice((Role.SLAVE, Role.SYNC_MASTER)), changed=self.number)

    def broker(self) -> None:
        """What a broker hands over, as BrokerTables keeps it."""
        self.fs.replace_bytes(f"{ROOT}/config/topics.json", b'{"n": %d}' % self.number)

    def job(self) -> None:
        """How far a job of the pipeline came."""
        self.fs.replace_bytes("/job/state.json", b'{"job": %d}' % self.number)

    def identity(self) -> None:
        data = b"identities: %d\n" % self.number * 40
        fs, path = self.fs, IDENTITIES
        calls = Descriptors(fs)
        with patch.object(private_files, "os", calls), patch.object(
            private_files, "tempfile", calls
        ):
            with fs.replaced(path, data):
                private_files.replace_file(path, data, 0o600)
            key = f"/etc/{self.number}.key"
            private_files.create_file(key, data, 0o600)
            fs.kept(key, data)  # a command that has not ended has made no key

    def limits(self) -> None:
        """Move the limits; synced once in a while, as the store does."""
        sync = self.chance.random() < 0.3
        self.flushed += self.chance.randrange(100)
        self.page.update(flushed=self.flushed, sync=sync)
        self.synced = self.flushed if sync else self.synced
        self.fs.promise((self.synced, self.flushed))

    def replay(self) -> None:
        self.progress.save_dispatched(self.number)
        if self.chance.random() < 0.3:
            self.progress.save_synced(self.number)


def check(fs: RecordingFileSystem, note: tuple[int, int], chance: random.Random) -> object:
    """Load each file by the code that does so at a start."""
    del chance
    fs.promise(note)
    page = read_limits(fs, ROOT)
    low, high = note
    if page is None and low:
        raise Violation("the limits page is gone")
    if page is not None and not low <= page.flushed_offset:
        raise Violation(f"flushed is {page.flushed_offset}, not {low} to {high}")
    read_dispatched(fs, f"{ROOT}/hastore/replay")
    RegistryMemory(fs, ROOT, 1).load()
    OneShotFlags(fs, ROOT, SYSTEM_CLOCK).take_flags("promote", 1)
    path = f"{ROOT}/hastore/scrub.json"
    if fs.exists(path):
        msgspec.json.decode(fs.read_bytes(path), type=Progress)
    return note
