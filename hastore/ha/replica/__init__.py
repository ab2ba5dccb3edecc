"""Match this node's log with another node's: append its bytes, cut back, compare digests."""
