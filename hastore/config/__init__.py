"""A node's configuration: the typed model, its checks, and the file it is read from."""
