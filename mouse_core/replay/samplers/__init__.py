"""Which rows of a buffer a batch has."""
