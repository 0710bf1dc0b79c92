"""A call of a client, whichever edge it came through: its place, its turn, and what is counted of it."""
