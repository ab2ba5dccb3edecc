"""A mounted file system that loses at a power cut what was not synced: a FUSE server, in Python.

    python -m tests.crash.fuse_disk FOLDER

It speaks the kernel's protocol over /dev/fuse itself, so it needs no library, but the right to
mount. What is done to the file system is followed by `Disk`, which says what a power cut may leave.
The parent process writes commands to its stdin, each of which is answered by a line:

    cut SEED    unmount, lose what was not synced as the seed says, and mount what is left

At the end of stdin it unmounts and ends. Nothing is on a real disk.
"""

import ctypes
import errno
import os
import random
import select
import signal
import stat
import struct
import sys
from typing import Any

from tests.crash.disk import Disk
from tests.crash.effects import ROOT, Names, Resize, Sync, SyncNames, Tree, Write
from tests.crash.points import crash

LIBC = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
_MAX_WRITE = 1 << 17
_HEADER = struct.Struct("=IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_ANSWER = struct.Struct("=IiQ")
_ATTR = struct.Struct("=QQQQQQIIIIIIIIII")
_TIMES = struct.Struct("=QQQQII")  # node, generation, validity of entry and attributes
_KEPT_CHANGES = 256  # of a file; of more, the kernel has written the older ones back
_RENAME_FLAGS_UNKNOWN = errno.EINVAL
_FALLOC_ZERO = 0x10
_FATTR_MODE, _FATTR_SIZE = 1, 8
_BIG_WRITES = 1 << 5


class Refused(Exception):
    """A request is answered by this error number."""


class Content:
    """The files as running processes see them; each change is handed to `disk`."""

    def __init__(self, tree: Tree) -> None:
        self.disk = Disk(tree)
        self.data = {number: bytearray(data) for number, data in tree.files.items()}
        self.names: dict[int, dict[str, int]] = {number: {} for number in tree.directories}
        for (directory, name), number in tree.names.items():
            self.names[directory][name] = number
            if number not in self.names:
                self.data.setdefault(number, bytearray())
        self.modes: dict[int, int] = {}
        self._last = max([ROOT, *self.names, *self.data])

    def find(self, directory: int, name: str) -> int:
        try:
            return self.names[directory][name]
        except KeyError:
            raise Refused(errno.ENOENT) from None

    def make(self, directory: int, name: str, mode: int, *, folder: bool) -> int:
        if name in self.names[directory]:
            raise Refused(errno.EEXIST)
        self._last += 1
        number = self._last
        self.modes[number] = stat.S_IMODE(mode)
        if folder:
            self.names[number] = {}
        else:
            self.data[number] = bytearray()
        self.names[directory][name] = number
        change = (((directory, name), number),)
        made = number if folder else None
        self.disk.follow(Names(change, "mkdir" if folder else "create", made=made))
        return number

    def remove(self, directory: int, name: str, *, folder: bool) -> None:
        number = self.find(directory, name)
        if folder and self.names.get(number):
            raise Refused(errno.ENOTEMPTY)
        del self.names[directory][name]
        change = (((directory, name), None),)
        removed = number if folder else None
        self.disk.follow(Names(change, "rmdir" if folder else "remove", removed=removed))

    def rename(self, directory: int, name: str, target: int, new: str) -> None:
        number = self.find(directory, name)
        if (directory, name) != (target, new):
            del self.names[directory][name]
            self.names[target][new] = number
            changes = (((target, new), number), ((directory, name), None))
            self.disk.follow(Names(changes, "rename"))

    def write(self, number: int, at: int, data: bytes) -> None:
        found = self.data[number]
        if at > len(found):
            found.extend(bytes(at - len(found)))
        found[at : at + len(data)] = data
        self.disk.follow(Write(number, at, data))
        self.disk.write_back(number, _KEPT_CHANGES)

    def resize(self, number: int, size: int, kind: str) -> None:
        found = self.data[number]
        if size != len(found):
            del found[size:]
            found.extend(bytes(size - len(found)))
            self.disk.follow(Resize(number, size, kind))

    def attributes(self, number: int) -> bytes:
        is_folder = number in self.names
        size = 4096 if is_folder else len(self.data[number])
        kind = stat.S_IFDIR if is_folder else stat.S_IFREG
        mode = kind | self.modes.get(number, 0o700 if is_folder else 0o600)
        return _ATTR.pack(
            number + 1, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1 + is_folder, 0, 0, 0,
            4096, 0,
        )  # fmt: skip


class Server:
    """Answers the kernel's requests for one mount after the other."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.content = Content(Tree({}, frozenset({ROOT}), {}))
        self.device = -1

    def mount(self) -> None:
        """Mount; the kernel's first request follows. Raises OSError."""
        self.device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,allow_other"
        if LIBC.mount(b"crash", self.folder.encode(), b"fuse.crash", 0, options.encode()):
            code = ctypes.get_errno()
            os.close(self.device)
            raise OSError(code, os.strerror(code), self.folder)

    def unmount(self) -> None:
        """Unmount, whoever still has files open."""
        LIBC.umount2(self.folder.encode(), _MNT_DETACH)
        os.close(self.device)

    def cut(self, seed: int) -> str:
        """Lose what was not synced; return how much was in doubt."""
        disk = self.content.disk
        doubtful = sum(len(disk.files[one].changes) for one in disk.dirty), len(disk.waiting)
        self.unmount()
        self.content = Content(crash(disk, random.Random(seed)))
        self.mount()
        return f"{doubtful[0]} {doubtful[1]}"

    def serve(self) -> None:
        """Answer requests and commands until stdin ends."""
        while True:
            ready, _, _ = select.select([self.device, sys.stdin], [], [])
            if sys.stdin in ready:
                words = sys.stdin.readline().split()
                if not words:
                    return
                print(self.cut(int(words[1])), flush=True)
            elif self.device in ready:
                self._answer_one()

    def _answer_one(self) -> None:
        try:
            request = os.read(self.device, _MAX_WRITE + 8192)
        except OSError as failure:
            if failure.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                return  # the request was interrupted
            raise
        _, opcode, unique, node, *_ = _HEADER.unpack_from(request)
        try:
            answer, code = self._carry_out(opcode, node - 1, request[_HEADER.size :]), 0
        except Refused as refused:
            answer, code = b"", -refused.args[0]
        if answer is not None:
            head = _ANSWER.pack(_ANSWER.size + len(answer), code, unique)
            try:
                os.write(self.device, head + answer)
            except OSError as failure:
                if failure.errno != errno.ENOENT:  # nobody waits for it any more
                    raise

    def _carry_out(self, opcode: int, node: int, body: bytes) -> bytes | None:
        handler = _HANDLERS.get(opcode)
        if handler is None:
            raise Refused(errno.ENOSYS)
        answer: bytes | None = handler(self.content, node, body)
        return answer


def _entry(content: Content, number: int) -> bytes:
    return _TIMES.pack(number + 1, 0, 3600, 3600, 0, 0) + content.attributes(number)


def _attr(content: Content, number: int) -> bytes:
    return struct.pack("=QII", 3600, 0, 0) + content.attributes(number)


def _text(raw: bytes) -> list[str]:
    return [one.decode() for one in raw.split(b"\0")]


def _init(content: Content, node: int, body: bytes) -> bytes:
    major, _, ahead, flags = struct.unpack_from("=IIII", body)
    return struct.pack(
        "=IIIIHHIIHHI7I", major, 31, ahead, flags & _BIG_WRITES, 16, 12, _MAX_WRITE, 1, 0, 0, 0,
        *[0] * 7,
    )  # fmt: skip


def _lookup(content: Content, node: int, body: bytes) -> bytes:
    return _entry(content, content.find(node, _text(body)[0]))


def _setattr(content: Content, node: int, body: bytes) -> bytes:
    valid, _, _, size = struct.unpack_from("=IIQQ", body)
    if valid & _FATTR_SIZE:
        content.resize(node, size, "truncate")
    if valid & _FATTR_MODE:
        content.modes[node] = stat.S_IMODE(struct.unpack_from("=I", body, 68)[0])
    return _attr(content, node)


def _make(content: Content, node: int, body: bytes, head: str, *, folder: bool) -> bytes:
    mode = struct.unpack_from(head, body)[0]
    name = _text(body[struct.calcsize(head) :])[0]
    return _entry(content, content.make(node, name, mode, folder=folder))


def _rename(content: Content, node: int, body: bytes, head: str) -> bytes:
    target, *flags = struct.unpack_from(head, body)
    if any(flags):
        raise Refused(_RENAME_FLAGS_UNKNOWN)
    old, new, *_ = _text(body[struct.calcsize(head) :])
    content.rename(node, old, target - 1, new)
    return b""


def _read(content: Content, node: int, body: bytes) -> bytes:
    _, at, size = struct.unpack_from("=QQI", body)
    return bytes(content.data[node][at : at + size])


def _write(content: Content, node: int, body: bytes) -> bytes:
    _, at, size = struct.unpack_from("=QQI", body)
    content.write(node, at, body[40 : 40 + size])
    return struct.pack("=II", size, 0)


def _allocate(content: Content, node: int, body: bytes) -> bytes:
    _, at, size, mode = struct.unpack_from("=QQQI", body)
    if mode not in (0, _FALLOC_ZERO):
        raise Refused(errno.EOPNOTSUPP)
    if mode == _FALLOC_ZERO:
        content.write(node, at, bytes(size))
    content.resize(node, max(len(content.data[node]), at + size), "allocate")
    return b""


def _sync(content: Content, node: int, body: bytes) -> bytes:
    content.disk.follow(Sync(node))
    return b""


def _sync_names(content: Content, node: int, body: bytes) -> bytes:
    content.disk.follow(SyncNames(node))
    return b""


def _list(content: Content, node: int, body: bytes) -> bytes:
    _, at, size = struct.unpack_from("=QQI", body)
    found = b""
    for place, (name, number) in enumerate(sorted(content.names[node].items()), 1):
        raw = name.encode()
        kind = stat.S_IFDIR if number in content.names else stat.S_IFREG
        one = struct.pack("=QQII", number + 1, place, len(raw), kind >> 12) + raw
        one += bytes(-len(one) % 8)
        if place > at and len(found) + len(one) <= size:
            found += one
        elif place > at:
            break
    return found


def _statfs(content: Content, node: int, body: bytes) -> bytes:
    free = 1 << 24
    return struct.pack("=QQQQQIIIIIIIIII", free, free, free, free, free, 4096, 255, 4096, *[0] * 7)


# By the kernel's number of the request (linux/fuse.h). Without 35, which makes and opens a file in
# one, the kernel sends a mknod and an open.
_HANDLERS: dict[int, Any] = {
    1: _lookup,
    2: lambda content, node, body: None,  # forget
    3: lambda content, node, body: _attr(content, node),
    4: _setattr,
    8: lambda content, node, body: _make(content, node, body, "=IIII", folder=False),  # mknod
    9: lambda content, node, body: _make(content, node, body, "=II", folder=True),
    10: lambda content, node, body: content.remove(node, _text(body)[0], folder=False) or b"",
    11: lambda content, node, body: content.remove(node, _text(body)[0], folder=True) or b"",
    12: lambda content, node, body: _rename(content, node, body, "=Q"),
    14: lambda content, node, body: struct.pack("=QII", node, 2, 0),  # open; pages stay cached
    15: _read,
    16: _write,
    17: _statfs,
    18: lambda content, node, body: b"",  # release
    20: _sync,
    25: lambda content, node, body: b"",  # flush: at each close
    26: _init,
    27: lambda content, node, body: struct.pack("=QII", node, 0, 0),  # opendir
    28: _list,
    29: lambda content, node, body: b"",  # releasedir
    30: _sync_names,
    36: lambda content, node, body: None,  # interrupt
    42: lambda content, node, body: None,  # several forgets
    43: _allocate,
    45: lambda content, node, body: _rename(content, node, body, "=QII"),
}


def main(folder: str) -> None:
    """Mount, say so, and serve; only the end of stdin ends it, so that it always unmounts."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    server = Server(folder)
    try:
        server.mount()
    except OSError as failure:
        print(f"cannot mount: {failure}", flush=True)
        return
    print("mounted", flush=True)
    try:
        server.serve()
    finally:
        server.unmount()


if __name__ == "__main__":
    main(sys.argv[1])
