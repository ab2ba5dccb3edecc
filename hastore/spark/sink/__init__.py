"""Write DataFrames to running nodes."""
