"""The way of a put in the master's store: validate, deduplicate, give out queue offsets, append."""
