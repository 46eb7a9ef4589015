"""Appended rows in a file that is mapped: what is written is the system's at once, and the disk's when it is asked."""
