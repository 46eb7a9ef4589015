"""Other formats of recorded data: reading them as rows of steps, and writing them."""
