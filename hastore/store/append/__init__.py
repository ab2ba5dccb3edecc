"""What a master does with a put: validate, deduplicate, give out queue offsets, append."""
