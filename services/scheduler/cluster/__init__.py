"""State of a scheduler: workers, frontends, assignments of sequences, and the properties that all services agree on."""
