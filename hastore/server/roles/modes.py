"""The modes of a node, and what a master learns from a survey."""

from enum import Enum

from hastore.ha.hello.survey import SurveyReply
from hastore.ha.rules.epochs import epoch_node, last_epoch


class Mode(Enum):
    """What the node is busy with."""

    FOLLOWING = "following"
    RESUMING = "resuming"
    PROMOTING = "promoting"
    MASTER = "master"


def greatest_epoch(replies: list[SurveyReply]) -> int:
    """Return the greatest epoch that anybody has promised, opened or in its history."""
    seen = 0
    for reply in replies:
        if reply.hello is not None:
            seen = max(
                seen,
                reply.hello.promised_epoch,
                reply.hello.open_epoch,
                last_epoch(reply.hello.history),
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
