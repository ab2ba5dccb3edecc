"""Draw docs/img/benchmarks.png: every ratio that has a target, as "times better than the peer".

python -m benchmarks.plot
"""

import json
import pathlib
import sys
from typing import Any

from benchmarks.common import RESULTS, ROOT, say

IMAGE = ROOT / "docs" / "img" / "benchmarks.png"
MET, MISSED = "#2c7fb8", "#d95f0e"


def better(one: dict[str, Any]) -> tuple[float, float, float, float | None]:
    """Return how many times better hastore is: (low, median, high, target)."""
    ratio, limit = one["ratio"], one["target"]["limit"]
    promised = limit if one["target"]["of"] == "ratio" else None
    if one["target"]["sense"] == "at least":
        return ratio["min"], ratio["median"], ratio["max"], promised
    inverse = None if promised is None else 1 / promised
    return 1 / ratio["max"], 1 / ratio["median"], 1 / ratio["min"], inverse


def draw(figures: list[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Draw one bar for each figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # A ratio of 0, such as of 0 ms by a clock of milliseconds, has no place on the scale.
    shown = [one for one in figures if one.get("ratio", {"min": 0})["min"] > 0][::-1]
    size = (11, 1.2 + 0.31 * len(shown))
    canvas, axes = pyplot.subplots(figsize=size, layout="constrained")
    for place, one in enumerate(shown):
        low, middle, high, promised = better(one)
        color = MET if one["met"] else MISSED
        axes.barh(place, middle - 1, left=1, color=color, height=0.62)
        axes.plot([low, high], [place, place], color="black", linewidth=1)
        if promised is not None:
            axes.plot([promised] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2.2)
        right = max(high, middle, promised or 0, 1)
        axes.text(right * 1.06, place, f"{middle:.3g}", va="center", fontsize=8)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    names = [f"{one['name']}  |  {one['peer']}" for one in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_ylim(-0.7, len(shown) - 0.3)
    axes.margins(x=0.12)
    axes.set_xlabel(
        "times better than the peer in the same run: median; thin line: smallest to greatest;\n"
        "thick mark: the target; blue: met, orange: missed",
        fontsize=8,
    )
    axes.set_title(title, fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def main() -> None:
    """Draw the latest summary."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        say("no plot: matplotlib is not installed; pip install 'hastore[bench]'")
        return
    source = RESULTS / "summary.json"
    if not source.exists():
        sys.exit(f"{source} does not exist; run: python -m benchmarks.run_all")
    summary = json.loads(source.read_text())
    machine = summary["machine"]
    title = f"hastore beside its peers, {machine['date']}, {machine['cores']} cores"
    draw(summary["figures"], title, IMAGE)
    say(f"drew {IMAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
