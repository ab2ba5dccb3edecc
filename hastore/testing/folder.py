"""The folder of a group: who uses it, and the files that an earlier group has left there.

A node's role is in its file, and commands change it. So files that are there are gone on with:
whoever wrote the first roles again would make an old master the master of newer messages.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import yaml

from hastore.config.file import load_config, parse_config, text_with_addresses
from hastore.config.model import Mode
from hastore.errors import UsageError
from hastore.fs.private_files import replace_file

_LOCK = "group.lock"
_FILE_MODE = 0o644


class Folder:
    """A folder that one group uses at a time, from `Folder(...)` to `close`."""

    def __init__(self, path: pathlib.Path) -> None:
        """Take the folder; raises UsageError if another group runs on it."""
        self.path = path
        try:
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
        except OSError as failure:
            raise UsageError(
                f"{path} cannot be used: {failure.strerror}; give another folder"
            ) from failure
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as held:
            os.close(self._lock)
            raise UsageError(
                f"{path}: another group runs on it; end it, or give another folder"
            ) from held

    def close(self) -> None:
        """Let others use it; its files stay."""
        if self._lock >= 0:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a forked child may have the descriptor too
            os.close(self._lock)
            self._lock = -1

    def file(self, number: int) -> pathlib.Path:
        """Return the configuration file of a node."""
        return self.path / f"node{number}.yaml"

    def store(self, number: int) -> pathlib.Path:
        """Return the store of a node."""
        return self.path / f"store{number}"

    def nodes_there(self, mode: Mode, nodes: int | None) -> int:
        """Return how many nodes the group has whose files are there; 0: there are none.

        Raises UsageError for files of others, and for a group of another mode or number of nodes;
        ConfigError for a file that is not valid.
        """
        found = {}
        for number in range(1, 10):
            if self.file(number).exists():
                found[number] = load_config(str(self.file(number)))
        for number, config in found.items():
            if pathlib.Path(config.store.root) != self.store(number):
                raise UsageError(
                    f"{self.file(number)} is of another group: its store is not "
                    f"{self.store(number)}; give another folder, or, if this one was moved, edit "
                    "store.root"
                )
            if config.mode is not mode:
                raise UsageError(
                    f"{self.path} has a group of mode {config.mode.value}, not {mode.value}; "
                    "give that mode, or another folder"
                )
            count = len(config.nodes)
            if nodes not in (None, count):
                raise UsageError(
                    f"{self.path} has a group of {count} nodes, not {nodes}; give that number, "
                    "or another folder"
                )
            if sorted(found) != list(range(1, count + 1)):
                raise UsageError(
                    f"{self.path} has not one file for each of its {count} nodes, node1.yaml to "
                    f"node{count}.yaml; put the missing one back, or give another folder"
                )
        return len(found)

    def write(self, texts: Mapping[int, str]) -> None:
        """Write the files, by node; none, with ConfigError, if one of them is not valid."""
        for number, text in texts.items():
            parse_config(text, str(self.file(number)))
        for number, text in texts.items():
            path = self.file(number)
            if not path.exists():
                path.write_text(text)
            elif path.read_text() != text:
                replace_file(str(path), text.encode(), path.stat().st_mode & 0o777)

    def adapted(
        self,
        number: int,
        addresses: Mapping[int, Mapping[str, str]],
        more: Mapping[str, Any] | None,
    ) -> str:
        """Return the file of a node that is there, with the addresses of now.

        All else stays as it is, but for what `more` replaces.
        """
        path = str(self.file(number))
        text = text_with_addresses(self.file(number).read_text(), path, addresses)
        return text_of(yaml.safe_load(text), more) if more else text


def text_of(settings: Mapping[str, Any], more: Mapping[str, Any]) -> str:
    """Return the content of a file; `more` replaces some of its settings, and merges sections."""
    found = dict(settings)
    for key, value in more.items():
        mine = found.get(key)
        found[key] = {**mine, **value} if isinstance(mine, dict) else value
    return yaml.safe_dump(found, sort_keys=False)
