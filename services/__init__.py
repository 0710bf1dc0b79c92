"""The services of a cluster: the frontend, the scheduler and the worker, each a package and a process of its own."""
