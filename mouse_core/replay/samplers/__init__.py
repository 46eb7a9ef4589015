"""Samplers of a buffer: the rows of a batch."""
