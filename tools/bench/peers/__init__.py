"""Programs that make other engines do the same work. They run in those engines' environments."""
