"""The key index: from a message's keys to its records' offsets."""
