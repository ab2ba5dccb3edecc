"""The record of the log: pure functions from bytes to values and back, no file, clock or thread."""
