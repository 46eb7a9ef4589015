"""What every room may use: checks, locks, memos, memory, threads, tracing, progress."""
