"""The DLedger mode: a group that elects its leader and commits by majority."""
