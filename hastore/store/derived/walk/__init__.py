"""The walks of replay: from the log's bytes to records and columns. Pure."""
