"""Term and vote on the disk: DLedger's file `currterm`, and what it cannot say.

    <root>/dledger-n<node>/currterm    voteLeader=n<node> and currTerm=<term>, in any order
    <root>/dledger-n<node>/checkpoint  committedIndex=<index> and endIndex=<index>
    <root>/hastore/votes.json          whether this node knows all votes that it has given

Each is replaced atomically; `currterm` and `votes.json` are on the disk when a save returns. A node
whose disk was wiped has no `votes.json`. It may have voted in its term, so it must not vote before
the group has told it that this term is over (docs/dledger.md).
"""

import logging

import msgspec

from hastore.dledger.core.events import HardState
from hastore.errors import UNREADABLE, StoreBrokenError
from hastore.fs.filesystem import FileSystem
from hastore.protocol.dledger import INDEX_MAX, NO_INDEX, NODE_MAX, TERM_MAX

log = logging.getLogger(__name__)

_VERSION = 1
_WITHOUT = {
    "currterm": "the node then neither votes nor counts before its leader has brought it in line",
    "checkpoint": "the node then learns from its leader what is committed",
}
_MAX_BYTES = 4096
_RANGES = {
    "currTerm": (0, TERM_MAX),
    "committedIndex": (NO_INDEX, INDEX_MAX),
    "endIndex": (NO_INDEX, INDEX_MAX),
}


class _Votes(msgspec.Struct, frozen=True):
    version: int = _VERSION
    remembers: bool = False


class HardStateFiles:
    """The files of one node; one thread at a time."""

    def __init__(self, fs: FileSystem, root: str, directory: str) -> None:
        self.state = HardState(0, None)
        self.remembers = False
        self.checkpoint: dict[str, int] = {}
        self.noted: bool | None = None  # what votes.json says; None without the file
        self._fs = fs
        self._directory = directory
        self._votes_path = f"{root}/hastore/votes.json"

    def load(self) -> None:
        """Read the files. Raises StoreBrokenError for a damaged one, OSError."""
        fs = self._fs
        found = self._read("currterm")
        if found is not None and not found.get("currTerm"):
            found = None  # a power cut emptied DLedger's file, or left zeros in it
        if found is not None:
            self.state = HardState(_number(found, "currTerm", 0), _voted(found))
        votes = _Votes(remembers=found is not None)  # a store of RocketMQ has no votes.json
        if fs.exists(self._votes_path):
            try:
                votes = msgspec.json.decode(
                    fs.read_bytes(self._votes_path, _MAX_BYTES), type=_Votes
                )
            except UNREADABLE as failure:
                raise StoreBrokenError(
                    f"{self._votes_path} is damaged ({failure}): write"
                    ' {"version": 1, "remembers": false} there; the node then neither votes nor'
                    " counts before its leader has brought it in line"
                ) from failure
            self.noted = votes.remembers
        self.remembers = votes.remembers and found is not None
        if votes.remembers and found is None:
            log.error("%s/currterm is missing: this node does not remember its votes",
                      self._directory)  # fmt: skip
        found = self._read("checkpoint") or {}
        self.checkpoint = {
            name: _number(found, name, -1) for name in ("committedIndex", "endIndex")
        }

    def save(self, state: HardState, remembers: bool) -> None:
        """Save term and vote durably. Raises OSError."""
        if not remembers and self.noted is not False:
            self._save_votes(False)  # first: `currterm` alone says that the votes are known
        state = HardState(state.term, state.voted_for)
        if state != self.state or not self._fs.exists(f"{self._directory}/currterm"):
            vote = "" if state.voted_for is None else f"n{state.voted_for}"
            text = f"voteLeader={vote}\ncurrTerm={state.term}\n"
            self._fs.make_dirs(self._directory)
            self._fs.replace_bytes(f"{self._directory}/currterm", text.encode())
            self.state = state
        if remembers and self.noted is not True:
            self._save_votes(True)
        self.remembers = remembers

    def forget(self) -> None:
        """Note, durably, that this node has forgotten votes or acknowledgements. Raises OSError."""
        if self.noted is not False:
            self._save_votes(False)
        self.remembers = False

    def save_checkpoint(self, committed_index: int, end_index: int) -> None:
        """Save both indexes. Raises OSError."""
        now = {"committedIndex": committed_index, "endIndex": end_index}
        if now != self.checkpoint:
            text = "".join(f"{name}={value}\n" for name, value in now.items())
            self._fs.replace_bytes(f"{self._directory}/checkpoint", text.encode())
            self.checkpoint = now

    def _save_votes(self, remembers: bool) -> None:
        self._fs.make_dirs(self._votes_path.rpartition("/")[0])
        self._fs.replace_bytes(
            self._votes_path, msgspec.json.encode(_Votes(remembers=remembers)) + b"\n"
        )
        self.noted = remembers

    def _read(self, name: str) -> dict[str, str] | None:
        """Return a file's `key=value` lines; None without a file."""
        path = f"{self._directory}/{name}"
        if not self._fs.exists(path):
            return None
        found: dict[str, str] = {}
        try:
            text = self._fs.read_bytes(path, _MAX_BYTES).strip(b"\0").decode("ascii")
            for line in text.splitlines():
                key, separator, value = line.partition("=")
                if line and not separator:
                    raise ValueError(f"no `=` in {line!r}")
                found[key] = value
            for key, (least, most) in _RANGES.items():
                number = _number(found, key, 0)
                if not least <= number <= most:
                    raise ValueError(f"{key} {number} is outside {least}..{most}")
            vote = _voted(found)
            if vote is not None and vote > NODE_MAX:
                raise ValueError(f"voteLeader n{vote} is no node's number")
        except ValueError as failure:
            raise StoreBrokenError(
                f"{path} is damaged ({failure}): remove it; {_WITHOUT[name]}"
            ) from failure
        return found


def _number(found: dict[str, str], key: str, otherwise: int) -> int:
    return int(found.get(key) or otherwise)


def _voted(found: dict[str, str]) -> int | None:
    """Return the node that has the vote: the number in DLedger's id `n<node>`."""
    vote = found.get("voteLeader", "")
    if not vote:
        return None
    if not vote.startswith("n") or not vote[1:].isdigit():
        raise ValueError(f"voteLeader {vote!r} is no n<number>")
    return int(vote[1:])
