"""What rollout groups are on disk: a log of those that wait, parts of those that are sealed, and an index."""
