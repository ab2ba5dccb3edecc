"""The job `index`: the consume queues and the key index of a store, built anew from its log."""
