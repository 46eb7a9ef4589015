"""How a study runs: a process for each run, its records and checkpoints, and what is shown meanwhile."""
