"""What a query asks for: options, offsets, times, and the ranges of its tasks. Pure."""
