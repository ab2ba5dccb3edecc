"""The job `compact`: the latest message of each key of a topic."""
