"""The modes of a node, and what a master learns from a survey."""

from enum import Enum

from hastore.ha.hello.survey import Heard
from hastore.ha.rules.epochs import epoch_node, last_epoch


class Mode(Enum):
    """What the node is busy with."""

    FOLLOWING = "following"
    RESUMING = "resuming"
    PROMOTING = "promoting"
    MASTER = "master"


def greatest_epoch(heard: list[Heard]) -> int:
    """Return the greatest epoch that anybody has promised, opened or in its history."""
    seen = 0
    for h in heard:
        if h.hello is not None:
            seen = max(
                seen, h.hello.promised_epoch, h.hello.open_epoch, last_epoch(h.hello.history)
            )
    return seen


def superseded_text(epoch: int) -> str:
    """Say who superseded a master, and the ways on."""
    return (
        f"superseded by node {epoch_node(epoch)} (epoch {epoch}); this node follows. To "
        "make it master "
        "again run `hastore promote`, to settle it as a slave `hastore demote`"
    )


# ---- promotion
# --------------------------------------------------------------------------------------------
