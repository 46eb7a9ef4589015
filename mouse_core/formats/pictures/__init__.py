"""How the pictures of rows are kept, as pixels, as image files or as frames of videos, and changed between these."""
