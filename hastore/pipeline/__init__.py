"""The jobs of `hastore pipeline`, on Spark: export, index, audit, stats and compact."""
