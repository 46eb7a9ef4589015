"""Stores that lie in a folder: one writer, any number of readers, and files of which none is ever changed."""
