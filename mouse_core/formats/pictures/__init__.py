"""Storage of pictures in rows, as pixels, image files or video frames, and conversion between these."""
