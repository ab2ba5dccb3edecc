"""Build the consume queues and the key index of a store anew from its log, in parallel."""
