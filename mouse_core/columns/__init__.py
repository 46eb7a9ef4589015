"""Rows in memory: the schema of a row, and columns of values."""
