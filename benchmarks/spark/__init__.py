"""The figures of the Spark side: `python -m benchmarks.spark`."""
