"""Values whose rows differ in length: text, bytes and ragged arrays."""
