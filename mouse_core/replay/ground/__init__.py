"""What all parts of a replay buffer stand on: the protocols, rows as they lie in memory, and saved states."""
