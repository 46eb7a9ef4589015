"""Conformance tests for the parts of a replay buffer."""
