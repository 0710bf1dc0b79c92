"""What is read in Redis: which schedulers there are, and where the beginning of a prompt is cached."""
