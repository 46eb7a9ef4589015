"""The page of a study: one file that shows what was recorded, and loads nothing."""
