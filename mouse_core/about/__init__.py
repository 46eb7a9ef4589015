"""What a dataset says of itself, and how that travels with it: in Arrow and Parquet files, and through ``datasets``.

One text says all of it, ``mouse_data: {"version": 1, ...}``, and is kept wherever something survives:

- in the schema's metadata under the key ``mouse_data``, as Arrow and Parquet files and tables carry it;
- as a line of a dataset's description, which saving, ``map``, ``select`` and ``cast`` keep;
- in the ``id`` of a column's feature, ``done`` first, which is all that ``datasets`` writes to Parquet and to the Hub.
"""

from mouse_core.about.dataset import KEY, About, joined, read_about, with_about
from mouse_core.about.recording import Recording

__all__ = ["KEY", "About", "Recording", "joined", "read_about", "with_about"]
