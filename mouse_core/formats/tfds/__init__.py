"""TFDS: datasets of RLDS episodes, read and written without TensorFlow."""

from mouse_core.formats.tfds.reading import read_tfds, write_tfds

__all__ = ["read_tfds", "write_tfds"]
