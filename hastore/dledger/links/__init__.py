"""The links between the nodes of a DLedger group, over the `ha` port (docs/dledger.md)."""
