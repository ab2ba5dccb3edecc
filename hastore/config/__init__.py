"""A node's configuration: the typed model, its checks, and the file that it is read from."""
