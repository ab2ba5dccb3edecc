"""The jobs of `hastore pipeline`, as functions over a Spark session."""
