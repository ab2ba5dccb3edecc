"""The walks of replay: pure code that turns the log's bytes into records and columns."""
