"""Replace damaged bytes of a log by those of another node, in place; nothing is ever cut."""
