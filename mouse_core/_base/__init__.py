"""What every room may use: casting, files, locks, memory, nested values, threads, progress."""
