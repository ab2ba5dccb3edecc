"""Check the records in bytes of a log that come in order, in parts of any size. Pure.

A backup is checked by the same rules as a start of the node (store/log/recovery.py): lengths,
offset and CRC of every record, the chain of entries in mode dledger, and blanks that end with their
file.
"""

from hastore.errors import CorruptRecordError
from hastore.record.codec import check_unreadable
from hastore.record.layout import header_struct, store_at
from hastore.record.log_format import Check, EntryChain, LogFormat
from hastore.store.state.limits import RECOVERY_STEP_BYTES

_SYS_FLAG = header_struct("sys_flag")
_HEAD_BYTES = 8  # of an item, with its size, and of a blank


class ItemWalk:
    """The items of a log from `offset` on; `offset` moves to the end of the last whole one."""

    def __init__(
        self, form: LogFormat, offset: int, file_size: int, check: Check | None = None
    ) -> None:
        """Begin at an item; `check` goes on with the chain of another walk."""
        self.offset = offset
        self.last_store_ms = 0
        self.records = 0
        self.recovery_start = self.next_recovery_start = offset
        self._form = form
        self._file_size = file_size
        self.check = check if check is not None else form.chain()
        self._rest = b""  # the beginning of an item or a blank that is not whole yet

    @property
    def chain(self) -> EntryChain | None:
        """The chain of a log of entries; None in a plain log."""
        return self.check if isinstance(self.check, EntryChain) else None

    def feed(self, data: bytes) -> memoryview:
        """Take the next bytes; return those that are whole items now.

        They follow what the last call returned. Raises CorruptRecordError if no valid record, and
        no beginning of one, is at `offset`.
        """
        whole = self._rest + data if self._rest else data
        view, at, end = memoryview(whole), 0, len(whole)
        while at < end:
            size = self._item(view, at, end)
            if not size:
                break
            at += size
        self._rest = whole[at:]
        return view[:at]

    def _item(self, view: memoryview, at: int, end: int) -> int:
        """Step over the item or blank at `at`; return its bytes in `view`, 0 if more must come."""
        form, offset = self._form, self.offset
        left = self._file_size - offset % self._file_size  # to the end of the log file
        stop = min(end, at + left)
        size = self.check(view, at, stop, offset)
        if not size and not form.lead:
            size = check_unreadable(view, at, stop, offset)
        if size:
            self._note(view, at, size)
            return size
        if end - at < _HEAD_BYTES and left >= _HEAD_BYTES:
            return 0
        if form.check_blank(view, at, at + left):
            if end - at < left:  # a log that ends inside a blank ends before it
                return 0
            self.offset += left
            return left
        announced = form.announced(view, at, end)
        if end - at < announced <= left and form.may_begin(view, at, end, offset):
            return 0
        raise CorruptRecordError(f"no valid record is at offset {offset}")

    def _note(self, view: memoryview, at: int, size: int) -> None:
        form = self._form
        if form.holds_record(view, at, size):
            record = at + form.lead
            stamp = record + store_at(_SYS_FLAG.unpack_from(view, record)[0])
            self.last_store_ms = int.from_bytes(view[stamp : stamp + 8], signed=True)
            self.records += 1
        self.offset += size
        if self.offset - self.next_recovery_start >= RECOVERY_STEP_BYTES:
            self.recovery_start, self.next_recovery_start = self.next_recovery_start, self.offset

    @property
    def is_whole(self) -> bool:
        """Whether all that was fed are whole items."""
        return not self._rest
