"""The tables of docs/metrics.md, from the catalog; `python -m tests.metrics_table` writes them."""

import pathlib

from hastore.server.metrics.catalog import CHAPTERS

DOCUMENT = pathlib.Path(__file__).resolve().parent.parent / "docs" / "metrics.md"
BEGIN, END = (
    "<!-- metrics, written by: python -m tests.metrics_table -->\n",
    "<!-- end of metrics -->\n",
)


def tables() -> str:
    """Return a chapter with a table for each chapter of the catalog."""
    lines = []
    for title, metrics in CHAPTERS.items():
        lines += [f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|"]
        for one in metrics:
            labels = ", ".join(f"`{label}`" for label in one.labels)
            text = one.help[0].lower() + one.help[1:] if one.help[1:2].islower() else one.help
            lines.append(f"| `{one.name}` | {one.kind.value} | {labels} | {text} |")
        lines.append("")
    return "\n".join(lines)


def written(text: str) -> str:
    """Return the document with the tables as they must be."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text()))
