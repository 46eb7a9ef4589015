"""Files of other tools, read byte by byte: HDF5, NumPy and videos; and the selection of the data files of a folder."""
