"""The key index: from a message's keys to its places in the log."""
