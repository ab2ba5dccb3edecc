"""The name of a node in its certificate: the URI `hastore:node/CLUSTER/GROUP/NUMBER`. Pure."""

import re
from dataclasses import dataclass

NODE_URI = "hastore:node/"
_PART = "[A-Za-z0-9][A-Za-z0-9_.-]{0,126}"
_URI = re.compile(rf"{NODE_URI}({_PART})/({_PART})/([1-9][0-9]{{0,4}})", re.ASCII)


@dataclass(frozen=True, slots=True)
class NodeName:
    """Which node of which group."""

    cluster: str
    group: str
    node: int

    @property
    def uri(self) -> str:
        """The URI that the node's certificate must have as an alternative name."""
        return f"{NODE_URI}{self.cluster}/{self.group}/{self.node}"

    def __str__(self) -> str:
        """Return the name for messages: `demo/g0 node 1`."""
        return f"{self.cluster}/{self.group} node {self.node}"


def parse_node_uri(uri: str) -> NodeName | None:
    """Return the node that the URI names; None for another URI."""
    found = _URI.fullmatch(uri)
    if found is None or int(found[3]) > 65_535:
        return None
    return NodeName(found[1], found[2], int(found[3]))
