"""Around what is measured: the machine, its cores and caches, and numbers made of runs."""
