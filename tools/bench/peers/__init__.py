"""Helper programs that make other engines run the same workload, in those engines' environments."""
