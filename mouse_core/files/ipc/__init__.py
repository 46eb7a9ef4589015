"""Arrow files described by their metadata: the positions of record batches and of the values of columns."""
