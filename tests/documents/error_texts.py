"""What hastore says when something is wrong, read from its code, as texts with holes.

A hole is a NUL: it stands for each value that a text gets when it is said.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.documents.blocks import ROOT
from tests.sources import parse

PACKAGE = ROOT / "hastore"
HOLE = "\0"
# What a node runs.
NODE = ("service.py", "ha", "dledger", "registry", "security", "server", "store")
CLIENT = ("client", "aio")
# Calls of a logger, and of hastore.bounded_log; INFO is left out.
_LOGS = {"warning", "error", "critical", "exception", "log"}
_BOUNDED = {"warn", "_warn"}
_WRITERS = {"_slow", "_failures", "_unsafe_links", "_told"}
# Where the texts of /status are made: `problems`, and why a node does not take puts.
_PROBLEMS = re.compile(
    r"^_?(\w+_)?problems?(_of_?\w*)?$|^_?(lapse|superseded|blocked|not_master)_?(text|reason)$"
    r"|^(writable_reason|differences|refusal_of|(replay|sync_flush)_refusal|missing)$"
    r"|^(never_flushed|remedy)$"
    r"|^(removed_text|role_and_log|config_notes|_stays|new_epoch_problem|_may_promote_itself)$"
    r"|^(_text|_texts|_who_takes_over|others_wrote|_follow_once|_act_on|note_defect|secure)$"
    r"|^waits_for$"
)
_FIELDS = re.compile(
    r"^_?(problem|notice|no_room|failure|failure_reason|blocked_reason|no_reserve|damaged|refused"
    r"|sync_failed|drop_failure|too_large|uncounted|wrong_text)$"
)
_BETWEEN_NODES = (
    *("ha/promoter.py", "ha/rules/promotion.py", "ha/rules/following.py", "ha/node/member.py"),
    *("ha/replica/rewind.py", "dledger/links/identity.py", "dledger/core/election.py"),
    *("dledger/core/leader.py", "dledger/core/learners.py", "dledger/core/member_state.py"),
    "dledger/driver/requests.py",
)
# These check a file or a request, or compare queues: only a command or a client is told.
_OF_FILES = (
    *("security/identity.py", "security/identity_editor.py", "security/identity_file.py"),
    *("store/rebuild/compare.py", "server/remoting/group_requests.py"),
)
# Why a client is not let in, or may not do something.
_CLIENTS = {"NotAuthenticatedError", "ForbiddenError"}
_REFUSALS = (
    "server/api/access.py", "server/api/quotas.py", "server/api/puts.py",
    "server/api/connections.py", "server/api/server.py", "store/append/validation.py",
    "store/append/queue_offsets.py", "security/identities.py", "store/log/allocate.py",
    "store/derived/transactions.py",
)  # fmt: skip
_REFUSING = re.compile(
    r"^(_refusal(_of)?|refusal|why|_over|no_right|anothers_producer|_reason_to_end|prove|why_not"
    r"|_certificate_text|_why_not(_back)?|_why_too_large|_is_marked|_ends_transaction|_check_topic"
    r"|_place|admit_put|_put_to_wait|why_full)$"
)


@dataclass(frozen=True, order=True)
class Text:
    """A text of the code, with holes."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """Name its place."""
        return f"hastore/{self.path}:{self.line}: {self.text.replace(HOLE, '...')}"


_Function = ast.FunctionDef | ast.AsyncFunctionDef
_KINDS = (ast.Return, ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Call)


@functools.cache
def _nodes(path: pathlib.Path) -> list[tuple[ast.AST, _Function | None]]:
    """Return a module's statements and calls that matter here, each with its function."""
    found = []
    left: list[tuple[ast.AST, _Function | None]] = [(parse(path), None)]
    while left:
        node, around = left.pop()
        if isinstance(node, _KINDS):
            found.append((node, around))
        inner = node if isinstance(node, _Function) else around
        left += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def template(node: ast.AST) -> str | None:
    """Return the text of an expression, with a hole for each value; None if it is no text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = template(node.left), template(node.right)
        return None if parts == (None, None) else "".join(p or HOLE for p in parts)
    return None


def _said(text: str) -> str:
    text = re.sub(r"%[-#0 +]*[\d.]*[sdrfgo]", HOLE, text).replace("%%", "%")
    return re.sub(rf"{HOLE}+", HOLE, " ".join(text.split()))


def modules(parts: tuple[str, ...]) -> Iterator[pathlib.Path]:
    """Yield the modules of some packages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.relative_to(PACKAGE).parts[0] in parts:
            yield path


def _texts_in(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the outermost texts of an expression."""
    if isinstance(node, ast.expr) and template(node) is not None:
        yield node
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts_in(child)


def _logged(call: ast.Call) -> ast.expr | None:
    """Return the text of a call that logs a WARNING or more; None for other calls."""
    name, owner, given = "", "", list(call.args)
    if isinstance(call.func, ast.Attribute):
        name = call.func.attr
        if name in _LOGS or name == "write":
            owner = ast.unparse(call.func.value)
    elif isinstance(call.func, ast.Name):
        name = call.func.id
    last = owner.rpartition(".")[2]
    if name == "log":
        given = given[1:]  # the level
    logs = name in _LOGS and ("log" in last.lower() or "getLogger" in owner)
    writes = name == "write" and last in _WRITERS
    if not given or not (logs or writes or name in _BOUNDED):
        return None
    relays = isinstance(given[0], ast.Constant) and given[0].value == "%s" and len(given) > 1
    return given[1] if relays else given[0]


def logged(parts: tuple[str, ...]) -> list[Text]:
    """Return what the modules log as WARNING or worse."""
    found = set()
    for path in modules(parts):
        for call, around in _nodes(path):
            said = _logged(call) if isinstance(call, ast.Call) else None
            for named in () if said is None else _values(said, around):
                found.update(_text(path, node) for node in _texts_in(named))
    return _worth(found, words=1)


def _values(said: ast.expr, around: _Function | None) -> list[ast.expr]:
    """Return the expression, or what its name is set to in the function of the call."""
    if not isinstance(said, ast.Name) or around is None:
        return [said]
    return [
        node.value
        for node in ast.walk(around)
        if isinstance(node, ast.Assign)
        and any(isinstance(one, ast.Name) and one.id == said.id for one in node.targets)
    ]


def problems() -> list[Text]:
    """Return the texts of `problems`, and of why a node takes no puts, in /status."""
    found = set()
    for path in modules((*NODE, "config")):
        name = path.relative_to(PACKAGE).as_posix()
        if name in _OF_FILES:
            continue
        for node, around in _nodes(path):
            if isinstance(node, (ast.Raise, ast.Call)):
                continue
            function = "" if around is None else around.name
            if name.startswith("config/"):
                tells = function in ("config_notes", "_open_api_notes")
            elif isinstance(node, ast.Assign) and any(map(_is_field, node.targets)):
                tells = True
            else:
                tells = bool(_PROBLEMS.match(function))
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            logs = isinstance(node, ast.Expr) and _is_log(node.value)
            if tells and not docstring and not logs:
                found.update(_text(path, each) for each in _texts_in(node))
    return _worth(found, words=2)


def refusals() -> list[Text]:
    """Return why clients and their puts are refused."""
    found = set()
    for path in modules(NODE):
        name = path.relative_to(PACKAGE).as_posix()
        for node, around in _nodes(path):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                if ast.unparse(node.exc.func) in _CLIENTS:
                    found.update(_text(path, each) for each in _texts_in(node.exc))
            elif (
                name in _REFUSALS
                and isinstance(node, (ast.Return, ast.Assign))
                and (around is None or _REFUSING.match(around.name))
            ):
                found.update(_text(path, each) for each in _texts_in(node))
    return _worth(found)


def between_nodes() -> list[Text]:
    """Return why a promotion, a promise, a link or a cut is refused by another node, or by this."""
    found = set()
    for path in modules(NODE):
        if path.relative_to(PACKAGE).as_posix() not in _BETWEEN_NODES:
            continue
        for node, _ in _nodes(path):
            if isinstance(node, (ast.Raise, ast.Return)):
                found.update(_text(path, each) for each in _texts_in(node))
    return _worth(found)


def told_by_commands(parts: tuple[str, ...], kinds: set[str]) -> list[Text]:
    """Return the texts of exceptions that the modules raise, each joined of its parts."""
    found = set()
    for path in modules(parts):
        for node, _ in _nodes(path):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            if ast.unparse(node.exc.func) in kinds:
                said = [_text(path, each).text for each in _texts_in(node.exc)]
                name = path.relative_to(PACKAGE).as_posix()
                found.add(Text(name, node.lineno, " ".join(said)))
    return _worth(found)


def errors_of_files() -> list[tuple[str, int]]:
    """Return where an error of a configuration file is made, and of how many parts.

    They are key, problem and remedy.
    """
    found = []
    for path in modules(("config",)):
        for node, _ in _nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("places.error"):
                place = f"{path.relative_to(PACKAGE)}:{node.lineno}"
                whole = any(isinstance(one, ast.Starred) for one in node.args)
                found.append((place, 3 if whole else len(node.args) + len(node.keywords)))
    return found


def _text(path: pathlib.Path, node: ast.expr) -> Text:
    return Text(
        path.relative_to(PACKAGE).as_posix(), node.lineno, _said(template(node) or "")
    )  # fmt: skip


def _worth(found: set[Text], words: int = 3) -> list[Text]:
    """Return those with so many words of their own; others are parts of another text."""
    return sorted(
        one
        for one in found
        if len(re.findall(r"[A-Za-z-]{2,}", one.text)) >= words and " " in one.text
    )


def _is_field(target: ast.expr) -> bool:
    if isinstance(target, ast.Name):
        return target.id == "problem"
    return isinstance(target, ast.Attribute) and bool(_FIELDS.match(target.attr))


def _is_log(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _logged(node) is not None
