"""The format of the log's records. This package uses no files, clock or threads."""
