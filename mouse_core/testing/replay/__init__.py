"""Contracts of the parts of a replay buffer, as tests."""
