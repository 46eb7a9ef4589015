"""Rows in objects elsewhere: what is where is known from metadata, and values are read when they are wanted."""
