"""Execution of a study: one process per run, records and checkpoints, and the progress display."""
