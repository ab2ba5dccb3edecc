"""The job `export`: the messages of topics as Parquet or Delta, each exactly once."""
