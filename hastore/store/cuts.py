"""Which messages were cut off this log, until an operator has looked at them and dismissed it.

A cut of the log's tail takes messages that only this node had, as far as it knows: those of puts
that wait for no slave, and those whose outcome nobody knows. The bytes are in `rescued/` (see
rescue.py). `Cuts` keeps what was cut in `<root>/hastore/cuts.json`: the status shows it, over
restarts, until it is dismissed:

    hastore rescued dismiss                        the node (housekeeping, each second)
      reads the numbers of the cuts
      writes hastore/dismiss.json ----------------> takes these cuts off its list, durably
      polls the status until they are gone           removes the file, tells the audit log

No client and no peer can do this: whoever may write into the store's folder may. The numbers are
never used again, so a request may be carried out twice, and never dismisses a cut that nobody saw.

A cut is noted before it is made, and told only once it was made: a crash in between may leave the
messages in the log, and this node may keep them.
"""

import logging
import threading
from collections.abc import Callable, Collection, Sequence

import msgspec

from hastore.clock import Clock
from hastore.errors import UNREADABLE
from hastore.fs.filesystem import FileSystem

log = logging.getLogger(__name__)

CUTS_MAX = 100  # kept one by one; older ones are added up
_A_LINE = 40  # are named in one line of the audit log
SHOWN_MAX = 5  # as problems, each by itself
ARCHIVED, DISMISSED = "archived", "dismissed"


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """One cut. The entry that adds up the oldest ones has no `folder`, and offsets of 0."""

    id: int
    folder: str  # its name in `rescued/`
    messages: int
    all_counted: bool  # False: there are more, beyond damage or the limit of the count
    start_offset: int
    end_offset: int
    wall_ms: int
    made: bool = True  # False: it was noted, and perhaps not made

    @property
    def count(self) -> str:
        """How many messages were cut, in words."""
        return messages_text(self.messages, all_counted=self.all_counted)


def messages_text(messages: int, *, all_counted: bool) -> str:
    """Return how many messages a cut has taken, in words."""
    if not messages and not all_counted:  # the first of them is damaged
        return "an unknown number of messages"
    name = "message" if messages == 1 else "messages"
    return f"{'' if all_counted else 'at least '}{messages:,} {name}"


class CutList(msgspec.Struct, frozen=True, kw_only=True):
    """The content of cuts.json."""

    next_id: int = 1
    cuts: tuple[Cut, ...] = ()


class Dismissal(msgspec.Struct, frozen=True, kw_only=True):
    """The content of dismiss.json: the numbers of the cuts, and who gave the command."""

    ids: tuple[int, ...]
    by: str


def cuts_path(root: str) -> str:
    """Return the path of the list in the store with this root."""
    return f"{root}/hastore/cuts.json"


def dismissal_path(root: str) -> str:
    """Return the path of the request in the store with this root."""
    return f"{root}/hastore/dismiss.json"


class Cuts:
    """The cuts of one store. `note` and `take_dismissal` may be called by different threads.

    `on_change(outcome, text)` is called for each cut, and for each that was dismissed, for the
    audit log; perhaps with the locks of the store. With `elects` the store is of mode dledger.
    """

    def __init__(
        self,
        fs: FileSystem,
        root: str,
        clock: Clock,
        *,
        elects: bool,
        on_change: Callable[[str, str], None],
    ) -> None:
        self._fs = fs
        self._root = root
        self._clock = clock
        self._elects = elects
        self._on_change = on_change
        self._lock = threading.Lock()
        self._list = CutList()
        self._unsaved = False
        self._failure: str | None = None  # why the list cannot be saved
        self._damaged: str | None = None  # where one is that could not be read
        self._refused: str | None = None  # why a request is not carried out

    @property
    def all(self) -> tuple[Cut, ...]:
        """The cuts that were made and nobody has dismissed, the oldest first."""
        return tuple(one for one in self._list.cuts if one.made)

    def holds(self, folder: str) -> bool:
        """Whether this archive in `rescued/` is one of a cut that nobody has dismissed, or may be.

        It may be if the list could not be read, or if older cuts were added up: they name none.
        """
        if self._damaged is not None:
            return True
        return any(one.folder in ("", folder) for one in self._list.cuts)

    def load(self) -> None:
        """Read the list. One that cannot be read is put aside, and said to be a problem.

        Nobody knows which numbers it had. Those that follow are seconds since 1970, so that a
        request to dismiss old ones means none of them.
        """
        path = cuts_path(self._root)
        if not self._fs.exists(path):
            return
        try:
            self._list = msgspec.json.decode(self._fs.read_bytes(path), type=CutList)
        except (OSError, *UNREADABLE) as error:
            aside = f"{path}.damaged"
            self._damaged = (
                f"{path} cannot be read: {error}; it is {aside} now: it says which messages were "
                f"cut and are in {self._root}/rescued; look there, then restart the node"
            )
            log.error("%s", self._damaged)
            self._fs.rename(path, aside)
            self._list = CutList(next_id=self._clock.wall_ms() // 1000)

    def note(self, folder: str, start: int, end: int, messages: int, *, all_counted: bool) -> None:
        """Note, durably, that messages in [start, end) are about to be cut, and are in `folder`.

        An earlier cut that was not made is forgotten: a crash has interrupted it, and this is the
        same one again, or the log has gone on. If the list cannot be saved now, `take_dismissal`
        tries again: the archive is there, and the cut must go on.
        """
        with self._lock:
            now = self._list
            cut = Cut(
                id=now.next_id, folder=folder, messages=messages, all_counted=all_counted,
                start_offset=start, end_offset=end, wall_ms=self._clock.wall_ms(), made=False,
            )  # fmt: skip
            cuts = _bounded((*self.all, cut))
            self._list = CutList(next_id=now.next_id + 1, cuts=cuts)
            self._save()

    def forget_noted(self) -> None:
        """Forget a cut that was noted and not made: another one is about to be made, of nothing."""
        with self._lock:
            if len(self.all) < len(self._list.cuts):
                self._list = msgspec.structs.replace(self._list, cuts=self.all)
                self._save()

    def note_made(self, end: int) -> None:
        """Tell the cut that was noted, because the log now ends at `end`, if that is before it."""
        with self._lock:
            noted = [one for one in self._list.cuts if not one.made and one.start_offset >= end]
            if not noted:
                return
            made = [msgspec.structs.replace(one, made=True) for one in noted]
            self._list = msgspec.structs.replace(self._list, cuts=(*self.all, *made))
            self._save()
        for cut in made:
            text = self._place(cut)
            log.warning("cut %d: %s cut from the log: %s", cut.id, cut.count, text)
            self._on_change(ARCHIVED, self._named([cut]))

    def save_again(self) -> None:
        """Save what could not be saved."""
        if self._unsaved:
            self._dismiss(())

    def take_dismissal(self) -> None:
        """Carry out the request in dismiss.json, if there is one, and save what is not saved yet.

        Housekeeping calls this. A request that cannot be read or removed is a problem.
        """
        path = dismissal_path(self._root)
        self.save_again()
        if self._unsaved or not self._fs.exists(path):
            self._refused = None
            return
        try:
            wanted = msgspec.json.decode(self._fs.read_bytes(path), type=Dismissal)
        except UNREADABLE as error:
            log.error("%s is removed: it is no request of hastore: %s", path, error)
            wanted = Dismissal(ids=(), by="")
        except OSError as failure:
            self._refuse(path, failure)
            return
        gone = self._dismiss(wanted.ids)
        if self._unsaved:
            return  # the request stays until it is durable that it was carried out
        for start in range(0, len(gone), _A_LINE):
            some = gone[start : start + _A_LINE]
            self._on_change(DISMISSED, f"{self._named(some)}, by {wanted.by}")
        try:
            self._fs.remove(path)
            self._fs.sync_dir(path.rpartition("/")[0])
        except OSError as failure:
            self._refuse(path, failure)

    def _refuse(self, path: str, failure: OSError) -> None:
        self._refused = (
            f"{path} cannot be read and removed: {failure}; it is what `hastore rescued dismiss` "
            "asks of this node: run that as the user who runs the node, or correct its rights"
        )

    def _dismiss(self, ids: Collection[int]) -> list[Cut]:
        with self._lock:
            gone = [one for one in self.all if one.id in ids]
            if gone:
                kept = tuple(one for one in self._list.cuts if one.id not in ids)
                self._list = msgspec.structs.replace(self._list, cuts=kept)
            if gone or self._unsaved:
                self._save()
            return gone

    def _save(self) -> None:
        """Write the list durably; a failure is a problem, and is tried again."""
        path, self._unsaved = cuts_path(self._root), True
        try:
            self._fs.make_dirs(path.rpartition("/")[0])
            self._fs.replace_bytes(path, msgspec.json.encode(self._list))
        except OSError as failure:
            if not self._failure:
                log.error("%s cannot be written: %s", path, failure)
            self._failure = (
                f"{path} cannot be written: {failure}; make room or correct its rights: until then "
                "a restart forgets which messages were cut"
            )
            return
        self._unsaved, self._failure = False, None

    def status(self) -> list[dict[str, object]]:
        """Return the cuts as the status shows them, each with the absolute path of its archive."""
        return [
            {
                "id": one.id,
                "folder": self._folder(one) if one.folder else None,
                "messages": one.messages,
                "all_counted": one.all_counted,
                "start_offset": one.start_offset,
                "end_offset": one.end_offset,
                "wall_ms": one.wall_ms,
            }
            for one in self.all
        ]

    @property
    def messages(self) -> int:
        """The messages of all cuts, as far as they were counted."""
        return sum(one.messages for one in self.all)

    def problems(self) -> list[str]:
        """Return what an operator must look at: with `elects`, only a list that is not in order."""
        wrong = (self._damaged, self._failure, self._refused)
        found = [one for one in wrong if one is not None]
        return found if self._elects else [*found, *self._texts()]

    def notes(self) -> list[str]:
        """Return what is worth knowing: with `elects`, the cuts, since nobody was promised them.

        There each leader that dies under load leaves some, and its producers know it.
        """
        return self._texts() if self._elects else []

    def _texts(self) -> list[str]:
        """Return a sentence for each of the newest cuts, and one for the others."""
        cuts, found = self.all, []
        older = cuts[:-SHOWN_MAX]
        if older:
            count = sum(one.messages for one in older)
            found.append(
                f"{len(older)} earlier cuts took {count:,} messages or more from this log: "
                "`hastore rescued list -c FILE` on this node shows them"
            )
        return found + [self._text(one) for one in cuts[-SHOWN_MAX:]]

    def _text(self, cut: Cut) -> str:
        outcome = "puts with acks=1 may have been acknowledged"
        if self._elects:
            outcome = "as far as this node knows no majority had them, so no put was acknowledged"
        verb = "was" if cut.messages == 1 and cut.all_counted else "were"
        look = f"look at them (`hastore log dump --store {self._folder(cut)} --body`)"
        send = f"`hastore rescued resend -c FILE --cut {cut.id}`"
        if not cut.folder:
            look = "look at them there"
            send = "`hastore rescued resend -c FILE --folder DIR`"
        elif not self._fs.exists(self._folder(cut)):
            look = "that folder is gone: find out from the senders what they were"
        return (
            f"{cut.count} {verb} cut from this log and may be nowhere else ({outcome}): "
            f"{self._place(cut)}; {look}, send again what is missing ({send}), then run "
            f"`hastore rescued dismiss -c FILE --cut {cut.id}` on this node"
        )

    def _named(self, cuts: Sequence[Cut]) -> str:
        """Name cuts for the audit log, which takes few lines of one kind in a minute."""
        if len(cuts) == 1:
            return f"cut {cuts[0].id}: {cuts[0].count}, {self._place(cuts[0])}"
        count = sum(one.messages for one in cuts)
        return f"cuts {', '.join(str(one.id) for one in cuts)}: {count:,} messages"

    def _place(self, cut: Cut) -> str:
        if not cut.folder:
            return f"in older archives of {self._root}/rescued"
        return f"bytes {cut.start_offset} to {cut.end_offset}, in {self._folder(cut)}"

    def _folder(self, cut: Cut) -> str:
        return f"{self._root}/rescued/{cut.folder}"


def _bounded(cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    """Return at most CUTS_MAX cuts; the oldest two become one until they fit."""
    while len(cuts) > CUTS_MAX:
        first, second = cuts[:2]
        both = Cut(
            id=second.id, folder="", messages=first.messages + second.messages,
            all_counted=first.all_counted and second.all_counted,
            start_offset=0, end_offset=0, wall_ms=second.wall_ms,
        )  # fmt: skip
        cuts = (both, *cuts[2:])
    return cuts
