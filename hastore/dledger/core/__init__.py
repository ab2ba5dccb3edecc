"""The rules of DLedger as a state machine: no clock, thread, socket or file."""
