"""The manifest of a backup: what it holds, and of which node.

    TARGET/manifests/00000007.json   one for each backup, written last and at once
    TARGET/log/START-END.RUN         bytes [START, END) of the log: whole records of one log file
    TARGET/state/NAME.RUN            a small file of the store
    TARGET/partial.json              what a run has copied that has not ended, in the same form

No name is used twice, so nothing that an earlier backup needs is ever written again; later backups
name the same pieces. A manifest is JSON:

    {"manifest": {...}, "xxh3_128": "<of the bytes of the object, as they stand there>"}

One that is torn is no backup. It is the newest one all the same: the one before it is restored only
if its number is given.
"""

from collections.abc import Mapping

import msgspec
import xxhash

from hastore.errors import UNREADABLE, CorruptRecordError
from hastore.ha.node.node_state import Durable
from hastore.ha.rules.epochs import epoch_node

FORMAT = 1
MANIFESTS = "manifests"
LOG = "log"
STATE = "state"
PARTIAL = "partial.json"
MANIFEST_BYTES_MAX = 1 << 28
LAST_BYTES = 4096  # of a piece, whose digest shows whether a log has the same bytes there


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes [start, end) of the log, in an object of the target."""

    start: int
    end: int
    name: str
    xxh3_128: str
    last_xxh3_128: str  # of its last LAST_BYTES bytes
    last_store_ms: int  # of the last record in it; 0: none


class StateFile(msgspec.Struct, frozen=True, kw_only=True):
    """A small file of the store, in an object of the target."""

    path: str  # in the store
    name: str
    size: int
    xxh3_128: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What one backup holds."""

    format: int = FORMAT
    number: int
    version: str  # of hastore
    made_ms: int  # wall clock, when the log's end was chosen
    mode: str
    file_size: int  # store.commitlog_file_size
    addresses: dict[int, str]  # `nodes` of the node's file: number -> api address
    confirmed_offset: int  # as the node knew it; beyond it only this node may have had the log
    node: Durable  # its node.json: who it was, its epochs
    log: tuple[Piece, ...]  # in order, without gaps
    files: tuple[StateFile, ...]

    @property
    def start_offset(self) -> int:
        """Return where the log begins."""
        return self.log[0].start if self.log else 0

    @property
    def end_offset(self) -> int:
        """Return where the log ends: after a whole record."""
        return self.log[-1].end if self.log else 0

    @property
    def last_store_ms(self) -> int:
        """Return when the last record was stored, by its master's clock; 0 without any."""
        return next((one.last_store_ms for one in reversed(self.log) if one.last_store_ms), 0)

    @property
    def objects(self) -> Mapping[str, int]:
        """Return the objects of the target that this backup needs, with their sizes."""
        pieces = {one.name: one.end - one.start for one in self.log}
        return pieces | {one.name: one.size for one in self.files}

    @property
    def used_numbers(self) -> frozenset[int]:
        """Return the node numbers that the group had, as far as this backup knows."""
        data = self.node
        numbers = {data.node, *self.addresses, *data.known_stores, *data.replaced_stores}
        for entry in data.history:
            numbers.update(entry.nodes, (epoch_node(entry.epoch),))
        for members in data.node_lists:
            numbers.update(members)
        return frozenset(numbers - {0})

    @property
    def stores(self) -> frozenset[str]:
        """Return the ids of all stores of the group that the node knew, its own included."""
        return frozenset({self.node.store_id, *self.node.known_stores.values()})


class _File(msgspec.Struct, frozen=True):
    manifest: msgspec.Raw
    xxh3_128: str


def manifest_name(number: int) -> str:
    """Return the name of a backup's manifest."""
    return f"{MANIFESTS}/{number:08d}.json"


def number_of(name: str) -> int | None:
    """Return the number of the backup whose manifest has this name; None for another name."""
    folder, _, file = name.partition("/")
    number, _, kind = file.partition(".")
    good = folder == MANIFESTS and kind == "json" and len(number) == 8
    return int(number) if good and number.isascii() and number.isdigit() else None


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3 digest of 128 bits, in hex."""
    return xxhash.xxh3_128(data).hexdigest()


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest's object."""
    raw = msgspec.json.encode(manifest)
    return msgspec.json.encode(_File(msgspec.Raw(raw), digest(raw))) + b"\n"


def decode_manifest(raw: bytes) -> Manifest:
    """Return the manifest in an object. Raises CorruptRecordError for one that is not whole."""
    try:
        file = msgspec.json.decode(raw, type=_File)
        if digest(bytes(file.manifest)) != file.xxh3_128:
            raise CorruptRecordError("its digest is wrong: it is torn or damaged")
        found = msgspec.json.decode(file.manifest, type=_Format)
        if found.format != FORMAT:
            raise CorruptRecordError(f"format {found.format}: a later version of hastore wrote it")
        manifest = msgspec.json.decode(file.manifest, type=Manifest)
        for name in manifest.objects:
            folder, _, file_name = name.partition("/")
            if folder not in (LOG, STATE) or "/" in file_name or file_name in ("", ".", ".."):
                raise CorruptRecordError(f"it names {name!r}, which no backup has")
        return manifest
    except UNREADABLE as failure:
        raise CorruptRecordError(f"it is no manifest of hastore: {failure}") from failure


def is_torn(raw: bytes) -> bool:
    """Whether a manifest is not as it was written: no version of hastore can read it any more."""
    try:
        file = msgspec.json.decode(raw, type=_File)
    except UNREADABLE:
        return True
    return digest(bytes(file.manifest)) != file.xxh3_128


class _Format(msgspec.Struct, frozen=True):
    format: int
