"""Edit `nodes` in the text of a configuration file: one node more or less, all else as it is. Pure.

The text is a valid configuration file. The result is read as one, and must say what is wanted and
nothing else: an edit of a file that is written in an unusual way may fail.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import yaml

from hastore.config.model import Config, NodeAddress
from hastore.errors import ConfigError, UsageError

_UNUSUAL = (KeyError, ValueError, IndexError, AttributeError, AssertionError, StopIteration)
_BY_HAND = (
    "`nodes` is written in a way that cannot be edited safely; nothing was changed: edit it by hand"
)


@dataclass(frozen=True, slots=True)
class ListChange:
    """A change of a group's list: a node goes, one comes, or both."""

    gone: int | None = None
    new: int | None = None
    address: NodeAddress | None = None  # of the new node

    def refusal(self, config: Config) -> str | None:
        """Return why the file with this configuration cannot be changed so; None if it can."""
        listed = None if self.new is None else config.nodes.get(self.new)
        if listed is None or listed == self.address:
            return None
        return (
            f"has a node {self.new} with other addresses; nothing was changed: a new node needs a "
            "number that the group never had"
        )

    def wanted(self, config: Config) -> Config:
        """Return the configuration after the change; itself if there is nothing to change."""
        nodes = dict(config.nodes)
        if config.node == self.gone:
            return config  # its node leaves the group, and needs no list any more
        if self.new is not None and self.address is not None:
            nodes.setdefault(self.new, self.address)
        if self.gone is not None:
            nodes.pop(self.gone, None)
        return config if nodes == config.nodes else msgspec.structs.replace(config, nodes=nodes)

    def edited(
        self, text: str, path: str, config: Config, parse: Callable[[str, str], Config]
    ) -> str:
        """Return the text of the file at `path` after the change; itself if nothing is to change.

        `parse(text, path)` reads it, and raises ConfigError. Raises UsageError if the text would
        not be valid, or say anything else than is wanted.
        """
        try:
            changed = self._edited(text, config)
            after = parse(changed, path)
        except ConfigError as wrong:
            raise UsageError(f"the changed file would not be valid: {wrong}") from wrong
        except (*_UNUSUAL, yaml.YAMLError) as failure:
            raise UsageError(f"{path}: {_BY_HAND}") from failure
        if after != self.wanted(config):
            raise UsageError(f"{path}: {_BY_HAND}")
        return changed

    def _edited(self, text: str, config: Config) -> str:
        after = self.wanted(config).nodes
        if self.new is not None and self.new in after and self.new not in config.nodes:
            text = with_node(text, self.new, after[self.new])
        if self.gone is not None and self.gone in config.nodes and self.gone not in after:
            text = without_node(text, self.gone)
        return text

    @property
    def by_hand(self) -> str:
        """Return what to do in `nodes` of a file that is not here."""
        found = []
        if self.new is not None and self.address is not None:
            found.append(f"add the line {node_line(self.new, self.address)}")
        if self.gone is not None:
            found.append(f"remove node {self.gone}")
        return ", and ".join(found)


def with_node(text: str, number: int, address: NodeAddress) -> str:
    """Return the text with one more node at the end of `nodes`."""
    section = _section(text)
    line = node_line(number, address)
    last_key, last = section.value[-1]
    at = _end(last)
    if section.flow_style:
        return f"{text[:at]}, {line}{text[at:]}"
    at = _line_end(text, at)
    begin = "" if text[:at].endswith("\n") else "\n"
    return f"{text[:at]}{begin}{' ' * last_key.start_mark.column}{line}\n{text[at:]}"


def without_node(text: str, number: int) -> str:
    """Return the text without a node of `nodes`; raises KeyError if it is not there."""
    pairs = _section(text).value
    places = [place for place, (key, _) in enumerate(pairs) if _is_number(key, number)]
    if not places:
        raise KeyError(number)
    place = places[0]
    key, below = pairs[place]
    start, end = key.start_mark.index, _end(below)
    if not _section(text).flow_style:
        start = text.rfind("\n", 0, start) + 1
        end = _line_end(text, end)
    elif place + 1 < len(pairs):
        end = pairs[place + 1][0].start_mark.index
    elif place:
        start = _end(pairs[place - 1][1])
    return text[:start] + text[end:]


def node_line(number: int, address: NodeAddress) -> str:
    """Return a node as a line of `nodes`."""
    return f'{number}: {{api: "{address.api}", ha: "{address.ha}", http: "{address.http}"}}'


def _section(text: str) -> yaml.MappingNode:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    found = next(below for key, below in root.value if key.value == "nodes")
    assert isinstance(found, yaml.MappingNode)
    return found


def _is_number(key: yaml.Node, number: int) -> bool:
    return str(key.value).isdigit() and int(key.value) == number


def _end(node: yaml.Node) -> int:
    """Return where a value ends; that of a block is said to end at the next token."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end(node.value[-1][1])
    return int(node.end_mark.index)


def _line_end(text: str, at: int) -> int:
    newline = text.find("\n", at)
    return len(text) if newline < 0 else newline + 1
