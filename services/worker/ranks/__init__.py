"""A replica is a group of ranks: the plan reaches all of them, and rank 0 answers the scheduler."""
