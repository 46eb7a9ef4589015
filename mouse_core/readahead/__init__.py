"""Reading is scheduling: what future batches read is known, and is asked for before it is copied."""
