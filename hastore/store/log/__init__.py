"""The commit log: its files, appends, reads, syncs and recovery."""
