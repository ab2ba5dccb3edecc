"""A transition of a group of mode dledger as one line of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hastore.protocol.dledger import MemberSet
from tests.explore.dledger_steps import View
from tests.explore.kit import with_changes
from tests.explore.search import Label, State

if TYPE_CHECKING:
    from tests.explore.dledger_model import Group

OWN = {
    "start": "starts",
    "beat": "sends heart beats, and what has no answer again",
    "late": "lets time pass until puts, reads and transfers are late",
    "cut off": "has heard no majority for an election timeout",
    "election timeout": "has heard no leader for an election timeout",
    "lease over": "has heard no leader for a while, and does not ask for votes yet",
    "synced": "has synced its log",
    "dies": "is killed",
    "disk lost": "loses its disk",
    "retained": "removes entries below",
    "checkpoint": "notes what is committed",
}


def tell(group: Group, state: State, label: Label, after: State | None) -> str:
    """Return what happened, and how the nodes have changed by it."""
    text = _what(group, label)
    if after is None:
        return text
    return with_changes(text, group.views(state), group.views(after), _change)


def _what(group: Group, label: Label) -> str:
    kind = label[0]
    if kind == "healed":
        return "all faults end"
    if not isinstance(label[2] if len(label) > 2 else None, tuple):
        parcel = group.steps.messages[label[1]]
        about = f"{parcel.message} of node {parcel.source} to node {parcel.target}"
        if kind == "lost":
            return f"lost is {about}"
        again = ", which stays on its way" if kind == "twice" else ""
        return f"node {parcel.target} receives {about}{again}"
    _, place, event, *more = label
    who = f"node {place + 1}"
    if kind == "dies within":
        return f"{who} dies before effect {event[1]} of {event[2:]}"
    if kind == "power lost":
        text = f"{who} loses power, and {event[1]} entries that were not synced"
    elif kind in OWN:
        text = f"{who} {OWN[kind]}" + (f" {event[1]}" if kind == "retained" else "")
    else:
        text = f"{who}: {' '.join(_plain(part) for part in event)}"
    if more in (["noticed"], ["unnoticed"]):
        return f"{text}, {more[0]}"
    if more and more[0]:
        reached = " and ".join(f"{n + 1}" for n in more[0])
        syncs = "syncs end at once" if more[1] else "no sync ends"
        text += f"; {more[2]} messages between it and node {reached} arrive, {syncs}"
    elif more:
        text += "; nothing that it sends arrives"
    return text


def _plain(part: object) -> str:
    if isinstance(part, MemberSet):
        return f"{tuple(map(int, part.members))} learners {tuple(map(int, part.learners))}"
    return str(part)


def _change(before: View, now: View) -> str:
    parts = []
    if (before.role, before.term) != (now.role, now.term) and now.role is not None:
        parts.append(f"{now.role.value.lower()} of {now.term}")
    if before.entries != now.entries or before.begin != now.begin:
        log = ", ".join(f"{value or 'begin'} of {term}" for term, value in now.entries)
        parts.append(f"log from {now.begin}: {log or 'empty'}")
    if before.durable != now.durable and now.up:
        parts.append(f"durable to {now.durable}")
    if before.committed != now.committed and now.up:
        parts.append(f"committed to {now.committed}")
    return f"node {now.node} {', '.join(parts)}" if parts else ""
