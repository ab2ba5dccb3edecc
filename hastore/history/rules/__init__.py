"""The rules of the history checker: events in, findings out; pure. See docs/reliability.md."""
