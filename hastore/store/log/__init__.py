"""The commit log: its mapped files, appends, syncs, recovery and retention."""
