"""Reading memory that Arrow owns: where columns lie, which windows touch which chunks, copying them."""
