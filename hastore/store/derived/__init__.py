"""Everything derived from the log, and the contract by which replay feeds it."""
