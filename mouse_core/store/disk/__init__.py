"""Stores in a folder: one writer, any number of readers, and files that never change."""
