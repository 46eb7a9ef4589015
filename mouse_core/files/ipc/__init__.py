"""Arrow files known by their metadata: where record batches lie, and where the values of columns do."""
