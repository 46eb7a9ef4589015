"""Execution of a study: one process for each run, records, checkpoints, and the progress display."""
