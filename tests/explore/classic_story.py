"""A transition of a group of mode classic as one line of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.explore.classic_states import View
from tests.explore.kit import with_changes
from tests.explore.search import Label, State

if TYPE_CHECKING:
    from tests.explore.classic_model import Group

OWN = {
    "start": "starts",
    "disk lost": "comes with an empty disk",
    "killed": "is killed",
    "synced": "syncs its log",
    "follow": "looks for a master",
    "link ended": "notices that its link has ended",
    "resume": "would go on in its epoch",
    "demoted": "is made a slave",
    "promote": "is to be master",
    "promote by force": "is to be master, with --force-unclean",
    "receive": "receives a frame",
    "report": "takes a report",
    "no answer": "gets no answer",
}


def tell(group: Group, state: State, label: Label, after: State | None) -> str:
    """Return what happened, and how the nodes have changed by it."""
    text = _what(group, label)
    if after is None:
        return text
    return with_changes(text, group.views(state), group.views(after), _change)


def _what(group: Group, label: Label) -> str:
    if label[0] == "healed":
        return "all faults end"
    if label[0] == "begins":
        return "the group begins"
    kind, place, event, *more = label
    who = f"node {place + 1}"
    if kind == "dies within":
        return f"{who} dies at effect {more[0]} of {event[0]}"
    if kind in ("answer", "answer lost"):
        purpose = group.states.steps.requests[event[1]][1].purpose.value
        lost = ", and the answer is lost" if kind == "answer lost" else ""
        return f"node {more[0]} answers the {purpose} of {who}{lost}"
    if kind == "power lost":
        return f"{who} loses power; its log ends at {event[1]}"
    if kind in OWN:
        return f"{who} {OWN[kind]}"
    return f"{who}: {' '.join(str(part) for part in event)}"


def _change(before: View, now: View) -> str:
    parts = []
    if before.open_epoch != now.open_epoch:
        opened = _epoch(now.open_epoch)
        parts.append(f"master of epoch {opened}" if now.open_epoch else "no master any more")
    if before.promised < now.promised:
        parts.append(f"has promised {_epoch(now.promised)}")
    if before.disk.data != now.disk.data:
        parts.append(f"log {[value for _, value in now.records]} to {now.end}")
    if now.up and before.up and before.disk.confirmed != now.disk.confirmed:
        parts.append(f"confirmed to {now.disk.confirmed}")
    if before.stream != now.stream:
        parts.append("has no link" if now.stream is None else "follows")
    if now.unclean and not before.unclean:
        parts.append("unclean")
    return f"node {now.number} {', '.join(parts)}" if parts else ""


def _epoch(epoch: int) -> str:
    return f"{epoch >> 16} of node {epoch & 0xFFFF}"
