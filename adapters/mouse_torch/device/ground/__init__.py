"""Parts of replays and rollouts on a device: memory, episodes, orders and weights."""
