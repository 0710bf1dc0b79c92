"""Publication of this scheduler and its prefix caches through Redis, outside of the step path."""
