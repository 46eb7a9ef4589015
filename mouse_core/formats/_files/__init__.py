"""Readers of files of other tools (HDF5, NumPy, zarr), and the selection of the data files in a folder."""
