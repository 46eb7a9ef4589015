"""Rows in memory: what a row is, and columns that hold rows."""
