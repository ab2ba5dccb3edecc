"""The record of the log. Pure: bytes to values and back, without files, clock or threads."""
