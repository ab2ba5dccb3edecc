"""Read hastore logs from Spark."""
