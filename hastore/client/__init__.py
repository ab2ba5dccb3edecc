"""Talk to a group of nodes: Producer, Consumer, Admin."""
