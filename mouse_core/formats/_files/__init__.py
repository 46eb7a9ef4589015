"""Files of other tools, byte by byte: HDF5, NumPy, Parquet, TFRecord, video."""
