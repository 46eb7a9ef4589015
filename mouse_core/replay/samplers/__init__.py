"""Samplers, which choose the rows of a batch."""
