"""Files: HDF5, NumPy, Parquet, TFRecord and videos of other tools, read byte by byte; the parts of jobs."""
