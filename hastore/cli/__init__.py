"""Parse the command line; the work is done elsewhere."""
