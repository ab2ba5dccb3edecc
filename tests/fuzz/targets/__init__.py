"""One module for each target: what it reads, its seeds, and what must hold for every input."""
