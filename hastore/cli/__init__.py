"""The command line: each module parses one command and prints its results."""
