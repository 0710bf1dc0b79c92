"""Client calls, independent of the edge: admission, preparation order, metrics and log lines."""
