"""Page: the samples of one scrape, written in the text format of Prometheus (version 0.0.4).

The library prometheus_client takes 7 us for each sample; with thousands of them, each second, that
would be time that puts lack. What is needed here is a few lines.
"""

from collections.abc import Iterable

from hastore.counters import BOUNDS_MS, Histogram
from hastore.server.metrics.catalog import COMMON_LABELS, METRICS, Kind, Metric

Number = int | float  # a bool is 1 or 0
_BOUNDS = [f"{bound / 1000.0:g}" for bound in BOUNDS_MS]


class Page:
    """Gather samples, then `render` them by metric, in the catalog's order."""

    def __init__(self, cluster: str, group: str, node: str) -> None:
        """Prepare; every sample gets these labels."""
        values = zip(COMMON_LABELS, (cluster, group, node), strict=True)
        self._common = ",".join(f'{name}="{_escaped(value)}"' for name, value in values)
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, value: Number | None, *labels: str) -> None:
        """Add a sample; `labels` are the values of the metric's own labels. None: no sample."""
        if value is not None:
            lines = self._lines.setdefault(name, [])
            lines.append(f"{name}{{{self._labels(METRICS[name], labels)}}} {_number(value)}\n")

    def add_all(self, name: str, rows: Iterable[tuple[str, Number]]) -> None:
        """Add the samples of a metric with one label: its value, and the number."""
        for label, value in rows:
            self.add(name, value, label)

    def add_times(self, name: str, times: Histogram, *labels: str) -> None:
        """Add a histogram."""
        lines, known = self._lines.setdefault(name, []), self._labels(METRICS[name], labels)
        counts, total = list(times.counts), 0
        for bound, count in zip([*_BOUNDS, "+Inf"], counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{known},le="{bound}"}} {total}\n')
        lines.append(f"{name}_sum{{{known}}} {_number(times.sum_ms / 1000.0)}\n")
        lines.append(f"{name}_count{{{known}}} {total}\n")

    def render(self) -> bytes:
        """Return the page."""
        pieces: list[str] = []
        for name, metric in METRICS.items():
            lines = self._lines.get(name)
            if lines:
                text = metric.help.replace("\\", "\\\\")
                pieces.append(f"# HELP {name} {text}\n# TYPE {name} {metric.kind.value}\n")
                pieces += lines
        return "".join(pieces).encode()

    def _labels(self, metric: Metric, values: tuple[str, ...]) -> str:
        names = metric.labels
        if not names:
            assert not values, f"{metric.name} has no labels of its own"
            return self._common
        pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
        return f"{self._common},{','.join(pairs)}"


def sample_names(metric: Metric) -> tuple[str, ...]:
    """Return the names of a metric's samples, as queries use them."""
    if metric.kind is not Kind.HISTOGRAM:
        return (metric.name,)
    return tuple(f"{metric.name}_{part}" for part in ("bucket", "sum", "count"))


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value


def _number(value: Number) -> str:
    return str(int(value)) if isinstance(value, int) else repr(value)
