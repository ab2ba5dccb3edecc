"""What is done to a machine's files, and what its operator asks of its node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import msgspec

from hastore.config.model import Role
from hastore.dledger.driver.requests import AdminRequest
from hastore.errors import HastoreError, RegistryError
from hastore.registry.editing import open_editor
from hastore.registry.entry import Once
from hastore.repair.mending import Source
from hastore.repair.stopped import PeerLog, Report, opened, repair
from hastore.server.dledger_node import DLedgerNode
from hastore.server.role_source import OneShotFile
from tests.world.disk import Disk
from tests.world.machines import ROOT, Machine
from tests.world.scheduler import EPOCH_S, Host


def _chosen(paths: Sequence[str], part: float) -> str | None:
    """Return the path at a part of the list, in [0, 1); None if there is none."""
    return paths[int(part * len(paths))] if paths else None


class FaultyMachine(Machine):
    """A Machine whose disk may be changed by others."""

    image: Disk | None = None
    lost_disks = 0
    operator: Host | None = None  # where commands run that need a connection
    aside = False  # its node is not to run: not added yet, or removed

    # -- operators

    def _wall_ms(self) -> int:
        return int((EPOCH_S + self.world.now + self.wall_ahead_s) * 1000)

    def _write(self, path: str, content: bytes) -> None:
        """Write a file as a command does; a disk that refuses it makes the command fail."""
        with contextlib.suppress(OSError):
            self.disk.make_dirs(os.path.dirname(path))
            with contextlib.closing(self.disk.open(path, create=True)) as file:
                file.truncate(0)
                file.pwrite(content, 0)

    def _order(self, name: str, content: msgspec.Struct) -> None:
        """Write a file that the node takes."""
        self._write(f"{ROOT}/{name}", msgspec.json.encode(content))

    def promote(self, *, force_unclean: bool = False) -> None:
        """Do what `hastore promote` does: the role, and the order of this moment."""
        if self.config.registry is not None:
            self._assign(Role.SYNC_MASTER, force_unclean=force_unclean)
            return
        self.orders.now(Role.SYNC_MASTER)
        if self.node is not None:
            self._order("hastore/once.json", OneShotFile(
                command="promote", epoch=self.node.state.last_epoch, wall_ms=self._wall_ms(),
                force_unclean=force_unclean,
            ))  # fmt: skip
        self.set_config(role=Role.SYNC_MASTER)

    def demote(self) -> None:
        """Do what `hastore demote` does."""
        if self.config.registry is not None:
            self._assign(Role.SLAVE)
        else:
            self.orders.now(Role.SLAVE)
            self.set_config(role=Role.SLAVE)

    def _assign(self, role: Role, *, force_unclean: bool = False) -> None:
        """Write a role to ZooKeeper; if that does not answer, the command fails."""
        assert self.operator is not None, "roles in ZooKeeper need an operator who writes them"
        config, once = self.config, None
        if self.node is not None:
            once = Once(
                id=f"{self.world.product.getrandbits(64):016x}",
                command="demote" if role is Role.SLAVE else "promote",
                epoch=self.node.state.last_epoch, wall_ms=self._wall_ms(),
                force_unclean=force_unclean,
            )  # fmt: skip

        order = self.orders.begin(role)

        def command() -> None:
            try:
                with open_editor(config) as editor:
                    editor.change(role, once)
            except RegistryError:
                order.failed = True
            order.ended_s = self.world.now

        self.world.spawn(self.operator, "command", command)

    def ask(self, command: str, node: int, by: int | None = None) -> None:
        """Do what `hastore dledger` does, with this node's file."""
        if isinstance(self.node, DLedgerNode) and self.node.driver.core is not None:
            core = self.node.driver.core
            self._order("dledger-request.json", AdminRequest(
                id=f"{self.world.product.getrandbits(64):016x}", command=command, node=node,
                term=self.node.driver.term, members=tuple(core.members), wall_ms=self._wall_ms(),
                by=by,
            ))  # fmt: skip

    def repair_log(self) -> bool:
        """Do what `hastore log repair` does; return whether the log is sound now."""
        if self.running:
            return False
        own, report = self.config, Report(ROOT, dry_run=False)
        self.running = True  # its operator does not start it meanwhile
        try:
            with (
                contextlib.ExitStack() as stack,
                opened(ROOT, node=own.node, cluster=own.cluster, group=own.group, fs=self.disk)
                as stopped,
            ):  # fmt: skip
                sources: list[Source] = []
                for number, place in own.nodes.items():
                    peer = PeerLog(place.api)
                    stack.callback(peer.close)
                    if number != own.node and peer.look(
                        node=own.node, cluster=own.cluster, group=own.group, mode=own.mode.value
                    ) is None:  # fmt: skip
                        sources.append(peer)
                repair(stopped, sources, report)
        except (HastoreError, OSError):
            return False
        finally:
            self.running = False
        return report.ok

    def retain(self, max_size_bytes: int | None) -> None:
        """Change the file's retention."""
        retention = msgspec.structs.replace(
            self.config.store.retention, max_size_bytes=max_size_bytes
        )
        self.set_config(store=msgspec.structs.replace(self.config.store, retention=retention))

    # -- files

    def choose_file(self, part: float) -> str | None:
        return _chosen(self.disk.files(ROOT), part)

    def choose_folder(self, part: float) -> str | None:
        return _chosen(self._folders(), part)

    def _folders(self) -> list[str]:
        return sorted({os.path.dirname(path) for path in self.disk.files(ROOT)})

    def rot(self, part: float, *, log: bool, others: Sequence[FaultyMachine] = ()) -> bool:
        """Change a bit somewhere in a file that has content; in a log, in the body of a message.

        RocketMQ's records have a CRC of their body only: nobody can tell a changed header. Returns
        whether one of the `others` has the same bytes there, or nothing was changed.
        """
        files = [
            path for path in self.disk.files(ROOT)
            if self.disk.size(path) and (not log or self._in_log(path))
        ]  # fmt: skip
        path = _chosen(files, part)
        if path is not None:
            place = int(part * 7919.0 % 1.0 * self.disk.size(path))
            content = self.disk.read_bytes(path)
            if log:
                place = content.find(b"....", place)
                if place < 0:
                    return True
            around = content[max(0, place - 64) : place + 4]
            self.disk.rot(path, place, 1 << int(part * 1e6) % 8)
            return any(one.has_in_log(os.path.basename(path), place, around) for one in others)
        return True

    def has_in_log(self, name: str, place: int, around: bytes) -> bool:
        """Whether a file of the log has these bytes before `place` and four bytes from there on."""
        at = max(0, place - 64)
        return any(
            self.disk.read_bytes(path)[at : at + len(around)] == around
            for path in self.disk.files(ROOT)
            if os.path.basename(path) == name and self._in_log(path)
        )

    @staticmethod
    def _in_log(path: str) -> bool:
        return os.path.basename(os.path.dirname(path)) in ("commitlog", "data")

    def move_back(self) -> None:
        for path in self._folders():
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
        """Put one file of an old copy of the disk in its place."""
        if self.image is not None:
            self._take_file(self.image, part)

    def take_file_of(self, other: Machine, part: float) -> None:
        """Get a file that belongs to another machine."""
        self._take_file(other.disk, part)

    def _take_file(self, disk: Disk, part: float) -> None:
        path = _chosen(disk.files(ROOT), part)
        if path is not None:
            content = disk.read_bytes(path)
            self.kill()
            self.disk.make_dirs(os.path.dirname(path))  # it may have been removed, or moved
            self._write(path, content)

    def lose_disk(self) -> None:
        """Come back with a new, empty disk."""
        self.kill()
        self.lost_disks += 1
        self.disk = type(self.disk)(f"{self.disk.name} new {self.lost_disks}")
        self.prepare_disk()
