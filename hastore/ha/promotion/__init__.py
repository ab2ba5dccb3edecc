"""How a node becomes master: the survey's verdict, the catch-up, the new epoch."""
