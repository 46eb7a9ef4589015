"""What processes that share a mirror have in common: a file of bytes, a table of what is there, and who shares it."""
