"""What the status page says of a group as one node sees it: who is master, who follows, what to do.

Pure: it turns a node's own status, the object of `hastore status --json`, into rows and sentences.
A node knows less than the group: of its fellows it shows what it sees itself, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from hastore.config.model import Mode, NodeAddress
from hastore.ha.rules.epochs import epoch_node

Status = Mapping[str, Any]

# How a thing is. The page has a sign and a word for each, so that no colour is needed.
GOOD, LOOK, BAD, UNKNOWN = "good", "look", "bad", "unknown"
EPOCHS_MAX = 10  # of the history that are shown
_OF_FILE = "-c FILE"  # in commands: a problem does not know the file
_SYNC_REFUSED = "synchronous puts are refused: "  # the headline says it


class Advice(NamedTuple):
    """What is wrong, and what to do now; an empty `do`: the text says it."""

    level: str
    what: str
    do: str = ""


def overview(
    status: Status, nodes: Mapping[int, NodeAddress], not_ready: str | None, *, https: bool
) -> dict[str, Any]:
    """Return what the page shows of this moment, ready for JSON.

    `nodes` are the addresses that the configuration has. `not_ready`: why the node does not serve
    its role, None if it does. `https`: what the HTTP ports of the group speak.
    """
    advice = [*_advice(status, not_ready)]
    level, text = _headline(status, not_ready)
    if level == GOOD and any(one.level in (LOOK, BAD) for one in advice):
        level = LOOK
    scheme = "https" if https else "http"
    return {
        **{key: status[key] for key in ("node", "cluster", "group", "mode", "role", "epoch")},
        "state": {"level": level, "text": text},
        "master": {"node": status["master"], "why": _why_master(status)},
        "members": [
            {**row, "page": f"{scheme}://{nodes[row['node']].http}/" if _has_page(row) else None}
            for row in _members(status, nodes, not_ready)
        ],
        "advice": [one._asdict() for one in advice],
        "numbers": _numbers(status),
        "epochs": [dict(one) for one in status["history"][-EPOCHS_MAX:]][::-1],
    }


def _elects(status: Status) -> bool:
    return bool(status["mode"] == Mode.DLEDGER.value)


def _has_page(row: Mapping[str, Any]) -> bool:
    return bool(row["node"] is not None and row["listed"] and not row["own"])


# -- one sentence ----------------------------------------------------------------------------------


def _headline(status: Status, not_ready: str | None) -> tuple[str, str]:
    master = "leader" if _elects(status) else "master"
    if status["takes_default"]:
        return GOOD, f"This node is the {master} and takes puts."
    if status["writable"]:
        return BAD, f"Puts that do not set acks are refused: {status['default_refused']}."
    if status.get("classic_master"):
        return GOOD, f"This node follows the RocketMQ master {status['classic_master']}."
    if not_ready is None and status["master"] is not None:
        return GOOD, f"Node {status['master']} is the {master}; this node follows it."
    return BAD, f"No puts are taken here: {status['reason']}."


def _why_master(status: Status) -> str:
    """Return why the master is the master, as far as this node knows."""
    master, history = status["master"], status["history"]
    if _elects(status):
        if master is None:
            return f"No leader is known in term {status['term']}."
        members = len(status["members"])
        return f"A majority of the {members} members elected it in term {status['term']}."
    if master is None:
        if status.get("classic_master"):
            return f"The RocketMQ master {status['classic_master']} writes this log."
        return "This node knows no master."
    own = [one for one in history if one.get("node") == master]
    epoch = f"epoch {own[-1]['epoch']} since offset {own[-1]['start_offset']:,}" if own else ""
    if master != status["node"]:
        return f"It has {epoch} of this node's log." if epoch else "It says so itself."
    place = "its file" if status.get("registry") is None else "ZooKeeper"
    return f"Its role in {place} is {status['role']}; it has {epoch or 'no epoch yet'}."


# -- a row for each node ---------------------------------------------------------------------------


def _members(
    status: Status, nodes: Mapping[int, NodeAddress], not_ready: str | None
) -> Iterable[dict[str, Any]]:
    members, learners = status.get("members") or (), status.get("learners") or ()
    learning = {one["node"]: one for one in learners}
    linked = {one["node"]: one for one in status["slaves"] if one["node"] is not None}
    for number in sorted({*nodes, *members, *learning, *linked, status["node"]}):
        address = nodes.get(number)
        row = {
            "node": number,
            "own": number == status["node"],
            "listed": address is not None,
            "api": None if address is None else address.api,
            "epoch": None, "end_offset": None, "lag_bytes": None,
        }  # fmt: skip
        if row["own"]:
            row.update(_own_row(status, not_ready))
        else:
            row.update(_other_row(status, number, {**learning, **linked}.get(number), not_ready))
        if number in learning:
            row["role"] = "learner"
        yield row
    for one in status["slaves"]:
        if one["node"] is None:
            yield {
                "node": None, "own": False, "listed": False, "api": one["address"], "epoch": None,
                "role": "RocketMQ slave", **_follower(one),
            }  # fmt: skip


def _own_row(status: Status, not_ready: str | None) -> dict[str, Any]:
    level, text = GOOD, "takes puts"
    if status["writable"] and not status["takes_default"]:
        level, text = BAD, "takes puts with acks=1 only"
    elif not status["writable"]:
        level, text = (GOOD, "follows") if not_ready is None else (BAD, "does not follow")
        if status["master"] == status["node"]:
            level, text = BAD, "takes no puts"
    return {
        "role": status["role"], "level": level, "state": text, "epoch": status["epoch"],
        "end_offset": status["max_offset"],
    }  # fmt: skip


def _other_row(
    status: Status, number: int, link: Status | None, not_ready: str | None
) -> dict[str, Any]:
    is_master = number == status["master"]
    names = ("leader", "follower") if _elects(status) else ("master", "slave")
    row: dict[str, Any] = {"role": names[not is_master], "level": UNKNOWN}
    if link is not None and "lag_bytes" in link:
        return {**row, **_follower(link)}
    links = {one["node"]: one for one in status.get("links") or ()}
    gone = {one["node"]: one for one in status.get("unlinked") or ()}
    if is_master:
        follows = not_ready is None
        text = "this node follows it" if follows else "this node has no link to it"
        return {**row, "level": GOOD if follows else BAD, "state": text}
    if number in gone:
        why = gone[number]["why"]
        text = "answers, but does not follow" if why is None else f"no answer: {why}"
        return {**row, "level": BAD, "state": text}
    if number in links:
        one = links[number]
        text = "linked" if one["linked"] else f"no link: {one['problem'] or 'not yet'}"
        return {**row, "level": GOOD if one["linked"] else BAD, "state": text}
    if status["master"] == status["node"]:
        return {**row, "state": "not linked yet"}
    return {**row, "state": "the master knows it"}


def _follower(link: Status) -> dict[str, Any]:
    """Return what a master knows of a node that follows it."""
    level, text = (GOOD, "in sync") if link.get("in_sync") else (LOOK, "not in sync")
    if link["state"] == "NO_LINK":
        level, text = BAD, "no link"
    elif link.get("full"):
        text = "its disk is full"
    elif link["state"] == "stalled":
        text = "takes nothing"
    elif link.get("waits_for"):
        text = str(link["waits_for"])
    return {
        "level": level, "state": text, "end_offset": link.get("ack_offset"),
        "lag_bytes": link["lag_bytes"],
    }  # fmt: skip


# -- what to do ------------------------------------------------------------------------------------


def _advice(status: Status, not_ready: str | None) -> Iterable[Advice]:
    """Yield what is wrong, the worst first."""
    file = status.get("config") or "FILE"
    if status["writable"] and not status["takes_default"]:
        yield _refused(status, file)
    elif not status["writable"] and not_ready is not None and not status.get("classic_master"):
        yield _no_master(status)
    if status["takes_default"]:
        for one in status.get("unlinked") or ():
            yield Advice(LOOK, f"node {one['node']} does not follow this master", _start(one))
    for one in status["slaves"]:
        if one.get("full"):
            do = "Make room there, and it goes on by itself"
            yield Advice(LOOK, f"The disk of node {one['node']} is full: it takes nothing.", do)
        elif not one["in_sync"] and one["state"] != "NO_LINK" and one["lag_bytes"]:
            who = "A RocketMQ slave" if one["node"] is None else f"Node {one['node']}"
            do = "It catches up by itself. If its lag grows, look at its disk and at the network"
            lag = f"{one['lag_bytes']:,} bytes behind"
            if one["state"] == "stalled":
                do = "Look at its disk: it may be full, and then it goes on once there is room"
                yield Advice(LOOK, f"{who} takes nothing, and is {lag}.", do)
                continue
            yield Advice(LOOK, f"{who} is {lag}.", do)
    for text in status["problems"]:
        if not text.startswith(_SYNC_REFUSED):
            yield Advice(LOOK, str(text).replace(_OF_FILE, f"-c {file}"))
    if status["unclean"]:
        do = "Let it follow a master, and do not promote it"
        yield Advice(LOOK, "This node may lack messages that it once acknowledged.", do)
    for change in status["config_pending"]:
        what = f"{change['key']} is {change['in_file']} in the file, and {change['in_force']} in "
        yield Advice("note", f"{what}force until the next {change['counts_from']}.")
    for text in status["notes"]:
        yield Advice("note", str(text).replace(_OF_FILE, f"-c {file}"))


def _refused(status: Status, file: str) -> Advice:
    steps = [_start(one) for one in status.get("unlinked") or ()]
    if not _elects(status):
        steps.append(
            "If its slaves are gone for long, let it go on alone: "
            f"`hastore promote -c {file} --async`"
        )
    what = f"Puts that do not set acks are refused: {status['default_refused']}."
    return Advice(BAD, what, ". ".join(steps))


def _start(one: Status) -> str:
    if one["why"] is None:
        return f"See why on node {one['node']} itself: it answers"
    return f"Start node {one['node']}, or look at the way to it ({one['why']})"


def _no_master(status: Status) -> Advice:
    what = f"No puts are taken here: {status['reason']}."
    if _elects(status):
        members = len(status["members"])
        if status["leader"] is not None or not members:
            return Advice(BAD, what)
        cut = [str(one["node"]) for one in status["links"] if not one["linked"]]
        do = f"An election needs {members // 2 + 1} of the {members} members that reach each other"
        return Advice(BAD, what, do + (f": see node {', '.join(cut)}" if cut else ""))
    if status["role_state"] != "following":
        return Advice(BAD, what)
    if status["promised_epoch"] > status["epoch"]:
        chosen = epoch_node(status["promised_epoch"])
        return Advice(
            BAD, what,
            f"Node {chosen} is to be the master: see there why it is not yet, or ask all nodes by "
            "`hastore status`. If it cannot become it, `hastore promote` for another node",
        )  # fmt: skip
    do = (
        "`hastore status` asks all nodes, and names the one to promote if the master is lost. Look "
        "at the way to the master first: it may well take puts"
    )
    return Advice(BAD, what, do)


# -- figures ---------------------------------------------------------------------------------------


def _numbers(status: Status) -> dict[str, Any]:
    names = ("min_offset", "max_offset", "flushed_offset", "confirmed_offset", "readable_offset")
    return {
        **{name: status[name] for name in (*names, "waiting_puts", "topics")},
        "delayed": status["delayed"].get("waiting", 0),
        "open_transactions": status["transactions"].get("open", 0),
        "waiting_requests": status["forwarding"].get("waiting", 0),
    }
