"""The DLedger mode on real sockets, disks and clocks: links between peers, and the driver."""
