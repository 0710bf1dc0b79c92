"""Resources of the worker's host: background threads and readable folders."""
