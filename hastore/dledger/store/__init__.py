"""The entry stores of the DLedger mode: mapped files and memory."""
