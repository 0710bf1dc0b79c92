"""One accepted request until its end: its samples, and what an edge reads of them."""
