"""The format of the log's records. Pure: no files, clock or threads."""
