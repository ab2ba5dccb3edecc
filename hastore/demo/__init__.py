"""The demo: a pair on real data, a kill, a flip and the proof (`make run`)."""
