"""How the parts of a node share the descriptors that its process may have.

Each part may use up its share for good, so together they must leave some: for the `ha` and the
`http` port, the reader of a new slave, and each file that is opened for a moment. With n
descriptors:

    connections of the API    n / 2 - 64, from n = 256 on; else n / 4
    files of queues           n / 2 - 512, from n = 2,048 on; else n / 4; at most 16,384
    log files                 n / 16, at most 64; each has a descriptor, and its map a second one
"""

import resource
from typing import NamedTuple

_QUEUE_FILES_MAX = 16_384
_LOG_FILES_MAX = 64
BESIDE_CONNECTIONS, _BESIDE_QUEUE_FILES = 64, 512


class DescriptorShares(NamedTuple):
    """What may be open at a time."""

    connections: int | None  # of the API's clients; None: any number
    queue_files: int
    log_files: int


def descriptor_shares() -> DescriptorShares:
    """Return the shares under the limit that this process has now."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return DescriptorShares(None, _QUEUE_FILES_MAX, _LOG_FILES_MAX)
    half, quarter = limit // 2, limit // 4
    return DescriptorShares(
        max(half - BESIDE_CONNECTIONS, quarter, 1),
        max(1, min(max(half - _BESIDE_QUEUE_FILES, quarter), _QUEUE_FILES_MAX)),
        max(1, min(limit // 16, _LOG_FILES_MAX)),
    )
