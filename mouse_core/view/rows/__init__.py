"""Rows for the eye: their columns, pictures and episodes, and curves with fewer points than steps."""
