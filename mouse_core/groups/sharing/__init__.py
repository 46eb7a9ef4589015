"""A rollout buffer for other processes of this machine: what answers them, and their client."""
