"""Files of other tools, read byte by byte: HDF5, NumPy and videos; and the files in a folder that make up its rows."""
