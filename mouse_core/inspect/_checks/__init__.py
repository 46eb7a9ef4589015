"""Checks of single dimensions, of parts of the rows, of the order of rows, and of episodes."""
