"""What a developer waits for: `hastore dev`, and a group of `hastore.testing` in a test.

    python -m benchmarks.develop [--repeats 5]

hastore dev: from the start of the command to its line with the addresses, after which puts are
taken; a pair, and three nodes of mode dledger. hastore.testing: the first group of a process, which
takes the imports, and each further one, until both are in sync; then until a first message is
acknowledged.
"""

import json
import subprocess
import sys
import time

from benchmarks.bare import BODY
from benchmarks.common import ROOT, Target, arguments, figure, save, say
from hastore.client.producer.producer import Producer
from hastore.testing import group

DEV = Target(3.0, "at most", "figure")
PAIR = Target(0.5, "at most", "figure")
ENDS_S = 15.0


def dev(mode: str) -> float:
    """Return the seconds until `hastore dev` has printed where its nodes are."""
    line = [sys.executable, str(ROOT / "bin" / "hastore"), "dev", "--json", "--port", "0"]
    began = time.perf_counter()
    running = subprocess.Popen(
        [*line, "--mode", mode],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert running.stdout is not None
        said = running.stdout.readline()
        took = time.perf_counter() - began
        bootstrap = json.loads(said)["bootstrap"]
        hosts = bootstrap if isinstance(bootstrap, list) else bootstrap.split(",")
        with Producer(hosts) as producer:
            producer.send_sync("t", BODY)
    finally:
        running.terminate()
        running.wait(ENDS_S)
    return took


def first_group() -> float:
    """Return the seconds of the first group of a process, with the import of hastore.testing."""
    program = (
        "import time; began = time.perf_counter()\n"
        "from hastore.testing import group\n"
        "with group(): print(time.perf_counter() - began)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def more_groups() -> tuple[float, float]:
    """Return the seconds of a further group, and those to its first acknowledged message."""
    began = time.perf_counter()
    with group() as made:
        ready = time.perf_counter() - began
        with Producer(made.bootstrap) as producer:
            producer.send_sync("t", BODY)
        return ready, time.perf_counter() - began


def main() -> None:
    """Run the benchmark."""
    given = arguments(__doc__)
    classic, dledger = [], []
    first, further, message = [], [], []
    with group():
        pass
    for repeat in range(given.repeats):
        classic.append(dev("classic"))
        dledger.append(dev("dledger"))
        first.append(first_group())
        ready, sent = more_groups()
        further.append(ready)
        message.append(sent)
        say(
            f"develop {repeat + 1}/{given.repeats}: dev {classic[-1]:.2f} s and {dledger[-1]:.2f} s"
            f", a pair in a test {first[-1]:.2f} s, then {ready:.2f} s"
        )
    figures = [
        figure("hastore dev, a pair, until it serves", "s", classic, target=DEV),
        figure("hastore dev --mode dledger, until it serves", "s", dledger, target=DEV),
        figure("hastore.testing, the first pair of a process, with imports", "s", first),
        figure("hastore.testing, each further pair", "s", further, target=PAIR),
        figure("the same to the first acknowledged message", "s", message),
    ]
    save("develop", figures, {})


if __name__ == "__main__":
    main()
