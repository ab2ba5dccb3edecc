"""The workloads by name, and what a run must have had states of."""

from collections.abc import Iterable
from functools import partial

from tests.crash import backups, check_classic, dledger, small
from tests.crash.classic import ClassicRun, small_steps
from tests.crash.hunt import Report, Workload

KINDS = frozenset({"kill", "subset", "torn", "length", "two names"})
EFFECTS = frozenset(
    {
        *("write", "zero", "map", "truncate", "allocate", "create", "rename", "remove", "mkdir"),
        *("rmdir", "sync", "sync of names", "promise"),
    }
)
# The durable files of a store of both modes; `tests/crash/hunt.py` says what a name stands for.
COMMON = frozenset(
    {
        *("consumequeue/*", "index/*", "checkpoint", "abort", "rescued/*", "hastore/limits"),
        *("hastore/replay", "hastore/idempotence", "hastore/spare", "hastore/cuts.json"),
    }
)
FILES = {
    "classic": COMMON
    | {
        *("commitlog/*", "hastore/node.json", "hastore/queues"),
        *("hastore/deliveries", "hastore/transactions", "hastore/times", "hastore/dismiss.json"),
        *("hastore/reserve/*", "rebuild.tmp/*"),
    },
    "retention": frozenset({"commitlog/*", "hastore/positions", "hastore/topics"}),
    "resync": frozenset({"commitlog/*", "rescued/*", "hastore/node.json"}),
    "dledger": COMMON
    | {
        *("dledger-n1/data/*", "dledger-n1/index/*", "dledger-n1/checkpoint"),
        *("dledger-n1/currterm", "hastore/votes.json", "hastore/entries.json"),
        *("hastore/dledger-request.json", "hastore/dropped/*"),
    },
    "backup": frozenset({"restoring.tmp/*", "commitlog/*"}),
    "small files": frozenset(
        {
            *("hastore/once.json", "hastore/scrub.json", "hastore/registry.json"),
            *("config/topics.json", "state.json", "identities.yaml", "hastore/limits"),
        }
    ),
}
RETAIN = ("flush", "replay", "retain")
WORKLOADS = {
    one.name: one
    for one in (
        Workload("classic", ClassicRun, check_classic.check, 60, small_steps),
        Workload(
            "retention",
            partial(ClassicRun, slave=False, favour=(*["put"] * 6, "commit", "topic", *RETAIN)),
            check_classic.check, 80, small_steps,
        ),
        Workload(
            "resync",
            partial(ClassicRun, slave=True, favour=("put", "put", "take", "take", "resync")),
            check_classic.check, 60, small_steps,
        ),
        Workload("dledger", dledger.EntryRun, dledger.check, 60),
        Workload("backup", backups.BackupRun, backups.check, 3, small_steps),
        Workload("small files", small.SmallRun, small.check, 60),
    )
}
SHARES = {  # of the rounds
    "classic": 3, "retention": 1, "resync": 1, "dledger": 3, "backup": 1, "small files": 1,
}  # fmt: skip


def missing(report: Report, names: Iterable[str]) -> list[str]:
    """Return the kinds, effects and files of which a run had no state."""
    found = [f"kind {one}" for one in KINDS - set(report.kinds)]
    found += [f"effect {one}" for one in EFFECTS - set(report.effects)]
    for name in names:
        found += [f"{name}: {one}" for one in FILES[name] if f"{name}: {one}" not in report.files]
    return sorted(found)


SHORT = {  # seeds that have states of every kind together
    "classic": (0, 4), "retention": (3,), "resync": (0,), "dledger": (0, 1, 2), "backup": (0,),
    "small files": (0,),
}  # fmt: skip
