"""The demo's Spark query, on a few flights."""

import json

from hastore.demo.spark import CarrierDelays, delays_per_carrier, save_plot
from tests.spark.stores import write_store

FLIGHTS = [
    {"carrier": "UA", "dep_delay": 2, "arr_delay": -11},
    {"carrier": "UA", "dep_delay": 4.0, "arr_delay": None},
    {"carrier": "UA", "dep_delay": "10", "arr_delay": "-1"},
    {"carrier": "UA", "dep_delay": "NA", "arr_delay": "NaN"},
    {"carrier": "AA"},
    {"dep_delay": 7},
]
EXPECTED = [
    CarrierDelays("", 1, 1, 7, 0, 0),
    CarrierDelays("AA", 1, 0, 0, 0, 0),
    CarrierDelays("UA", 4, 3, 16, 2, -12),
]


def test_delays_are_counted_and_summed_by_carrier(spark, tmp_path):
    messages = [
        ("flights", n % 4, {"body": json.dumps(flight).encode()})
        for n, flight in enumerate(FLIGHTS)
    ]
    write_store(tmp_path, messages)
    rows = delays_per_carrier(spark, str(tmp_path), "flights")
    assert rows == EXPECTED
    assert rows[2].mean_departure_delay == 16 / 3
    assert rows[1].mean_arrival_delay is None


def test_the_plot_is_a_png_of_a_size_to_read(tmp_path):
    path = tmp_path / "delays.png"
    save_plot(EXPECTED, str(path))
    raw = path.read_bytes()
    assert raw.startswith(b"\x89PNG\r\n")
    width, height = int.from_bytes(raw[16:20]), int.from_bytes(raw[20:24])
    assert width > 800
    assert height > 200
