"""What is wrong with single dimensions, with parts of the rows, with the order of them, and with episodes."""
