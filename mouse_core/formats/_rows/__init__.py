"""Turning what a format holds into rows of a store."""
