"""Where episodes begin and end among the rows of a buffer, and which windows fit into them."""
