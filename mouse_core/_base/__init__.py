"""Tools for every package: checks, locks, memos, memory, threads, tracing, progress."""
