"""Read a store from another process, without a lock and without writing."""
