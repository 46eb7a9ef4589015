"""Where the rows of a buffer lie."""
