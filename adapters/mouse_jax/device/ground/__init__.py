"""Parts of a replay: its pytree, its memory, a ring of rows and a tree of weights."""
