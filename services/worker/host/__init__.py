"""What a worker has of its host: threads for jobs, and the folders that it may read."""
