"""Examples to train on: made of rollouts, and put side by side in arrays."""
