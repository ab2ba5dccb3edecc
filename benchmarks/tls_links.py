"""What TLS on the links between the nodes costs: pairs with `security.ha: tls` and plain ones.

    python -m benchmarks.tls_links [--repeats 5] [--scale 1] [--dir FOLDER]

Clients speak plain everywhere. The pairs take turns, in one run:

  * puts of 1 KiB that the slave confirms: one at a time, 64 in flight, batches of 100. No put waits
    for a disk;
  * a log of 1 GiB replicated to a new, empty slave, as in benchmarks/replication.py.
"""

import contextlib
import functools
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.certificates import Certificates
from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Group,
    arguments,
    figure,
    fill_store,
    save,
    say,
    scratch,
    touch_memory,
)
from benchmarks.loads import batched, blocking, pipelined
from benchmarks.replication import replicate
from benchmarks.side_by_side import OURS, Row, run_rounds, times_and_rates, with_client
from hastore.client.producer.producer import Producer

PLAIN, TLS = "plain", OURS
SYSTEMS = (PLAIN, TLS)
FILE_BYTES = 1024 * MIB
Run = dict[str, Any]


def sections(own: Certificates, name: str) -> Callable[[int], Mapping[str, Any]] | None:
    """Return what makes the section `security` of each node of a pair; None for plain links."""
    return functools.partial(own.section, ha="tls") if name == TLS else None


def rows(groups: Mapping[str, Group]) -> list[Row]:
    """Return the loads on the pairs."""
    hosts = {name: group.bootstrap for name, group in groups.items()}
    peers = {PLAIN: ("plain links", None)}
    return [
        Row(
            "one blocking put, the links under TLS", "ms",
            {n: (1_500, lambda c, h=h: blocking(h, c)) for n, h in hosts.items()}, peers,
        ),
        Row(
            "64 puts in flight, the links under TLS", "msg/s",
            {
                n: (30_000, lambda c, h=h: pipelined(h, in_flight=64, count=c))
                for n, h in hosts.items()
            },
            peers,
        ),
        Row(
            "send_batch of 100, 8 in flight, the links under TLS", "msg/s",
            {
                n: (80_000, lambda c, h=h: batched(h, batch=100, in_flight=8, count=c))
                for n, h in hosts.items()
            },
            peers,
        ),
    ]  # fmt: skip


def put_figures(
    folder: pathlib.Path, own: Certificates, repeats: int, scale: float
) -> list[dict[str, Any]]:
    """Run the puts and return their figures."""
    with contextlib.ExitStack() as stack:
        groups: dict[str, Group] = {}
        for name in SYSTEMS:
            (folder / name).mkdir(parents=True)
            group = Group(folder / name, store={"warm_files": True}, security=sections(own, name))
            groups[name] = stack.enter_context(group)
            group.start()
            with Producer(group.bootstrap) as producer:
                producer.send_sync("blocking", bytes(BODY_BYTES))
        loads = rows(groups)
        systems = {name: with_client(group.costs) for name, group in groups.items()}
        run_rounds(loads, systems, repeats, scale)
    return times_and_rates(loads)


def copy_figures(
    folder: pathlib.Path, own: Certificates, repeats: int, size: int
) -> list[dict[str, Any]]:
    """Replicate a log over both kinds of link and return the figures."""
    runs: dict[str, list[Run]] = {name: [] for name in SYSTEMS}
    with contextlib.ExitStack() as stack:
        groups: dict[str, Group] = {}
        for name in SYSTEMS:
            (folder / name).mkdir(parents=True)
            groups[name] = stack.enter_context(
                Group(
                    folder / name,
                    store={"commitlog_file_size": FILE_BYTES},
                    ha={"max_gap_not_in_sync": 2**40},
                    security=sections(own, name),
                )
            )
        end = fill_store(groups[PLAIN][1].store, size, FILE_BYTES)
        shutil.copytree(groups[PLAIN][1].store, groups[TLS][1].store)
        for repeat in range(repeats):
            for name in SYSTEMS:
                runs[name].append(replicate(groups[name], end))
            rates = [f"{n} {end / runs[n][-1]['seconds'] / 1e6:,.0f}" for n in SYSTEMS]
            say(f"replication {repeat + 1}/{repeats}, MB/s: {', '.join(rates)}")

    def samples(name: str, of: Any) -> list[float]:
        return [of(run) for run in runs[name]]

    def compared(text: str, unit: str, of: Any) -> dict[str, Any]:
        return figure(text, unit, samples(TLS, of), "plain links", samples(PLAIN, of))

    text = "replication to an empty slave under TLS"
    found = [
        compared(text, "MB/s", lambda run: end / run["seconds"] / 1e6),
        compared(
            f"{text}, until its queues are caught up", "MB/s",
            lambda run: end / run["caught_up_seconds"] / 1e6,
        ),
    ]  # fmt: skip
    for who in ("master", "slave"):
        found.append(
            compared(
                f"{text}: CPU of the {who} until all is reported", "s/GiB",
                lambda run, who=who: run["cpu_s"][who] / (end / 2**30),
            )
        )  # fmt: skip
    return found


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    size = int(FILE_BYTES * given.scale)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, 8 * FILE_BYTES))
        touch_memory(folder, 4 * size)
        own = Certificates(folder / "certificates")
        figures = put_figures(folder / "puts", own, given.repeats, given.scale)
        figures += copy_figures(folder / "copies", own, given.repeats, size)
    settings = {"body_bytes": BODY_BYTES, "bytes": size, "file_size": FILE_BYTES}
    save("tls_links", figures, settings)


if __name__ == "__main__":
    main()
