"""A function of one's own over all rows of a dataset, in several processes, into a new dataset."""

from mouse_core.formats.preprocessing.running import Preprocessed, preprocess

__all__ = ["Preprocessed", "preprocess"]
