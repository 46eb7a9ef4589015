"""Direct access to Arrow's memory: locating columns, mapping windows to chunks, and copying values."""
