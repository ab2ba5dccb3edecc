"""A store read from another process: nothing is written, no lock is taken."""
