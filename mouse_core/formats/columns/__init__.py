"""Conversions that readers, writers and inspections share: from values of any format to columns of rows, and back."""
