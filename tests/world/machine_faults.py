"""What is done to a machine's files, and what its operator asks of its node."""

from __future__ import annotations

import contextlib
import os

import msgspec

from hastore.config.model import Role
from hastore.dledger.driver.requests import AdminRequest
from hastore.server.dledger_node import DLedgerNode
from hastore.server.role_source import OneShotFile
from tests.world.disk import Disk
from tests.world.machines import ROOT, Machine
from tests.world.scheduler import EPOCH_S


class FaultyMachine(Machine):
    """A Machine whose disk may be changed by others."""

    image: Disk | None = None
    lost_disks = 0
    aside = False  # its node is not to run: not added yet, or removed

    # -- operators

    def _wall_ms(self) -> int:
        return int((EPOCH_S + self.world.now + self.wall_ahead_s) * 1000)

    def _write(self, name: str, content: msgspec.Struct) -> None:
        """Write a file as a command does; a disk that refuses it makes the command fail."""
        with contextlib.suppress(OSError):
            path = f"{ROOT}/{name}"
            self.disk.make_dirs(os.path.dirname(path))
            with contextlib.closing(self.disk.open(path, create=True)) as file:
                file.truncate(0)
                file.pwrite(msgspec.json.encode(content), 0)

    def promote(self) -> None:
        """Do what `hastore promote` does: the role in the file, and the order of this moment."""
        if self.node is not None:
            self._write("hastore/once.json", OneShotFile(
                command="promote", epoch=self.node.state.last_epoch, wall_ms=self._wall_ms()
            ))  # fmt: skip
        self.set_config(role=Role.SYNC_MASTER)

    def ask(self, command: str, node: int, by: int | None = None) -> None:
        """Do what `hastore dledger` does, with this node's file."""
        if isinstance(self.node, DLedgerNode) and self.node.driver.core is not None:
            core = self.node.driver.core
            self._write("dledger-request.json", AdminRequest(
                id=f"{self.world.product.getrandbits(64):016x}", command=command, node=node,
                term=self.node.driver.term, members=tuple(core.members), wall_ms=self._wall_ms(),
                by=by,
            ))  # fmt: skip

    def retain(self, max_size_bytes: int | None) -> None:
        """Change the file's retention."""
        retention = msgspec.structs.replace(
            self.config.store.retention, max_size_bytes=max_size_bytes
        )
        self.set_config(store=msgspec.structs.replace(self.config.store, retention=retention))

    # -- files

    def choose_file(self, part: float) -> str | None:
        files = self.disk.files(ROOT)
        return files[int(part * len(files))] if files else None

    def choose_folder(self, part: float) -> str | None:
        folders = sorted({os.path.dirname(path) for path in self.disk.files(ROOT)})
        return folders[int(part * len(folders))] if folders else None

    def rot(self, part: float, *, log: bool) -> None:
        """Change a bit somewhere in a file that has content; in a log, in the body of a message.

        RocketMQ's records have a CRC of their body only: nobody can tell a changed header.
        """
        files = [
            path for path in self.disk.files(ROOT)
            if self.disk.size(path) and (not log or self._in_log(path))
        ]  # fmt: skip
        if files:
            path = files[int(part * len(files))]
            place = int(part * 7919.0 % 1.0 * self.disk.size(path))
            if log:
                place = self.disk.read_bytes(path).find(b"....", place)
                if place < 0:
                    return
            self.disk.rot(path, place, 1 << int(part * 1e6) % 8)

    @staticmethod
    def _in_log(path: str) -> bool:
        return os.path.basename(os.path.dirname(path)) in ("commitlog", "data")

    def move_back(self) -> None:
        for path in sorted({os.path.dirname(path) for path in self.disk.files(ROOT)}):
            whole = path.partition(".moved")[0]
            if whole != path and not self.disk.exists(whole):
                with contextlib.suppress(OSError):
                    self.disk.rename(f"{whole}.moved", whole)

    def put_back_image(self) -> None:
        """Put an old copy of the disk in its place, as after a restored snapshot."""
        if self.image is not None:
            self.kill()
            self.image.boots = self.disk.boots + 1
            self.disk, self.image = self.image, None

    def restore_file(self, part: float) -> None:
        old = self.image
        if old is None or not old.files(ROOT):
            return
        files = old.files(ROOT)
        path = files[int(part * len(files))]
        self._place(path, old.read_bytes(path))

    def take_file_of(self, other: Machine, part: float) -> None:
        files = other.disk.files(ROOT)
        if files:
            path = files[int(part * len(files))]
            self._place(path, other.disk.read_bytes(path))

    def _place(self, path: str, content: bytes) -> None:
        self.kill()
        with contextlib.suppress(OSError):
            self.disk.make_dirs(os.path.dirname(path))
            with contextlib.closing(self.disk.open(path, create=True)) as file:
                file.truncate(0)
                file.pwrite(content, 0)

    def lose_disk(self) -> None:
        """Come back with a new, empty disk."""
        self.kill()
        self.lost_disks += 1
        self.disk = type(self.disk)(f"{self.disk.name} new {self.lost_disks}")
        self.prepare_disk()
