"""What is in a buffer's folder beside batches: rollouts by their groups, and the columns that came later."""
