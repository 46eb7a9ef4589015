"""What replays and rollouts on a device stand on: memory, episodes, orders and weights."""
