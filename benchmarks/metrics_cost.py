"""What /metrics costs: the same puts without scrapes, and with one each second.

    python -m benchmarks.metrics_cost [--repeats 5] [--scale 1] [--dir FOLDER]

One group, a master and a slave; both are scraped, or nobody is, in turn. Then the master gets
10,000 topics and 1,000 consumer groups (times the scale), and the time of a scrape is measured.
"""

import contextlib
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence

from benchmarks.common import (
    BODY_BYTES,
    MIB,
    Group,
    Target,
    arguments,
    at_least,
    at_most,
    figure,
    save,
    say,
    scratch,
    touch_memory,
    wait_until,
)
from benchmarks.loads import batched, blocking, pipelined
from benchmarks.side_by_side import OURS, Row, run_rounds, times_and_rates, with_client
from hastore.client.consumer.positions_client import Positions
from hastore.client.producer.producer import Producer

QUIET = "without scrapes"
EVERY_S = 1.0
TOPICS, GROUPS = 10_000, 1_000
SCRAPES = 20
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def scrape(address: str) -> tuple[float, bytes]:
    """Return the time of a scrape in ms, and the page."""
    began = time.perf_counter()
    with _direct.open(f"http://{address}/metrics", timeout=60) as answer:
        page = answer.read()
    return (time.perf_counter() - began) * 1e3, page


@contextlib.contextmanager
def scraped(addresses: Sequence[str]) -> Iterator[None]:
    """Scrape the nodes each second meanwhile, the first time at once."""
    over = threading.Event()

    def run() -> None:
        while True:
            for address in addresses:
                scrape(address)
            if over.wait(EVERY_S):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def rows(group: Group) -> list[Row]:
    """Return the loads, each with scrapes and without."""
    hosts, addresses = group.bootstrap, [group[number].http for number in (1, 2)]
    loads = {
        ("one blocking put", "ms"): (10_000, lambda n: blocking(hosts, n)),
        ("64 puts in flight", "msg/s"): (
            200_000, lambda n: pipelined(hosts, in_flight=64, count=n)
        ),
        ("send_batch of 100, 8 in flight", "msg/s"): (
            400_000, lambda n: batched(hosts, batch=100, in_flight=8, count=n)
        ),
    }  # fmt: skip
    found = []
    for (name, unit), (count, load) in loads.items():

        def beside(n: int, load=load):  # type: ignore[no-untyped-def]
            with scraped(addresses):
                return load(n)

        limit = at_most(1.03) if unit == "ms" else at_least(0.97)
        peers = {QUIET: (QUIET, limit)}
        found.append(Row(name, unit, {OURS: (count, beside), QUIET: (count, load)}, peers))
    return found


def fill(group: Group, scale: float) -> None:
    """Make many topics, and consumer groups with a position in one of them each."""

    def replayed() -> bool:
        status = group[1].status()
        return bool(status["dispatched_offset"] == status["max_offset"])

    wait_until(replayed, 300.0, "the master's replay did not end", 0.5)
    topics = [f"topic{number}" for number in range(max(10, int(TOPICS * scale)))]
    with Producer(group.bootstrap) as producer:
        for future in [producer.send(topic, b"x") for topic in topics]:
            future.result(120)
    wait_until(replayed, 300.0, "the master's replay did not make the queues", 0.5)
    with Positions(group.bootstrap) as positions:
        for number in range(max(1, int(GROUPS * scale))):
            positions.commit(f"group{number}", topics[0], {0: 0})


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(given.dir, int(16 * 1024 * MIB * given.scale)))
        touch_memory(folder, int(1024 * MIB * given.scale))
        store = {"warm_files": True, "default_queues": 1, "consume_queue_units": 30_000}
        group = stack.enter_context(Group(folder, store=store))
        group.start()
        loads = rows(group)
        costs = with_client(group.costs)
        run_rounds(loads, {OURS: costs, QUIET: costs}, given.repeats, given.scale)
        fill(group, given.scale)
        scrape(group[1].http)  # the positions of groups are read after it
        times, pages = zip(*(scrape(group[1].http) for _ in range(SCRAPES)), strict=True)
        samples = sum(1 for line in pages[-1].splitlines() if not line.startswith(b"#"))
        say(f"a page of {samples} samples, {len(pages[-1])} bytes")
    topics, groups = TOPICS * given.scale, GROUPS * given.scale
    name = f"a scrape with {topics:,.0f} topics and {groups:,.0f} groups"
    figures = [
        *times_and_rates(loads),
        figure(name, "ms", times, target=Target(200.0, "at most", "figure"), page_samples=samples),
    ]
    save("metrics_cost", figures, {"body_bytes": BODY_BYTES, "scale": given.scale})


if __name__ == "__main__":
    main()
