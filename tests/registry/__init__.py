"""Tests of hastore/registry."""
