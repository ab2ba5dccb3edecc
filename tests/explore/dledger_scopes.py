"""The scopes in which groups of mode dledger are searched: small, and each for something else."""

from __future__ import annotations

from tests.explore.dledger_events import Scope

ALWAYS: dict[str, int | None] = dict.fromkeys(
    ("start", "beat", "timeout", "cut off", "synced", "lapse")
)
VOTES = frozenset(
    f"{name} {pre}" for name in ("VoteRequest", "VoteResponse") for pre in ("True", "False")
)
PUSHES = frozenset(
    {"CompareRequest", "AppendRequest", "CommitRequest", "PushResponse compare",
     "PushResponse append", "PushResponse commit"}
)  # fmt: skip
BASIC = frozenset({"election timeout", "beat", "cut off", "dies", "start", "put", "synced"})

SCOPES: dict[str, Scope] = {
    # Each message by itself.
    "messages of 3": Scope(
        terms=2, in_flight=5, left_out=frozenset({"HeartBeatRequest"}),
        bounds={**ALWAYS, "put": 1, "dies": 1},
        due=BASIC | VOTES | {"CompareRequest", "PushResponse compare", "lost"},
    ),
    "messages of 2": Scope(
        nodes=2, terms=2, in_flight=4,
        bounds={**ALWAYS, "put": 2, "dies": 1, "power": 1, "twice": 1, "torn": 1, "late": 1},
        due=BASIC | VOTES | {"CompareRequest", "AppendRequest", "lost", "twice", "dies within"},
    ),
    "messages to a leader's followers": Scope(
        terms=2, in_flight=5, led=True, left_out=frozenset({"HeartBeatRequest"}),
        bounds={**ALWAYS, "put": 1, "dies": 1, "transfer": 1},
        due=BASIC | {"AppendRequest", "PushResponse append", "CommitRequest", "transfer"},
    ),
    # Whole exchanges: long histories.
    "logs": Scope(
        grain="exchanges", terms=4, bounds={**ALWAYS, "put": 2, "dies": None, "power": None},
        due=BASIC | VOTES | PUSHES | {"TruncateRequest", "PushResponse truncate", "power lost"},
    ),
    "logs of 2": Scope(
        nodes=2, grain="exchanges", terms=3,
        bounds={**ALWAYS, "put": 2, "dies": None, "power": None, "torn": 1},
        due=BASIC | VOTES | PUSHES | {"power lost"},  # no entry of a pair's leader is ever cut
    ),
    "reads": Scope(
        grain="exchanges", terms=3, led=True,
        bounds={**ALWAYS, "beat": 3, "put": 1, "read": 2, "late": 1},
        due=PUSHES | {"read", "put", "HeartBeatResponse", "late"},
    ),
    "lost disks": Scope(
        grain="exchanges", terms=3, led=True,
        bounds={**ALWAYS, "put": 1, "wipe": 1, "dies": 1},
        due=BASIC | PUSHES | {"disk lost"},
    ),
    "members": Scope(
        grain="exchanges", terms=3, led=True,
        bounds={**ALWAYS, "put": 1, "members": 2, "dies": 1, "transfer": 1},
        due=BASIC | PUSHES | {"removed", "added", "transfer", "TakeLeadership"},
    ),
    "retention": Scope(
        grain="exchanges", terms=3, led=True,
        bounds={**ALWAYS, "put": 2, "retain": 1, "checkpoint": 1, "dies": 1},
        due=BASIC | PUSHES | {"retained", "checkpoint", "InstallRequest"},
    ),
    "stopped replay": Scope(
        grain="exchanges", terms=3, led=True,
        bounds={**ALWAYS, "put": 1, "blocked": 2, "late": 2, "dies": 1},
        due=BASIC | PUSHES | {"replay", "TakeLeadership"},
    ),
}  # fmt: skip

# The scope in which the search meets a planted mistake (tests/dledger/planted.py).
SHOWS = {
    **dict.fromkeys(
        ("vote_in_memory", "vote_forgotten", "votes_twice", "term_not_saved"), "messages of 3"
    ),
    **dict.fromkeys(("minority_elects", "quorum_short"), "messages of 2"),
    **dict.fromkeys(
        ("term_falls", "leader_counts_unsynced", "lost_puts_acknowledged", "lost_puts_refused"),
        "messages to a leader's followers",
    ),
    **dict.fromkeys(
        ("old_term_by_counting", "answer_unsynced", "counts_end", "compare_by_index",
         "cut_still_persisted", "append_unchecked", "commit_beyond_match"),
        "logs",
    ),
    **dict.fromkeys(("wiped_node_votes", "recalled_at_once"), "lost disks"),
    **dict.fromkeys(
        ("two_changes", "change_too_early", "added_as_member", "learner_counted"), "members"
    ),
}  # fmt: skip
