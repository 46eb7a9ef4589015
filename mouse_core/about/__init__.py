"""Metadata of datasets, and how Arrow and Parquet files and ``datasets`` keep it.

The metadata is one text, ``mouse_data: {"version": 1, ...}``, in each place that survives some operation:

- the schema's metadata under the key ``mouse_data``, which Arrow and Parquet files and tables keep;
- a line of a dataset's description, which saving, ``map``, ``select`` and ``cast`` keep;
- the ``id`` of a column's feature, first of ``done``: all that ``datasets`` writes to Parquet and to the Hub.
"""

from mouse_core.about.dataset import KEY, About, Recording, joined, read_about, with_about

__all__ = ["KEY", "About", "Recording", "joined", "read_about", "with_about"]
