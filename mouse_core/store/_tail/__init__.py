"""Appended rows: columns that grow, and how they become a segment."""
