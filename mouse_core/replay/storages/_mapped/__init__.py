"""The files of a MemmapStorage."""
