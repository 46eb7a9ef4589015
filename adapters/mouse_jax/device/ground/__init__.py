"""What all of a replay stands on: its pytree, the memory that it lies in, a ring of rows and a tree of weights."""
