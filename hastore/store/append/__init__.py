"""The master's append of puts: validate, deduplicate, assign queue offsets, write."""
