"""What an optimizer does, read from its updates alone; it knows no framework."""
