"""The typed configuration, its checks and its file."""
