"""The small files of a node: what is damaged is named, or counts as if it were not there."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from hastore.backup.manifest import (
    Manifest,
    Piece,
    StateFile,
    decode_manifest,
    digest,
    encode_manifest,
)
from hastore.clock import SYSTEM_CLOCK
from hastore.dledger.core.events import HardState
from hastore.dledger.driver.requests import RequestFile, write_request
from hastore.dledger.store.hard_state import HardStateFiles
from hastore.errors import CorruptRecordError, StoreBrokenError, StoreError
from hastore.fs.memory import MemoryFileSystem
from hastore.ha.node.node_state import Durable, NodeState
from hastore.protocol.committed_positions import CommitBody, encode_commit
from hastore.protocol.dledger import INDEX_MAX, NODE_MAX, TERM_MAX
from hastore.registry.remembered import RegistryMemory
from hastore.server import kept_positions, position_file
from hastore.server.role_source import OneShotFlags
from hastore.server.scrub_service import ScrubService
from hastore.server.take_over import read_offsets
from hastore.store.append.dedup_window import DedupWindow
from hastore.store.append.stated_ends import StatedEnds, Statement
from hastore.store.cuts import Cut, CutList, Cuts, Dismissal
from hastore.store.derived import deliveries, transactions
from hastore.store.offline.log_files import committed_index
from hastore.store.state.entry_state import EntryState
from hastore.store.state.limits import Limits, LimitsPage, read_limits
from hastore.store.state.marker_files import Checkpoint, CheckpointFile
from hastore.store.state.replay_progress import ReplayState
from hastore.store.state.time_falls import Fall, Falls, read_falls, write_falls
from tests.fuzz import kit

REACHES = (
    read_limits,
    CheckpointFile.load,
    ReplayState.load,
    read_falls,
    EntryState.load,
    NodeState.load,
    RegistryMemory.load,
    HardStateFiles.load,
    DedupWindow._restore,
    StatedEnds.load,
    deliveries._unpack,
    transactions._unpack,
    kept_positions._parse,
    position_file.parse,
    Cuts.load,
    Cuts.take_dismissal,
    RequestFile.pop,
    OneShotFlags.take_flags,
    ScrubService._load,
    decode_manifest,
    read_offsets,
    committed_index,
)
LEAST = kit.Least(0.3, 8)
TOKENS = (
    *(
        b"voteLeader=n1\n",
        b"currTerm=",
        b"committedIndex=",
        b"endIndex=",
        b'"version":1',
        b"HSLM\0\0\0\1",
    ),
    *(
        b"HSRP\0\0\0\1",
        b"HSIW\0\0\0\1",
        b'"history":[[1,0,1,[1]]]',
        b'"remembers":true',
        b'"cuts":[]',
    ),
)
ROOT, NODE = "/s", "/s/dledger-n1"


def _fs(path: str = "", data: bytes = b"") -> MemoryFileSystem:
    fs = MemoryFileSystem()
    for folder in (f"{ROOT}/hastore", f"{ROOT}/config", NODE):
        fs.make_dirs(folder)
    if path:
        fs.replace_bytes(path, data)
    return fs


# -- readers: by the first byte of an input


def _limits(fs: MemoryFileSystem) -> bool:
    found = read_limits(fs, ROOT)
    if found is not None:
        page = LimitsPage(fs, ROOT)
        page.open(found._replace(sequence=min(found.sequence, 2**60)))
        page.close()
        assert read_limits(fs, ROOT) == page.now
    return found is not None


def _checkpoint(fs: MemoryFileSystem) -> bool:
    file = CheckpointFile(fs, ROOT)
    found = file.load()
    file.save(found, sync=False)
    assert file.load() == found
    file.close()
    return found != Checkpoint()


def _replay(fs: MemoryFileSystem) -> bool:
    path = f"{ROOT}/hastore/replay"
    state = ReplayState(fs, path, units=30, slots=10, entries=40, boot_id=b"b" * 16)
    found = state.load()
    assert found.trusted or (found.dispatched, found.synced) == (state.dispatched, state.synced)
    return found != (0, 0, False)


def _falls(fs: MemoryFileSystem) -> bool:
    found = read_falls(fs, ROOT)
    write_falls(fs, ROOT, found)
    assert read_falls(fs, ROOT) == found
    return bool(found.all)


def _entries(fs: MemoryFileSystem) -> bool:
    state = EntryState(fs, ROOT)
    found = state.load()
    state.save(archived=not found.archived)
    assert EntryState(fs, ROOT).load() == state.now
    return True


def _node(fs: MemoryFileSystem) -> bool:
    NodeState(fs, ROOT).load(1, "c", "g")
    return True


def _registry(fs: MemoryFileSystem) -> bool:
    RegistryMemory(fs, ROOT, 1).load()
    return True


def _hard(fs: MemoryFileSystem) -> bool:
    files = HardStateFiles(fs, ROOT, NODE)
    files.load()
    assert 0 <= files.state.term <= TERM_MAX
    assert files.state.voted_for is None or 0 <= files.state.voted_for <= NODE_MAX
    assert all(-1 <= index <= INDEX_MAX for index in files.checkpoint.values())
    files.save(HardState(files.state.term, files.state.voted_for), files.remembers)
    again = HardStateFiles(fs, ROOT, NODE)
    again.load()
    assert (again.state, again.remembers) == (files.state, files.remembers)
    committed_index(fs, NODE)
    return True


def _window(fs: MemoryFileSystem) -> bool:
    window = DedupWindow(fs, ROOT, lambda: 0)
    end = window.load(2**62, True)
    if end or len(window):
        window.save()
        again = DedupWindow(fs, ROOT, lambda: 0)
        assert again.load(2**62, True) == end and again._dump() == window._dump()
    return bool(end)


def _stated(fs: MemoryFileSystem) -> bool:
    stated = StatedEnds(fs, ROOT)
    stated.load(2**62, True)
    return stated.since(2**62) is not None


def _deliveries(fs: MemoryFileSystem) -> bool:
    states, delays_ms = deliveries._unpack(fs.read_bytes(f"{ROOT}/hastore/deliveries"))
    deliveries.read_delays(fs, ROOT)
    return bool(states) or delays_ms is not None


def _transactions(fs: MemoryFileSystem) -> bool:
    return bool(transactions._unpack(fs.read_bytes(f"{ROOT}/hastore/transactions")))


def _positions(fs: MemoryFileSystem) -> bool:
    with kit.documented(CorruptRecordError):
        kept_positions._parse(fs.read_bytes(f"{ROOT}/hastore/positions"))
    return True


def _positions_read(fs: MemoryFileSystem) -> bool:
    with kit.documented(CorruptRecordError):
        position_file.parse(fs.read_bytes(f"{ROOT}/hastore/positions-read"))
    return True


def _cuts(fs: MemoryFileSystem) -> bool:
    cuts = Cuts(fs, ROOT, SYSTEM_CLOCK, elects=False, on_change=lambda *_: None)
    cuts.load()
    return not fs.exists(f"{ROOT}/hastore/cuts.json.damaged")


def _dismissal(fs: MemoryFileSystem) -> bool:
    cuts = Cuts(fs, ROOT, SYSTEM_CLOCK, elects=False, on_change=lambda *_: None)
    cuts.take_dismissal()
    assert not fs.exists(f"{ROOT}/hastore/dismiss.json"), "a request is taken, or removed"
    return True


def _once(fs: MemoryFileSystem) -> bool:
    clock: Any = SimpleNamespace(wall_ms=lambda: 1_000_000)
    found = OneShotFlags(fs, ROOT, clock).take_flags("promote", 5)
    return found is not None


def _request(fs: MemoryFileSystem) -> bool:
    found = RequestFile(fs, ROOT, SYSTEM_CLOCK).pop()
    assert not fs.list_dir(f"{ROOT}/hastore"), "a request is taken, or removed"
    return found is not None


def _scrub(fs: MemoryFileSystem) -> bool:
    taken: list[object] = []
    service: Any = SimpleNamespace(
        _fs=fs, _path=f"{ROOT}/hastore/scrub.json", _now=None, _take=taken.append
    )
    ScrubService._load(service)
    return bool(taken)


def _manifest(fs: MemoryFileSystem) -> bool:
    with kit.documented(CorruptRecordError):
        found = decode_manifest(fs.read_bytes(f"{ROOT}/hastore/manifest"))
    assert decode_manifest(encode_manifest(found)) == found
    found.end_offset, found.used_numbers, found.stores, found.last_store_ms  # noqa: B018
    return True


def _delays(fs: MemoryFileSystem) -> bool:
    found = read_offsets(fs, ROOT)
    assert found is not None
    assert all(level >= 1 and offset >= 0 for level, offset in found.items())
    return bool(found)


Reader = Callable[[MemoryFileSystem], bool]
READERS: dict[bytes, tuple[str, Reader]] = {
    b"l": ("hastore/limits", _limits),
    b"c": ("checkpoint", _checkpoint),
    b"r": ("hastore/replay", _replay),
    b"f": ("hastore/times", _falls),
    b"e": ("hastore/entries.json", _entries),
    b"n": ("hastore/node.json", _node),
    b"g": ("hastore/registry.json", _registry),
    b"v": ("hastore/votes.json", _hard),
    b"t": ("dledger-n1/currterm", _hard),
    b"k": ("dledger-n1/checkpoint", _hard),
    b"i": ("hastore/idempotence", _window),
    b"q": ("hastore/queues", _stated),
    b"d": ("hastore/deliveries", _deliveries),
    b"x": ("hastore/transactions", _transactions),
    b"p": ("hastore/positions", _positions),
    b"z": ("hastore/positions-read", _positions_read),
    b"u": ("hastore/cuts.json", _cuts),
    b"s": ("hastore/dismiss.json", _dismissal),
    b"o": ("hastore/once.json", _once),
    b"a": ("hastore/dledger-request.json", _request),
    b"b": ("hastore/scrub.json", _scrub),
    b"m": ("hastore/manifest", _manifest),
    b"y": ("config/delayOffset.json", _delays),
}
FRAMED = {b"r", b"f", b"i", b"q", b"d", b"x"}  # by a CRC-32 at the end of the file or of its slot
STATE_BYTES = {b"r": 52}


def one(data: bytes) -> None:
    """Read one file. What it says is within bounds; what is damaged is named."""
    kind, raw = data[:1], data[1:]
    kit.refuse(kind in READERS, "no such file")
    name, reader = READERS[kind]
    with kit.documented(StoreBrokenError, StoreError):
        accepted = reader(_fs(f"{ROOT}/{name}", raw))
    kit.refuse(accepted, f"{name} counts as if it were not there")


def repaired(data: bytes) -> bytes:
    """Return the file with its checksum made right."""
    kind, raw = data[:1], data[1:]
    if kind in FRAMED and len(raw) > 4:
        size = STATE_BYTES.get(kind, len(raw) - 4)
        return kind + kit.with_crc(raw[:size]) + raw[size + 4 :]
    if kind == b"l" and len(raw) > 104:
        return kind + kit.with_crc(raw[:96]) + raw[100:]
    if kind in (b"p", b"z") and b"\n" in raw:
        head, _, body = raw.partition(b"\n")
        at = head.find(b'"crc32":') + 8
        stop = next((n for n in range(at, len(head)) if not 48 <= head[n] <= 57), len(head))
        return kind + head[:at] + str(zlib.crc32(body)).encode() + head[stop:] + b"\n" + body
    if kind == b"m" and raw.startswith(b'{"manifest":') and b',"xxh3' in raw:
        manifest = raw[len(b'{"manifest":') : raw.rindex(b',"xxh3')]
        return kind + b'{"manifest":%b,"xxh3_128":"%b"}\n' % (manifest, digest(manifest).encode())
    return data


# -- seeds


def seeds() -> list[bytes]:
    """Return each file as hastore, RocketMQ and DLedger write it, and damaged ones."""
    out = [*_binary(), *_texts()]
    for name in ("dledger-terms", "dledger-killed"):
        folder = f"{name}/store/dledger-n0"
        out += [b"t" + kit.golden(f"{folder}/currterm"), b"k" + kit.golden(f"{folder}/checkpoint")]
    out += [b"c" + kit.golden("three-files/checkpoint", 60)]
    return [
        *out,
        b"t",
        b"tcurrTerm=x",
        b"tvoteLeader=x\n",
        b"t\0\0",
        b"l" + bytes(4_096),
        b"l" + b"x" * 99,
    ]


def _binary() -> list[bytes]:
    fs = _fs()
    page = LimitsPage(fs, ROOT)
    page.open(Limits(5, bytes(16), 1 << 30, 0, 900, 1_000, 5, 500, 800, 700))
    page.close()
    state = ReplayState(
        fs, f"{ROOT}/hastore/replay", units=30, slots=10, entries=40, boot_id=b"b" * 16
    )
    state.save(900, 500)
    state.close()
    falls = (Fall(5, 7), Fall(90, 5))
    write_falls(fs, ROOT, Falls(falls, frozenset({90}), 4))
    small = b"f" + fs.read_bytes(f"{ROOT}/hastore/times", 256)
    write_falls(fs, ROOT, Falls(falls))
    window = DedupWindow(fs, ROOT, lambda: 0)
    for producer in (b"p", b"other"):
        window._window_of(producer).extend([1, 2, 5], [10, 20, 30])
    window.advance(900)
    window.save()
    stated = StatedEnds(fs, ROOT)
    stated._statements = (Statement(5, 7, 9), Statement(50, 70, 90))
    stated._save()
    names = {b"l": "limits", b"r": "replay", b"f": "times", b"i": "idempotence", b"q": "queues"}
    out = [kind + fs.read_bytes(f"{ROOT}/hastore/{name}", 256) for kind, name in names.items()]
    one_state = deliveries._HEAD.pack(900, 1) + deliveries._LEVEL.pack(3, 500)
    delays = deliveries._COUNT.pack(2) + deliveries._DELAY.pack(1_000) * 2
    out.append(small)
    out.append(b"d" + deliveries._FRAME.pack(deliveries._COUNT.pack(1), one_state, delays))
    half = transactions.Half(5, 0, 7, 1, None, b"u", ((3, 0),))
    ended = msgspec.msgpack.encode(transactions._State(900, [half], []))
    out.append(b"x" + transactions._FRAME.pack(msgspec.msgpack.encode([ended])))
    return out


def _texts() -> list[bytes]:
    durable = Durable(node=1, store_id="a" * 32, cluster="c", group="g", proved_only=True)
    node = msgspec.json.encode(durable)
    body = encode_commit(CommitBody("g", "T", {0: (5, 1, 7)}, {0: 3})) + b"\n"
    head = b'{"version":%d,"store_part":0,"lines":1,"crc32":%d}\n' % (
        kept_positions._VERSION,
        zlib.crc32(body),
    )
    cut = Cut(
        id=1, folder="1-5", messages=3, all_counted=True, start_offset=5, end_offset=9, wall_ms=7
    )
    cuts = msgspec.json.encode(CutList(next_id=2, cuts=(cut,)))
    fs = _fs()
    write_request(fs, ROOT, "add", 4, term=3, members=(1, 2), wall_ms=5, request_id="a")
    manifest = encode_manifest(_a_manifest(durable))
    return [
        b'n{"more":' + b"[" * 1_500,
        b'n{"cluster":"\xff"',
        b'e{"begin":[1e999',
        b'v{"x":' + b"[" * 1_500,
        b"n" + node,
        b"n" + node.replace(b'"c"', b'"d"'),
        b"n{}",
        b"n",
        b'e{"version":1,"synced_index":5,"begin":[5,900,2],"cut_at":null,"install":null}',
        b'e{"version":2}',
        b'g{"role":"SLAVE","changed":5,"made":4,"once":"a"}',
        b'g{"role":"KING"}',
        b'v{"version":1,"remembers":true}',
        b"v[]",
        b"tvoteLeader=n2\ncurrTerm=7\n",
        b"kcommittedIndex=5\nendIndex=7\n",
        b"p" + head + body,
        b"p" + head,
        b"p" + body,
        b"u" + cuts,
        b"u{",
        b"s" + msgspec.json.encode(Dismissal(ids=(1,), by="root")),
        b"s[]",
        b'o{"command":"promote","epoch":5,"wall_ms":1000000,"accept_loss":true}',
        b"o{",
        b"a" + fs.read_bytes(f"{ROOT}/hastore/dledger-request.json"),
        b"a{",
        b"m" + manifest,
        b"m" + manifest[:-9],
        b'b{"offset":5,"passes":1,"passed_wall_ms":7,"damages":[[5,9,"why"]]}',
        b"b[]",
        b'y{"offsetTable":{}}',
        b'y{"offsetTable":{1:5,3:9}}',
        b'y{"offsetTable":{0:5}}',
    ]


def _a_manifest(durable: Durable) -> Manifest:
    piece = Piece(start=0, end=900, name="log/0", xxh3_128="a", last_xxh3_128="b", last_store_ms=5)
    file = StateFile(path="hastore/node.json", name="state/b", size=9, xxh3_128="c")
    return Manifest(
        number=1, version="0.1.0", made_ms=5, mode="classic", file_size=1 << 30,
        addresses={1: "tcp://h:1"}, confirmed_offset=900, node=durable, log=(piece,), files=(file,),
    )  # fmt: skip
