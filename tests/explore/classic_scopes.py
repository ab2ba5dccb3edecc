"""The scopes in which groups of mode classic are searched: small, and each for something else."""

from __future__ import annotations

from tests.explore.classic_model import Scope

ALWAYS: dict[str, int | None] = dict.fromkeys(("start", "flush", "follow", "end"))
BASIC = frozenset({"start", "follow", "send", "receive", "report", "answer", "no answer"})
FLIPS = BASIC | {"put", "promote", "killed", "synced", "link ended"}

SCOPES: dict[str, Scope] = {
    "a new pair": Scope(
        bounds={**ALWAYS, "put": 1, "promote": 2, "kill": 1}, due=FLIPS,
    ),
    "flips of a pair": Scope(
        begin="led", bounds={**ALWAYS, "put": 2, "promote": 2, "kill": 1, "lost": 1, "demote": 1},
        due=FLIPS | {"answer lost", "demoted"},
    ),
    "power of a pair": Scope(
        begin="led",
        bounds={**ALWAYS, "put": 1, "promote": 2, "power": 1, "kill": 1, "resume": 1, "break": 1},
        due=BASIC | {"put", "promote", "power lost", "resume", "link broken"},
    ),
    "synced puts of a pair": Scope(
        flushed=True, begin="led",
        bounds={**ALWAYS, "put": 1, "promote": 2, "power": 1, "kill": 1, "resume": 1},
        due=BASIC | {"put", "promote", "power lost", "resume"},
    ),
    "deaths within a step": Scope(
        begin="led", bounds={**ALWAYS, "put": 1, "promote": 2, "torn": 2, "resume": 1},
        due=BASIC | {"put", "promote", "dies within", "resume"},
    ),
    "retention": Scope(
        begin="filled", bounds={**ALWAYS, "put": 1, "promote": 1, "retain": 1, "kill": 1},
        due=BASIC | {"put", "promote", "retained", "killed"},
    ),
    "a pair with a tail": Scope(
        begin="ahead", bounds={**ALWAYS, "put": 1, "promote": 2, "kill": 1},
        due=FLIPS,
    ),
    "a pair that has diverged": Scope(
        begin="diverged", bounds={**ALWAYS, "put": 1, "promote": 1, "torn": 1, "kill": 1},
        due=FLIPS | {"dies within"},
    ),
    "three that have diverged": Scope(
        nodes=3, begin="diverged", bounds={**ALWAYS, "promote": 1, "torn": 1},
        due=BASIC | {"promote", "dies within"},
    ),
    "a slave that is behind": Scope(
        nodes=3, begin="ahead",
        bounds={**ALWAYS, "put": 1, "promote": 1, "kill": 1},
        due=FLIPS,
    ),
    "two candidates": Scope(
        nodes=3, begin="ahead", bounds={**ALWAYS, "promote": 2, "lost": 1, "torn": 1},
        due=BASIC | {"promote", "answer lost", "dies within"},
    ),
    "two operators": Scope(
        nodes=3, begin="led", bounds={**ALWAYS, "put": 1, "promote": 2, "kill": 1, "lost": 1},
        due=FLIPS | {"answer lost"},
    ),
    "two slaves confirm": Scope(
        nodes=3, acks=2, begin="led", bounds={**ALWAYS, "put": 1, "promote": 2, "break": 1},
        due=BASIC - {"start", "no answer"} | {"put", "promote", "link broken"},
    ),
    "power of three": Scope(
        nodes=3, begin="led", bounds={**ALWAYS, "put": 1, "promote": 2, "power": 1, "kill": 1},
        due=BASIC | {"put", "promote", "power lost", "killed"},
    ),
    "by force": Scope(
        nodes=3, begin="led", bounds={**ALWAYS, "put": 1, "promote": 1, "force": 1, "kill": 2},
        due=BASIC | {"put", "promote", "promote by force", "killed"},
    ),
}  # fmt: skip

# The scope in which the search meets a planted mistake (tests/ha/planted.py).
SHOWS = {
    "own_is_best": "a slave that is behind",
    "flip_acks": "a pair with a tail",
    "entry_after_bytes": "deaths within a step",
    **dict.fromkeys(
        ("length_only", "history_not_cut", "entries_at_once", "promise_in_memory"),
        "a pair that has diverged",
    ),
}
